"""Knobs for several ranks, host memory and quantized weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tandem.config.knob import RL, knob

OptimizerStates = Literal["fp32", "bf16", "8bit"]
"""How AdamW's moments are kept (`parallel.optimizer_states`)."""
Recompute = Literal["layers", "mlp", "attention"]
"""What gradient checkpointing computes again (`recompute`)."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How weights and work are distributed over the ranks. ZeRO stages have no effect on one
    rank."""

    actor_zero_stage: int = knob(2, ge=0, le=3, common=("train", "actor"))
    """ZeRO stage (arXiv:1910.02054) of the policy: 0 replicates everything on every rank; 1 shards
    optimizer states, and weights between steps; 2 shards gradients too; 3 shards weights always and
    gathers each block when it runs. The reference is sharded at 3."""
    critic_zero_stage: int = knob(2, ge=0, le=3, common=("train", "critic"))
    """The same for critic and reward model; PPO's frozen reward model is sharded at 3."""
    replicas: int = knob(1, ge=1, common=True)
    """Copies of what ZeRO shards (HSDP, arXiv:2304.11277): ranks / replicas ranks share each copy,
    and gradients are summed over the copies. One copy per node keeps every gather inside a node and
    takes that many times the memory; 1 takes the least memory."""
    offload: tuple[Literal["optimizer", "params", "reference", "reward"], ...] = knob(
        (), common=True
    )
    """What is kept in host memory: `optimizer` the optimizer states and fp32 masters of every
    trained model, which are also updated there (ZeRO-Offload, arXiv:2101.06840); `params` the
    trained weights too, each block loaded when it runs; `reference`, `reward` those frozen
    models."""
    optimizer_states: Literal["fp32", "bf16", "8bit"] = knob("fp32")
    """AdamW's two moments: `fp32` 8 bytes per weight; `bf16` 4; `8bit` 2.03, with a scale per 256
    weights; both rounded stochastically. Masters stay fp32. A run may be continued with another."""
    offload_gradients: bool = knob(True)
    """With offload optimizer: send each gradient to the host during the backward pass and sum it
    there, 4 bytes per weight. Off: sum on the GPU and send the sum once, for hosts with too little
    memory. Whole weights on several ranks are always summed on the GPU."""
    offload_share: float = knob(1.0, gt=0, le=1)
    """Share of the optimizer's states that offload optimizer keeps on the host. The rest stays on
    the GPU, which updates it while the host updates its own: 12 bytes per weight for less time."""
    zero_hpz: bool = knob(False)
    """ZeRO++ (arXiv:2306.10209): keep a second copy, sharded within each node, from forward to
    backward, so that the backward pass gathers inside the node. For ZeRO stage 3 on several
    nodes."""
    zero_quantized_weights: bool = knob(False)
    """ZeRO++: gather weights as int8 in training, scoring and generation; the stored weights stay
    exact. For ZeRO stages 1 to 3 on several nodes."""
    zero_quantized_gradients: bool = knob(False)
    """ZeRO++: sum gradients as int8 in two hops, inside each node, then between nodes. For ZeRO
    stages 1 to 3 on several nodes."""
    zero_gradient_bits: Literal[8, 4] = knob(8)
    """Bits of a quantized gradient between nodes. 4 uses error feedback (arXiv:1901.09847), which
    takes 4 bytes per weight / ranks_per_node on each rank."""
    zero_forced: bool = knob(False)
    """Quantize on one node too, where it is no help and off by default."""
    inference_tp_size: int = knob(1, ge=1, common=RL)
    """Tensor-parallel ranks during generation, for models that do not fit on one; 1 gathers the
    whole model. The slices are made from the training shards. Must divide the attention heads, and
    key/value heads or be a multiple of them, which ranks then hold copies of."""
    frozen_weights: Literal["", "int8", "nf4"] = knob("", common=True)
    """MixZ++: store and send frozen linear weights quantized, as `int8` (1.02 bytes per weight) or
    `nf4` (0.53), and dequantize them on use; empty: full precision. Needs lora.rank. Later stages
    continue an earlier stage's adapters instead of its merged weights."""
    shared_base: bool = knob(False, common=("train", "pairs", "rl"))
    """Share one frozen base between actor, critic, reference and reward model, which then differ
    only in adapters and heads and must start from one model. Needs lora.rank, and ZeRO stage 0 on
    several ranks. Adapters are continued as with frozen_weights."""
    ranks_per_node: int = knob(0, ge=0)
    """Ranks that share a fast network; 0: as the launcher says."""
    timeout_minutes: float = knob(30.0, gt=0)
    """How long a collective waits for a rank before the run stops and names it."""


def offload_problems(parallel: ParallelConfig) -> Iterator[str]:
    """Rules for what is kept in host memory."""
    offload = parallel.offload
    if parallel.offload_share < 1 and ("optimizer" not in offload or "params" in offload):
        yield (
            "parallel.offload_share must be 1 unless parallel.offload has optimizer, and not "
            f"params, whose optimizer is where they are; got {parallel.offload_share:g} "
            f"with offload {' '.join(offload) or 'empty'}. Add --offload optimizer, or remove it"
        )
