"""The knobs of many ranks, of memory beyond one device, and of weights in few bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tandem.config.knob import RL, knob


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How weights and work lie over the ranks. At one rank the stages mean nothing."""

    actor_zero_stage: int = knob(2, ge=0, le=3, common=("train", "actor"))
    """ZeRO stage (arXiv:1910.02054) of the policy, in every step: 0 whole on every rank; 1
    optimizer states and weights in pieces between steps; 2 gradients too; 3 weights always, a block
    being gathered when it runs. The reference is split from 3 on."""
    critic_zero_stage: int = knob(2, ge=0, le=3, common=("train", "critic"))
    """The same for critic and reward model; the reward model of step 3 is split from 3 on."""
    replicas: int = knob(1, ge=1, common=True)
    """Copies of what ZeRO splits (HSDP, arXiv:2304.11277): ranks / replicas split a model among
    them, and gradients are summed over the copies. As many as nodes keeps every gather inside one,
    for as many times the memory; 1 takes the least memory, which decides what fits."""
    offload: tuple[Literal["optimizer", "params", "reference", "reward"], ...] = knob(
        (), common=True
    )
    """What rests in host memory: `optimizer` its states and the fp32 masters of every trained
    model, the update computed there (ZeRO-Offload, arXiv:2101.06840); `params` the trained weights
    too, a block coming up when it runs; `reference`, `reward` those frozen models."""
    zero_hpz: bool = knob(False)
    """ZeRO++ (arXiv:2306.10209): keep a second copy in pieces within each node from forward to
    backward, so that the backward's gathers stay inside it. For stage 3 over several nodes."""
    zero_quantized_weights: bool = knob(False)
    """ZeRO++: weights are gathered as int8, in training, scoring and generation alike; the weights
    that are kept stay exact. For stage 1 to 3 over several nodes."""
    zero_quantized_gradients: bool = knob(False)
    """ZeRO++: gradients are summed in two hops, inside a node and then between nodes, as int8. For
    stage 1 to 3 over several nodes."""
    zero_gradient_bits: Literal[8, 4] = knob(8)
    """Bits of a quantized gradient between nodes. 4 feeds back what rounding left out
    (arXiv:1901.09847), for which a rank keeps 4 bytes per weight / ranks_per_node."""
    zero_forced: bool = knob(False)
    """Quantize on one node too, where it does not help and is otherwise off."""
    inference_tp_size: int = knob(1, ge=1, common=RL)
    """Ranks that hold slices of one model while it generates (tensor parallelism), where the whole
    does not fit on each; 1 gathers it whole. Made from the same pieces that train."""
    frozen_weights: Literal["", "int8", "nf4"] = knob("", common=True)
    """MixZ++: linear weights that are not trained rest and travel as integers, `int8` 1.02 bytes a
    weight or `nf4` 0.53, and are unpacked where they are used; empty keeps them in full. Needs
    lora.rank. Later steps carry an earlier step's adapters on instead of its merged weights."""
    shared_base: bool = knob(False, common=("train", "pairs", "rl"))
    """Hold one frozen base under actor, critic, reference and reward model, which differ in
    adapters and heads alone; they must start from one model. Needs lora.rank, and ZeRO stage 0
    where there are several ranks. Adapters are carried on as with frozen_weights."""
    ranks_per_node: int = knob(0, ge=0)
    """Ranks that share a fast network; 0 takes the launcher's."""
    timeout_minutes: float = knob(30.0, gt=0)
    """How long a collective waits for a rank before the run ends with its name."""


def frozen_base_problems(parallel: ParallelConfig, lora_rank: int) -> Iterator[str]:
    """Rules of bases that stay frozen, at any number of ranks."""
    for name in ("frozen_weights", "shared_base"):
        if getattr(parallel, name) and lora_rank == 0:
            yield (
                f"parallel.{name} must go with LoRA, whose base stays frozen; got lora.rank 0, "
                "which trains all weights. Set --lora-rank"
            )
    if parallel.frozen_weights and parallel.inference_tp_size > 1:
        yield (
            "parallel.frozen_weights must go without tensor-parallel generation, which slices "
            f"full weights; got parallel.inference_tp_size {parallel.inference_tp_size}. Use one "
            "of the two"
        )
    moved = [name for name in ("params", "reward") if name in parallel.offload]
    if parallel.shared_base and moved:
        yield (
            "parallel.shared_base must stay where all its models run; got parallel.offload "
            f"{' '.join(moved)}. Offload the optimizer alone, or leave --shared-base off"
        )
