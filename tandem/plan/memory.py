"""What a step needs of memory, per rank and role, in closed form.

Mixed-precision AdamW after ZeRO (arXiv:1910.02054, section 3.1 and figure 1), with Tandem's sizes:
weights rest in float32, so they are their own masters, and P weights of which T are trained cost

    weights 4 P    gradients 4 T    AdamW 8 T    moving average 4 T        bytes on one rank

of which `ZeRO` stages divide by the ranks: AdamW and resting weights from 1 on, gradients from 2
on; before stage 3 weights are whole again while a model is at work. What is not of the weights:
activations after arXiv:2205.05198 (section 4.1), counted anew for this code's operations, the
chunk of vocabulary logits, and KV memory of a rollout.

Not counted: what the process holds before a model is there, the allocator's fragments, rounding of
pieces to whole rows, and mixtures of experts' routing. `bench/memory.py` holds this against
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tandem.generate.blocks import blocks_for
from tandem.generate.session import PREFILL_TOKENS
from tandem.objectives.logprobs import DEFAULT_CHUNK_ELEMENTS
from tandem.ops.steps import BLOCK_TOKENS
from tandem.plan.shape import Shape

FrozenKind = Literal["none", "int8", "nf4"]
FROZEN_BYTES: dict[FrozenKind, float] = {"none": 4.0, "int8": 1 + 4 / 256, "nf4": 0.5 + 2 / 64}
"""Bytes per frozen linear weight: int8 in blocks of 256 with a float32 scale, NF4 in blocks of 64
with a bfloat16 one (arXiv:2305.14314)."""

Bytes = dict[str, float]

_ADAMW_BYTES, _FLOAT = 8, 4
_GATHERED_AT_ONCE = 2
"""Blocks whose weights are whole at stage 3: the one that runs and the one that comes next."""
_HALF_COPIES = 3
"""Tensors of the model's width that a layer keeps twice, in float32 and in the compute type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one model lies over the ranks.

    stage: ZeRO's, 0 to 3. half: computes in two bytes, else in four. is_trained: has gradients.
    lora_rank: 0 trains all weights. frozen: how frozen linear weights rest. accumulates: more than
    one micro-batch per optimizer step. moving_average: of what is trained, in float32.
    """

    ranks: int = 1
    stage: int = 0
    half: bool = False
    is_trained: bool = True
    lora_rank: int = 0
    frozen: FrozenKind = "none"
    offload_optimizer: bool = False
    offload_params: bool = False
    accumulates: bool = True
    moving_average: bool = False
    checkpointing: bool = False

    @property
    def is_split(self) -> bool:
        """Whether weights lie in pieces between steps; frozen ones only do from stage 3 on."""
        return self.ranks > 1 and self.stage >= (1 if self.is_trained else 3)

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number that is computed with."""
        return 2 if self.half else _FLOAT


@dataclass(frozen=True, slots=True)
class Role:
    """One model's bytes on one rank.

    resting: on the device, whatever runs. host: in the host's memory, where that is another.
    working: on the device only while this model runs. backward: beside those, only while it is
    trained.
    """

    resting: Bytes
    host: Bytes
    working: Bytes
    backward: Bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes per rank of one step.

    resting: what is there in every phase, by `role: name`. phases: what each adds to it, by name.
    loading: weights alone, when no optimizer is there yet. host: what lies in
    host memory beside a GPU.
    """

    resting: Bytes
    phases: dict[str, Bytes]
    loading: Bytes = field(default_factory=dict)
    host: Bytes = field(default_factory=dict)

    def peak(self, phase: str) -> int:
        """The most bytes that are held in a phase, or in `load`."""
        if phase == "load":
            return round(sum(self.loading.values()))
        return round(sum(self.resting.values()) + sum(self.phases[phase].values()))

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(("load", *self.phases), key=self.peak)


def trained_parameters(shape: Shape, layout: Layout) -> int:
    """Weights with a gradient: all, or adapters and a scalar head."""
    if not layout.is_trained:
        return 0
    if layout.lora_rank == 0:
        return shape.parameters
    return shape.adapters(layout.lora_rank) + (shape.width if shape.is_scalar else 0)


def weight_bytes(shape: Shape, layout: Layout) -> float:
    """All weights of one whole model as they rest: float32, frozen linear ones perhaps fewer."""
    adapters = shape.adapters(layout.lora_rank) if layout.is_trained else 0
    is_frozen = not layout.is_trained or layout.lora_rank > 0
    quantized = shape.linear_weights if is_frozen and layout.frozen != "none" else 0
    others = shape.parameters + adapters - quantized
    return quantized * FROZEN_BYTES[layout.frozen] + others * _FLOAT


def role_memory(shape: Shape, layout: Layout) -> Role:
    """One model's weights, gradients and optimizer states on one rank."""
    trained = trained_parameters(shape, layout)
    weights = weight_bytes(shape, layout)
    pieces = layout.ranks if layout.is_split else 1
    resting: Bytes = {"weights": weights / pieces}
    host: Bytes = {}
    if layout.offload_params and (layout.is_split or not layout.is_trained):
        host["weights"] = resting.pop("weights")
    states: Bytes = {"AdamW": _ADAMW_BYTES * trained / pieces}
    if layout.offload_optimizer:
        states["masters"] = _FLOAT * trained / pieces
        states["gradients"] = _FLOAT * trained / pieces
    (host if layout.offload_optimizer else resting).update(states if trained else {})
    if layout.moving_average and trained:
        resting["moving average"] = _FLOAT * trained / pieces
    working = _working(shape, layout, weights)
    return Role(resting, host, working, _gradients(shape, layout, trained))


