"""The time of each phase of a stage: what it computes and moves, at the machine's own rates.

Every phase is a sum of terms, each ideal seconds of one kind of work (products, bytes moved, small
operations), times a coefficient that says how far from ideal it is. On a CPU the coefficients were
fitted on runs (`constants.yaml`; `tandem plan --refit`); on a GPU they are estimates from counted
kernels, and nothing has been measured yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.memory.dimensions import Shape
from tandem.memory.model import FLOAT, Layout, trained_parameters, weight_bytes
from tandem.memory.work import (
    BLOCK_ROWS,
    activation_bytes,
    forward_bytes,
    packed_bytes,
    recomputed_share,
    state_bytes,
    states_bytes,
)
from tandem.ops.sizes import PREFILL_TOKENS
from tandem.predict.hardware import Hardware
from tandem.predict.work import Work

HOST_RATE, PCIE_RATE = 32e9, 25e9
"""Bytes per second of AdamW on a host's processors, and of copies between host and device."""

Terms = dict[str, float]
"""Ideal seconds by kind of work."""


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """A phase's terms, and for its rates the tokens it is counted in, FLOP and bytes of memory."""

    terms: Terms
    tokens: float = 0.0
    flops: float = 0.0
    moved: float = 0.0

    def __add__(self, other: PhaseWork) -> PhaseWork:
        names = [*self.terms, *(name for name in other.terms if name not in self.terms)]
        terms = {name: self.terms.get(name, 0.0) + other.terms.get(name, 0.0) for name in names}
        return PhaseWork(
            terms, max(self.tokens, other.tokens), self.flops + other.flops,
            self.moved + other.moved,
        )  # fmt: skip

    def seconds(self, coefficients: Mapping[str, float]) -> float:
        """What it takes with these coefficients."""
        return sum(coefficients.get(name, 1.0) * value for name, value in self.terms.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The rates that a model's work meets: a machine's, at a compute type; calls of a layer."""

    machine: Hardware
    dtype: str = "fp32"
    threads: int = 1
    calls: Mapping[str, float] = field(default_factory=dict)

    def products(self, flops: float, width: int) -> float:
        """Ideal seconds of matrix products."""
        return flops / (self.machine.rate(self.dtype, width) * self.threads)

    def moving(self, size: float) -> float:
        """Ideal seconds of reading and writing `size` bytes."""
        return size / self.machine.bandwidth

    def small(self, count: float) -> float:
        """Ideal seconds of `count` small operations."""
        return count * self.machine.call

    def between(self, size: float, ranks: int) -> float:
        """Ideal seconds in which a rank sends and receives `size` bytes."""
        if ranks <= 1:
            return 0.0
        fast = ranks <= self.machine.per_node
        return size / (self.machine.link if fast else self.machine.network)


def forward_flops(shape: Shape, tokens: float, length: float, answered: float) -> float:
    """Of a forward: weights of the layers, causal attention, the head over answered tokens."""
    inside = shape.linear_weights
    attention = 2.0 * shape.query_width * length * shape.layers
    head = 0.0 if shape.is_scalar else 2.0 * shape.vocabulary * shape.width * answered
    return 2.0 * inside * tokens + attention * tokens + head


def training(
    shape: Shape, layout: Layout, work: Work, pace: Pace, *, read: float = 0.0
) -> PhaseWork:
    """Forwards, backwards and optimizer steps of one model in a step.

    Args:
        read: tokens whose forward through the layers is read from kept states.
    """
    passes = work.passes
    tokens, answered = work.tokens * passes, work.answered * passes
    tokens += work.ptx * work.updates
    answered += work.ptx * work.updates
    forward = forward_flops(shape, tokens, work.length, answered)
    trained = trained_parameters(shape, layout)
    share = trained / max(1, shape.parameters) if layout.lora_rank else 1.0
    again = recomputed_share(shape, layout)
    runs = 2.0 + share + again
    saved = forward_flops(shape, read, work.length, 0.0)
    kept = activation_bytes(shape, 1, _kept_whole(layout)) * tokens
    logits = 0.0 if shape.is_scalar else answered * shape.vocabulary * layout.compute_bytes
    own = trained / (layout.pieces if layout.is_split else 1)
    batches = work.micro_batches
    terms = {
        "products": pace.products(forward * runs - saved, shape.width),
        "activations": pace.moving(3.0 * kept * (1.0 + 0.5 * again)),
        "logits": pace.moving(6.0 * logits),
        "accumulating": pace.moving(12.0 * batches * trained),
        "optimizer": pace.moving(work.updates * (28.0 * own + 8.0 * trained)),
        "layers": pace.small(batches * shape.layers * 40.0),
        "sequences": pace.small(work.sequences * passes * shape.layers),
        "fixed": pace.small(work.updates * 400.0),
        **_collectives(shape, layout, pace, work.updates, batches),
    }
    if layout.half and layout.on_cpu:  # the backward's products in two bytes are slower
        terms["half"] = terms["products"]
    if layout.lora_rank:
        outputs = sum(outputs for _, outputs in shape.linears)
        terms["adapters"] = pace.moving(6.0 * tokens * outputs * layout.compute_bytes)
        terms["adapter layers"] = pace.small(batches * len(shape.linears) * 10.0)
    if layout.frozen and layout.lora_rank:
        terms[layout.frozen] = pace.moving(2.0 * batches * FLOAT * shape.linear_weights)
    if layout.offload_optimizer and not layout.on_cpu:
        there = layout.offload_share * own
        terms["offload"] = work.updates * there * (28.0 / HOST_RATE + 6.0 / PCIE_RATE)
    if layout.offload_params and not layout.on_cpu:
        terms["offload"] = terms.get("offload", 0.0) + 2.0 * batches * weight_bytes(
            shape, layout, layout.compute_bytes
        ) / (PCIE_RATE * layout.pieces)
    moved = 3.0 * kept + 6.0 * logits + 28.0 * own * work.updates
    return PhaseWork(terms, tokens, forward * runs - saved, moved)


def scoring(shape: Shape, layout: Layout, work: Work, pace: Pace) -> PhaseWork:
    """A forward of one model over all answers."""
    forward = forward_flops(shape, work.tokens, work.length, work.answered)
    # A block's rows are held at once, whatever the tokens; here they count once for each token.
    size = forward_bytes(shape, BLOCK_ROWS, layout) / BLOCK_ROWS * work.tokens * shape.layers
    logits = 0.0 if shape.is_scalar else work.answered * shape.vocabulary * layout.compute_bytes
    batches = max(1.0, work.micro_batches / max(1, work.passes * work.updates))
    terms = {
        "products": pace.products(forward, shape.width),
        "activations": pace.moving(size),
        "logits": pace.moving(3.0 * logits),
        "layers": pace.small(batches * shape.layers * 20.0),
        "sequences": pace.small(work.sequences * shape.layers),
        "fixed": pace.small(200.0),
    }
    if layout.frozen:
        terms[layout.frozen] = pace.moving(batches * FLOAT * shape.linear_weights)
    if layout.is_split:
        whole = weight_bytes(shape, layout, layout.compute_bytes)
        terms["collectives"] = pace.between(whole, layout.ranks)
        terms["exchanges"] = pace.small(100.0 * (shape.layers + 1))
    return PhaseWork(terms, work.tokens, forward, size + 3.0 * logits)


def generating(
    shape: Shape,
    layout: Layout,
    work: Work,
    pace: Pace,
    rows: int,
    *,
    packs: bool,
    kept: float = 0.0,
) -> PhaseWork:
    """A rollout: prompts at once, then a token of every row per decoding step.

    Args:
        rows: decoded in parallel. packs: from packed weights in one call per step, not layer by
            layer in Python. kept: tokens whose states are kept for the update.
    """
    prompts = work.prompts * work.prompt - max(0.0, work.prompts - 1) * work.alike
    rounds = work.rows / max(1.0, rows)
    steps = max(1.0, rounds) * work.new
    flops = forward_flops(shape, prompts, work.prompt, work.prompts)
    flops += forward_flops(
        shape, work.rows * work.new, 2.0 * (work.prompt + work.new / 2), work.rows * work.new
    )
    weights = weight_bytes(shape, layout, layout.compute_bytes)
    # Packed weights that were quantized are as long as others.
    read = max(weights, packed_bytes(shape, layout)) if packs else weights
    keys = 2.0 * layout.compute_bytes * (shape.layers - shape.keyless) * shape.kv_width
    states = 2.0 * state_bytes(shape, layout)
    memory = steps * read + work.rows * work.new * (
        keys * (work.prompt + work.new / 2) + states
    )  # fmt: skip
    drawn = work.rows * work.new
    terms = {
        "products": pace.products(flops, shape.width),
        "reading": pace.moving(memory),
        "drawing": pace.moving(drawn * shape.vocabulary * FLOAT * 4.0),
        "steps": pace.small(steps * 60.0),
        "layers": pace.small(steps * shape.layers * 8.0),
        "tokens": pace.small(drawn),
        "prefill": pace.small((1 + prompts / PREFILL_TOKENS) * shape.layers * 20.0),
        "fixed": pace.small(400.0),
    }
    if kept:
        terms["keeping"] = pace.moving(2.0 * states_bytes(shape, round(kept), layout))
    if packs:
        terms["packing"] = pace.moving(weights + read)
    elif layout.on_cpu:
        terms["eager layers"] = pace.small(steps * shape.layers * 100.0)
        terms["eager products"] = terms["products"]
        if layout.lora_rank:
            terms["adapter layers"] = pace.small(steps * len(shape.linears) * 10.0)
        if layout.frozen:
            terms[layout.frozen] = pace.moving(steps * FLOAT * shape.linear_weights)
    if layout.is_split:
        terms["collectives"] = pace.between(weights, layout.ranks)
        terms["exchanges"] = pace.small(100.0 * (shape.layers + 1))
    return PhaseWork(terms, drawn, flops, memory)


def loading(
    shapes: Sequence[Shape],
    pace: Pace,
    *,
    tried: Sequence[Shape] = (),
    adapted: Sequence[Shape] = (),
    packed: float = 0.0,
    ranks: int = 1,
) -> PhaseWork:
    """Models read, placed and checked.

    Args:
        shapes: of all. tried: of what samples or is sampled from, of which forwards of a few tokens
            are compared. adapted: of those that get adapters. packed: bytes of the weights that the
            comparison decodes from, 0 if they are not packed.
    """
    size = sum(FLOAT * shape.parameters for shape in shapes)
    policies = sum(FLOAT * shape.parameters for shape in tried)
    terms = {
        "reading": pace.moving(6.0 * size),
        "policy": pace.moving(6.0 * policies),
        "packing": pace.moving(2.0 * packed),
        "fixed": pace.small(1e4),
        "models": pace.small(1e4 * len(shapes)),
        "layers": pace.small(1e3 * sum(shape.layers for shape in shapes)),
        "policy layers": pace.small(1e3 * sum(shape.layers for shape in tried)),
        "adapter layers": pace.small(1e3 * sum(len(shape.linears) for shape in adapted)),
        "sharding": pace.small(1e4 * len(shapes) * (ranks > 1)),
    }
    return PhaseWork(terms, 0.0, 0.0, size)


def saving(size: float, machine: Hardware) -> PhaseWork:
    """Writing a checkpoint of `size` bytes."""
    return PhaseWork({"disk": size / machine.disk}, 0.0, 0.0, size)


def _collectives(shape: Shape, layout: Layout, pace: Pace, updates: float, batches: float) -> Terms:
    if layout.ranks <= 1:
        return {}
    trained = trained_parameters(shape, layout)
    weights = weight_bytes(shape, layout, layout.compute_bytes)
    reduced = 2.0 * FLOAT * trained * updates
    if layout.is_split:
        often = batches if layout.gathers_blocks else updates
        gathered = weights * often * (2.0 if layout.gathers_blocks else 1.0)
        reduced = FLOAT * trained * (batches if layout.stage >= 2 else updates)
    else:
        gathered = 0.0
    messages = updates
    if layout.is_split:
        each = batches if layout.gathers_blocks else updates
        messages = (shape.layers + 1) * (updates + each)
    return {"collectives": pace.between(reduced + gathered, layout.ranks),
            "exchanges": pace.small(100.0 * messages)}  # fmt: skip


def _kept_whole(layout: Layout) -> Layout:
    """The layout without checkpointing: what is computed and moved, not what is kept."""
    return replace(layout, checkpointing=False)
