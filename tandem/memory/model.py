"""The memory that a step needs per rank and role, in closed form.

Mixed-precision AdamW after ZeRO (arXiv:1910.02054, section 3.1 and figure 1), with Tandem's sizes:
weights are in the compute type of c bytes, and P weights of which T are trained cost

    weights c P    masters 4 T    gradients 4 T    AdamW a T    moving average 4 T    bytes

on one rank, where a is 8, or 4 or 2.03 with smaller moments. Float32 weights, and trained ones in
pieces, are their own masters. ZeRO stages divide by the ranks: AdamW and resident weights from 1
on, gradients from 2 on; below stage 3 weights are whole while a model runs. `work` counts
activations, logits and KV memory.

Not counted: the process before a model is loaded, fragmentation, rounding of pieces to whole rows,
and routing in mixtures of experts. `bench/memory.py` compares this with measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from tandem.config.dataset import CONTROL
from tandem.config.engine import EngineSettings
from tandem.config.lora import TrainedRole
from tandem.config.parallel import OptimizerStates, ParallelConfig, Recompute
from tandem.memory.dimensions import Shape

FrozenKind = Literal["", "int8", "nf4"]
FROZEN_BYTES: dict[FrozenKind, float] = {"": 4.0, "int8": 1 + 4 / 256, "nf4": 0.5 + 2 / 64}
"""Bytes per frozen linear weight: int8 in blocks of 256 with a float32 scale, NF4 in blocks of 64
with a bfloat16 one (arXiv:2305.14314)."""
FROZEN_BLOCKS: dict[FrozenKind, int] = {"": 1, "int8": 256, "nf4": 64}
"""Weights that have one scale."""

Bytes = dict[str, float]

FLOAT = 4
STATE_BYTES: dict[OptimizerStates, float] = {"fp32": 8, "bf16": 4, "8bit": 2 * (1 + 4 / 256)}
"""Bytes of AdamW's two moments per trained weight; in 8 bits with a float32 scale per 256."""
_CONTROL_TOKENS = 8
"""Control tokens that a chat template is taken to have, before its tokenizer is read: most have
fewer, and a row of 4,096 numbers takes 64 KiB with its gradient and optimizer."""
_GATHERED_AT_ONCE = 2
"""Blocks with whole weights at stage 3, the running one and the next; and those in flight where all
are gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one model is placed.

    replicas: copies of what is split, each over ranks / replicas. stage: ZeRO's, 0 to 3. half:
    computes in two bytes, else in four. is_trained: has gradients. lora_rank: 0 trains all weights.
    frozen: type of frozen linear weights. shares_base: the frozen base is another model's, which
    counts it. offload_params: weights are in host memory; trained ones are split as at stage 3.
    moving_average: of what is trained, in float32. on_cpu: the host is the device.
    reference_rate: of a reference that follows it (`reference.update_rate`), 0 if it stays.
    optimizer_states: how AdamW's moments are kept. offload_gradients: they are summed on the host
    if its optimizer is there. recompute: what checkpointing recomputes. offload_share: of the
    optimizer's states that are on the host. lora_drops: adapters have dropout. token_rows: tokens
    whose rows are trained beside adapters. feedback: ranks among which the rounding errors of int4
    gradients are split, 0 where none are kept. second_copy: ranks among which blocks are split from
    forward to backward (hpZ), 0 where they are pieces of all ranks again.
    """

    ranks: int = 1
    replicas: int = 1
    stage: int = 0
    half: bool = False
    is_trained: bool = True
    lora_rank: int = 0
    frozen: FrozenKind = ""
    shares_base: bool = False
    offload_optimizer: bool = False
    offload_params: bool = False
    moving_average: bool = False
    reference_rate: float = 0.0
    checkpointing: bool = False
    on_cpu: bool = False
    optimizer_states: OptimizerStates = "fp32"
    offload_gradients: bool = True
    offload_share: float = 1.0
    recompute: Recompute = "layers"
    lora_drops: bool = False
    token_rows: int = 0
    feedback: int = 0
    second_copy: int = 0

    @property
    def is_split(self) -> bool:
        """Whether weights are in pieces between steps; frozen ones are from stage 3 on."""
        if self.is_trained and self.offload_params:
            return True
        return self.ranks > 1 and self.stage >= (1 if self.is_trained else 3)

    @property
    def pieces(self) -> int:
        """Ranks that a model is split over."""
        return max(1, self.ranks // self.replicas)

    @property
    def gathers_blocks(self) -> bool:
        """Whether split weights are gathered block by block, not all at once."""
        return self.stage == 3 or self.offload_params

    @property
    def has_masters_on_host(self) -> bool:
        """Whether the optimizer keeps weights of its own on the host."""
        return self.offload_optimizer and not self.offload_params

    @property
    def has_gradients_on_host(self) -> bool:
        """Whether gradients leave the GPU; whole ones that are summed over ranks stay."""
        leaves = self.offload_gradients and (self.ranks == 1 or self.is_split)
        return self.has_masters_on_host and leaves and not self.on_cpu

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer keeps float32 values beside the weights."""
        return self.has_masters_on_host or (self.half and not self.is_split)

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number of the compute type."""
        return 2 if self.half else FLOAT


def layout_of(
    settings: EngineSettings,
    ranks: int,
    role: TrainedRole,
    *,
    on_cpu: bool,
    half: bool,
    per_node: int | None = None,
    average: bool = False,
    reference_rate: float = 0.0,
) -> Layout:
    """How a trained model of a run is placed.

    Args:
        role: with its own ZeRO stage, adapters and checkpointing. on_cpu: the host computes.
        half: in two bytes. per_node: ranks that share a node (None: all), unless the
            configuration says it. average: it has a moving average. reference_rate: as of `Layout`.
    """
    parallel, lora = settings.parallel, settings.lora.of(role)
    tokens = lora.train_tokens if lora.rank else ()
    node = parallel.ranks_per_node or min(ranks, per_node or ranks)
    return Layout(
        ranks=ranks,
        replicas=parallel.replicas,
        stage=parallel.actor_zero_stage if role == "actor" else parallel.critic_zero_stage,
        half=half,
        lora_rank=lora.rank,
        frozen=parallel.frozen_weights,
        shares_base=parallel.shared_base,
        offload_optimizer="optimizer" in parallel.offload,
        offload_params="params" in parallel.offload,
        optimizer_states=parallel.optimizer_states,
        offload_gradients=parallel.offload_gradients,
        on_cpu=on_cpu,
        moving_average=average,
        reference_rate=reference_rate,
        checkpointing=role in settings.checkpointed,
        recompute=settings.recompute,
        offload_share=parallel.offload_share,
        lora_drops=lora.dropout > 0,
        token_rows=sum(_CONTROL_TOKENS if name == CONTROL else 1 for name in tokens),
        feedback=_feedback(parallel, ranks, node),
        second_copy=node if parallel.zero_hpz and 1 < node < ranks else 0,
    )


def _feedback(parallel: ParallelConfig, ranks: int, node: int) -> int:
    """`Layout.feedback`: only the hop that sends int4 keeps its errors, between nodes those of what
    a node has summed, within a single one (`zero_forced`) those of every weight."""
    if not parallel.zero_quantized_gradients or parallel.zero_gradient_bits != 4:
        return 0
    return node if node < ranks else int(parallel.zero_forced and ranks > 1)


@dataclass(frozen=True, slots=True)
class Role:
    """One model's bytes on one rank.

    resting: always on the device. host: in host memory beside a GPU. working: on the device only
    while this model runs. backward: in addition, only while it trains. moments: of resting, those
    of the optimizer, which the first update makes.
    """

    resting: Bytes
    host: Bytes
    working: Bytes
    backward: Bytes
    moments: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes per rank of one step.

    resting: in every phase, by `role: name`. phases: what each adds, by name. loading: while models
    are read and checked. host: in host memory beside a GPU. moments: of resting, those of all
    optimizers, which the first update makes.
    """

    resting: Bytes
    phases: dict[str, Bytes]
    loading: Bytes = field(default_factory=dict)
    host: Bytes = field(default_factory=dict)
    moments: float = 0.0

    def peak(self, phase: str) -> int:
        """The most bytes in use in a phase, or in `load`."""
        if phase == "load":
            return round(sum(self.loading.values()))
        return round(sum(self.resting.values()) + sum(self.phases[phase].values()))


def trained_parameters(shape: Shape, layout: Layout) -> int:
    """Weights with a gradient: all, or adapters and a scalar head."""
    if not layout.is_trained:
        return 0
    if layout.lora_rank == 0:
        return shape.parameters
    return beside_base(shape, layout) + (shape.width if shape.is_scalar else 0)


def beside_base(shape: Shape, layout: Layout) -> int:
    """Numbers of the adapters, and of the trained rows of an embedding and a head of its own."""
    matrices = 2 if shape.untied_head and not shape.is_scalar else 1
    return shape.adapters(layout.lora_rank) + layout.token_rows * shape.width * matrices


def quantized_weights(shape: Shape, layout: Layout) -> int:
    """Elements that are stored as integers."""
    is_frozen = not layout.is_trained or layout.lora_rank > 0
    return shape.linear_weights + shape.untied_head if is_frozen and layout.frozen else 0


def weight_bytes(shape: Shape, layout: Layout, size: int = FLOAT) -> float:
    """All weights of one whole model as stored or sent: integers, and numbers of `size` bytes."""
    adapters = beside_base(shape, layout) if layout.is_trained or layout.shares_base else 0
    quantized = quantized_weights(shape, layout)
    plain = shape.parameters + adapters - quantized
    return quantized * FROZEN_BYTES[layout.frozen] + plain * size


def role_memory(shape: Shape, layout: Layout) -> Role:
    """One model's weights, gradients and optimizer states on one rank."""
    trained = trained_parameters(shape, layout)
    pieces = layout.pieces if layout.is_split else 1
    device: Bytes = {}
    host: Bytes = device if layout.on_cpu else {}
    (host if layout.offload_params else device)["weights"] = _resting(shape, layout) / pieces
    moments = STATE_BYTES[layout.optimizer_states] * trained / pieces
    is_on_host = layout.offload_optimizer or layout.offload_params
    here = 1.0 if layout.on_cpu or not is_on_host else 1 - layout.offload_share
    if trained:
        states = {"AdamW": moments}
        if layout.has_masters:
            states["masters"] = FLOAT * trained / pieces
        if layout.has_gradients_on_host:
            states["gradients kept"] = FLOAT * trained / pieces
        if 0 < here < 1:
            beside = {k: v for k, v in states.items() if layout.half or k != "masters"}
            device |= {f"{name} on the GPU": here * b for name, b in beside.items()}
            states = {name: layout.offload_share * b for name, b in states.items()}
        (host if is_on_host else device).update(states)
        device |= _rounding_errors(layout, trained)
        if layout.moving_average:
            average = {"moving average": FLOAT * trained / pieces}
            (host if is_on_host else device).update(average)
        beside = reference_bytes(shape, layout)
        is_there = layout.offload_params if layout.lora_rank else is_on_host
        (host if is_there else device).update(beside)
    backward = _gradients(shape, layout, trained) if trained else {}
    beside_gpu = {} if layout.on_cpu else host
    return Role(device, beside_gpu, working_bytes(shape, layout), backward, here * moments)


def _rounding_errors(layout: Layout, trained: float) -> Bytes:
    """Float32 error feedback of int4 gradients, from the first backward pass on."""
    if not layout.feedback or not layout.is_split:
        return {}
    return {"gradients' rounding errors": FLOAT * trained / layout.feedback}


def reference_bytes(shape: Shape, layout: Layout) -> Bytes:
    """What a reference that follows the model takes beside the frozen model that it is without
    LoRA: adapters of its own, or the mixture, unless the reference itself can hold it."""
    trained, pieces = trained_parameters(shape, layout), layout.pieces if layout.is_split else 1
    if not layout.reference_rate:
        return {}
    if layout.lora_rank:
        return {"reference's adapters": layout.compute_bytes * trained / pieces}
    is_exact = not layout.half and layout.is_split == replace(layout, is_trained=False).is_split
    if layout.reference_rate == 1 or is_exact:
        return {}
    return {"reference's average": FLOAT * trained / pieces}


def _resting(shape: Shape, layout: Layout) -> float:
    size = layout.compute_bytes
    if layout.shares_base:
        head = shape.width if shape.is_scalar else 0
        return float(size * (beside_base(shape, layout) + head))
    weights = weight_bytes(shape, layout, size)
    if layout.is_split:  # pieces that are trained are the masters themselves
        weights += (FLOAT - size) * trained_parameters(shape, layout)
    return weights


def working_bytes(shape: Shape, layout: Layout, *, at_once: bool = False) -> Bytes:
    """Weights made whole, or dequantized, while the model computes.

    Args:
        at_once: all blocks are gathered together, whatever the stage.
    """
    quantized = quantized_weights(shape, layout)
    working: Bytes = {}
    if quantized:
        most = max(shape.largest_linear, shape.untied_head)
        if shape.whole_blocks and layout.on_cpu:  # all behind attention together
            most = max(most, shape.width * (shape.query_width + 3 * shape.inner))
        working["dequantized weights"] = layout.compute_bytes * most
    if layout.is_split:
        gathered = weight_bytes(shape, layout, layout.compute_bytes)
        if layout.gathers_blocks and not at_once:
            gathered = _blocks_at_once(shape, layout, layout.compute_bytes)
            if layout.second_copy:
                in_blocks = _bytes_in_blocks(shape, layout, layout.compute_bytes)
                working["second copy in the node"] = in_blocks / layout.second_copy
        return working | {"gathered weights": gathered}
    if layout.offload_params and not layout.on_cpu:
        working["fetched blocks"] = _blocks_at_once(shape, layout, layout.compute_bytes)
    return working


def checkpoint_bytes(layouts: Iterable[tuple[Shape, Layout]], *, whole: bool = False) -> float:
    """Of a checkpoint's tensors of trained models, at most, on one rank (`whole`: on all): weights
    or masters, moments, an average, a reference that follows, rounding errors of gradients."""
    kept = 0.0
    for shape, layout in layouts:
        trained = trained_parameters(shape, layout)
        pieces = layout.pieces if layout.is_split and not whole else 1
        kept += _kept_per_weight(layout) * trained / pieces
        kept += sum(_rounding_errors(layout, trained).values()) * (layout.ranks if whole else 1)
    return kept


def _kept_per_weight(layout: Layout) -> int:
    size = FLOAT * (3 + layout.moving_average)
    if layout.reference_rate:
        size += layout.compute_bytes if layout.reference_rate == 1 else FLOAT
    return size


def in_flight_bytes(shape: Shape, layout: Layout) -> float:
    """Buffers of the blocks that are being gathered."""
    if not layout.is_split or not shape.blocks:
        return 0.0
    blocks = _blocks_at_once(shape, layout, layout.compute_bytes)
    return blocks - layout.compute_bytes * shape.outside_blocks


def _blocks_at_once(shape: Shape, layout: Layout, size: int) -> float:
    """Bytes of two blocks and of what is outside blocks, in numbers of `size` bytes."""
    share = _GATHERED_AT_ONCE / max(1, len(shape.blocks))
    return size * shape.outside_blocks + share * _bytes_in_blocks(shape, layout, size)


def _bytes_in_blocks(shape: Shape, layout: Layout, size: int) -> float:
    return weight_bytes(shape, layout, size) - size * shape.outside_blocks


def _gradients(shape: Shape, layout: Layout, trained: int) -> Bytes:
    """Gradients, and those of one weight or unit in flight."""
    if not layout.is_split:
        whole = layout.lora_rank == 0
        under_way = layout.compute_bytes * shape.largest
        if layout.has_gradients_on_host:
            # They are copied to the host one by one.
            return {"gradient under way": under_way if whole else 0}
        # A whole gradient is added to the sum of earlier micro-batches.
        return {"gradients": FLOAT * trained, "gradient under way": under_way if whole else 0}
    unit = FLOAT * _largest_unit(shape, layout)
    if layout.stage == 1 and not layout.offload_params:
        return {"gradients": FLOAT * trained, "gradients being reduced": unit}
    pieces = 0.0 if layout.offload_params and not layout.on_cpu else FLOAT * trained / layout.pieces
    # Whole gradients of a unit, and their copy in the order in which they are sent.
    return {"gradients": pieces, "gradients being reduced": 2 * unit}


def _largest_unit(shape: Shape, layout: Layout) -> float:
    """Trained elements of the largest unit that is gathered at once."""
    if layout.lora_rank:
        return shape.adapters(layout.lora_rank) / max(1, shape.layers)
    return shape.largest_unit