def _working(shape: Shape, layout: Layout, weights: float) -> Bytes:
    """Weights made whole, or cast, while the model computes."""
    if layout.is_split:
        share = layout.compute_bytes / _FLOAT
        if layout.stage < 3:
            return {"gathered weights": share * weights}
        blocks = _GATHERED_AT_ONCE * max(shape.blocks, default=0)
        return {"gathered blocks": layout.compute_bytes * (shape.outside_blocks + blocks)}
    working: Bytes = {}
    if layout.offload_params and not layout.is_trained:
        blocks = _GATHERED_AT_ONCE * max(shape.blocks, default=0)
        working["fetched blocks"] = _FLOAT * (shape.outside_blocks + blocks)
    if layout.half:
        head = 0 if shape.is_scalar else shape.vocabulary * shape.width
        working["cast weights"] = layout.compute_bytes * (shape.linear_weights + head)
    return working


def _gradients(shape: Shape, layout: Layout, trained: int) -> Bytes:
    """Gradients, and those of one weight or unit that are still under way."""
    if not trained:
        return {}
    if not layout.is_split:
        whole = layout.lora_rank == 0
        # A gradient is added to the sum of the micro-batches before once it is whole.
        under_way = shape.largest if whole and layout.accumulates else 0
        return {"gradients": _FLOAT * trained, "gradient under way": _FLOAT * under_way}
    unit = _FLOAT * _largest_unit(shape, layout)
    if layout.stage == 1 and layout.accumulates:
        return {"gradients": _FLOAT * trained, "gradients being reduced": unit}
    # Whole gradients of a unit beside their copy in the order in which they travel.
    return {"gradients": _FLOAT * trained / layout.ranks, "gradients being reduced": 2 * unit}


def _largest_unit(shape: Shape, layout: Layout) -> float:
    """Trained elements of the largest unit that is gathered at once."""
    if layout.lora_rank:
        return shape.adapters(layout.lora_rank) / max(1, shape.layers)
    return max([shape.outside_blocks, *shape.blocks])


def activation_bytes(shape: Shape, tokens: int, layout: Layout) -> float:
    """What a forward keeps for its backward: of every layer, or with checkpointing of one.

        per token and layer   8 D + c (n D + 2 Q + 2 K + m I) + 4 (heads + 2)       bytes

    D the width, Q and K the widths of queries and keys, I and m the MLP's width and tensors kept,
    c bytes of a number; n is 2, and 5 in half precision, where norms stay in float32 and what they
    hand on is cast. An adapter keeps rank numbers per token and layer beside its input.
    """
    size = layout.compute_bytes
    copies = 2 + (_HALF_COPIES if layout.half else 0)
    numbers = float(copies * shape.width + 2 * shape.query_width + 2 * shape.kv_width)
    numbers += shape.inner_kept * shape.inner
    if layout.lora_rank:
        numbers += layout.lora_rank * len(shape.linears) / max(1, shape.layers)
    layer = 2 * _FLOAT * shape.width + size * numbers + _FLOAT * (shape.heads + 2)
    ends = 2 * _FLOAT * shape.width  # the embeddings' output and the last norm's input
    if layout.checkpointing:
        return tokens * (shape.layers * _FLOAT * shape.width + layer + ends)
    return tokens * (shape.layers * layer + ends)


def forward_bytes(shape: Shape, tokens: int, layout: Layout) -> float:
    """What a forward without gradient holds at once: a layer's input, output and inner tensors."""
    inner = max(3 * shape.inner, 2 * (shape.query_width + shape.kv_width))
    return tokens * (2 * _FLOAT * shape.width + layout.compute_bytes * (shape.width + inner))


def logits_bytes(shape: Shape, tokens: int, layout: Layout, *, backward: bool) -> float:
    """Vocabulary logits held at once, and in the backward their gradient; none of a scalar head."""
    if shape.is_scalar:
        return 0.0
    rows = min(tokens, max(1, DEFAULT_CHUNK_ELEMENTS // shape.vocabulary))
    return rows * shape.vocabulary * layout.compute_bytes * (2 if backward else 1)


def kv_bytes(shape: Shape, rows: int, tokens: int, layout: Layout) -> float:
    """KV memory of `rows` answers side by side, prompt and answer `tokens` long."""
    held = blocks_for(tokens) * BLOCK_TOKENS
    return 2.0 * layout.compute_bytes * shape.layers * shape.kv_width * rows * held


def generation_bytes(
    shape: Shape, layout: Layout, *, rows: int, prompt: int, new: int, packs: bool
) -> Bytes:
    """What a rollout adds to the resting weights.

    Args:
        rows: answers side by side on one rank. prompt, new: tokens of each.
        packs: decoding reads a second copy of the weights, laid out for it (Llama-like on a CPU).
    """
    whole = float(layout.compute_bytes) * (shape.parameters + shape.adapters(layout.lora_rank))
    decoding: Bytes = {
        "KV memory": kv_bytes(shape, rows, prompt + new, layout),
        "logits": 2.0 * _FLOAT * rows * shape.vocabulary,
        "activations": forward_bytes(shape, min(rows * prompt, PREFILL_TOKENS), layout),
    }
    linears = shape.linear_weights + shape.vocabulary * shape.width
    if packs:
        decoding["packed weights"] = layout.compute_bytes * linears
    if not layout.is_split:
        return decoding | ({"cast weights": layout.compute_bytes * linears} if layout.half else {})
    # All blocks are asked for at once, and arrive in buffers of their own.
    arriving: Bytes = {"gathered weights": whole, "weights arriving": whole}
    decoding["gathered weights"] = whole
    return max(arriving, decoding, key=lambda phase: sum(phase.values()))
