"""Memory of a running model beside its weights: activations, logits, KV memory, copies in flight.

Activations are counted as in arXiv:2205.05198 (section 4.1), for the operations of this code.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.memory.dimensions import GATED_KEEPS, Shape
from tandem.memory.model import (
    FLOAT,
    FROZEN_BYTES,
    Bytes,
    Layout,
    beside_base,
    in_flight_bytes,
    quantized_weights,
    working_bytes,
)
from tandem.ops.logits import BUDGET_BYTES
from tandem.ops.sizes import BLOCK_TOKENS, PREFILL_TOKENS, SNAPSHOT_SLOTS

FUSED_GATED_KEEPS = 2
"""Tensors of the inner width that a gated MLP keeps on a GPU and in whole blocks on a CPU: gate and
up. Their product is computed again, but where an adapter's gradient needs it (ops/layer_gpu.py)."""

BLOCK_ROWS = 512
"""Rows whose inner tensors a CPU's whole block has at a time (csrc/layers.cpp)."""
READY_FLOATS = 1 << 19
"""Most numbers of a block's weights that are laid out for its products (`kReadyFloats` there)."""


def activation_bytes(shape: Shape, tokens: int, layout: Layout, wanted: int | None = None) -> float:
    """What a forward keeps for its backward: of every layer, or of one with checkpointing; of one
    that recomputes parts, these of one layer and the rest of every layer.

        per token and layer   c (4 D + 2 Q + 2 K + m I) + 4 (heads + 2)       bytes

    D is the width, Q and K the widths of queries and keys, I and m the MLP's width and number of
    kept tensors, c the bytes of the compute type. An adapter keeps `rank` more numbers per token
    and layer. A GPU's kernels keep a gated MLP's input alone (m = 2), and with checkpointing two
    tensors of the width per layer: blocks hand on their sum unadded. The tests count that on the
    meta device; plain torch on a GPU without our kernels keeps about half more. Where a CPU
    computes blocks as a whole, norms and adapters' numbers are computed again too: 2 D, m = 2.

    Layers with a state keep what `models/twin_mixers` says in place of queries and keys.

    Args:
        wanted: tokens with which the last block goes on behind attention, where it leaves others
            out (`narrows`), on a CPU their queries too; None: it leaves none out.
    """
    size = layout.compute_bytes
    whole = _has_whole_blocks(shape, layout)
    numbers = float((2 if whole else 4) * shape.width + 2 * shape.query_width + 2 * shape.kv_width)
    numbers += _inner_kept(shape, layout) * shape.inner
    if layout.lora_rank and not whole:
        numbers += layout.lora_rank * len(shape.linears) / max(1, shape.layers)
    layer = size * numbers + FLOAT * (shape.heads + (0 if whole else 2))
    ends = 2 * size * shape.width  # the embeddings' output and the last norm's input
    mixed = _mixed_bytes(shape, layout)
    if layout.checkpointing and layout.recompute != "layers":
        part = _part_bytes(shape, layout)
        return tokens * (shape.layers * (layer - part) + part + ends + mixed)
    if layout.checkpointing:
        inputs = shape.width * (1 if layout.on_cpu else 2)
        return tokens * (shape.layers * size * inputs + layer + ends + mixed / shape.layers)
    kept = tokens * (shape.layers * layer + ends + mixed)
    if wanted is None:
        return kept
    left = size * ((2 if whole else 3) * shape.width + _inner_kept(shape, layout) * shape.inner)
    picked = 0
    if whole:  # which makes their queries alone, of a copy of their inputs
        left += size * 2 * shape.query_width + FLOAT * shape.heads
        picked = size * shape.width
    return kept + picked * wanted - left * (tokens - wanted)


def _mixed_bytes(shape: Shape, layout: Layout) -> float:
    """What layers with a state keep per token beyond what is counted for attention."""
    instead = shape.keyless * 2 * (shape.query_width + shape.kv_width)
    numbers = layout.compute_bytes * (shape.mixed - instead) + FLOAT * shape.mixed_floats
    return float(numbers if shape.mixed else 0)


def narrows(shape: Shape, layout: Layout) -> bool:
    """Whether the last block leaves out, behind attention, tokens whose states nobody asks for and
    `activation_bytes` counts that."""
    return shape.whole_blocks and not layout.checkpointing


def _inner_kept(shape: Shape, layout: Layout) -> int:
    is_gated = shape.inner_kept == GATED_KEEPS
    if _has_whole_blocks(shape, layout) or (is_gated and not (layout.on_cpu or layout.lora_rank)):
        return FUSED_GATED_KEEPS
    return shape.inner_kept


def _has_whole_blocks(shape: Shape, layout: Layout) -> bool:
    """Two bytes on a CPU are taken for bfloat16: float16 runs module by module and needs more."""
    return shape.whole_blocks and layout.on_cpu and not layout.lora_drops


def _part_bytes(shape: Shape, layout: Layout) -> float:
    """What a layer's MLP or attention keeps per token, without the norm before it."""
    size = layout.compute_bytes
    if layout.recompute == "mlp":
        return float(size * _inner_kept(shape, layout) * shape.inner)
    # What attention gives is an input of what comes after it, where that is one operation.
    queries = 1 if _has_whole_blocks(shape, layout) else 2
    return size * (queries * shape.query_width + 2 * shape.kv_width) + FLOAT * shape.heads


def recomputed_share(shape: Shape, layout: Layout) -> float:
    """The share of a forward that checkpointing computes again."""
    if not layout.checkpointing:
        return 0.0
    if layout.recompute == "layers":
        return 1.0
    attention = shape.layers * shape.width * 2 * (shape.query_width + shape.kv_width)
    share = min(1.0, attention / max(1, shape.linear_weights))
    return share if layout.recompute == "attention" else 1.0 - share


def states_bytes(shape: Shape, tokens: int, layout: Layout) -> float:
    """What generation keeps of every token for the update (models/replayed.py)."""
    around = shape.query_width + 2 * shape.kv_width + 2 * shape.width
    return float(layout.compute_bytes * shape.layers * tokens * (around + 2 * shape.inner))


def keeps_states(shape: Shape, layout: Layout) -> bool:
    """Whether it can, of a model that decodes from packed weights."""
    is_plain = not (layout.lora_rank or layout.frozen or layout.checkpointing)
    return _has_whole_blocks(shape, layout) and is_plain


def forward_bytes(shape: Shape, tokens: int, layout: Layout) -> float:
    """Of a forward without gradient: a layer's input, output and inner tensors."""
    if _has_whole_blocks(shape, layout):
        rows = min(-(-tokens // 128) * 128, BLOCK_ROWS) * (2 * shape.width + 3 * shape.inner)
        around = 2 * shape.width + 2 * (shape.query_width + shape.kv_width)
        return float(layout.compute_bytes * (tokens * around + rows))
    is_gated = shape.inner_kept == GATED_KEEPS
    mixed = (shape.mixed + 2 * shape.mixed_floats) / max(1, shape.layers)
    inner = max(
        (3 if is_gated else 2) * shape.inner, 2 * (shape.query_width + shape.kv_width), mixed
    )  # fmt: skip
    return tokens * layout.compute_bytes * ((3 if is_gated else 2) * shape.width + inner)


def backward_bytes(shape: Shape, tokens: int, layout: Layout) -> float:
    """What a layer's backward holds beside the activations: the gradients of its inner tensors, and
    on a GPU a gated MLP's product, computed again."""
    if layout.on_cpu:
        return forward_bytes(shape, tokens, layout) + _ready_bytes(shape, layout)
    is_gated = shape.inner_kept == GATED_KEEPS
    wide = (2 if layout.lora_rank else 4) if is_gated else (3 if layout.lora_rank else 2)
    inner = max(wide * shape.inner, 2 * (shape.query_width + shape.kv_width))
    return tokens * layout.compute_bytes * (2 * shape.width + inner)


def _ready_bytes(shape: Shape, layout: Layout) -> float:
    """What small weights of a whole block behind attention, laid out for the products of their
    backward (ops/csrc/layers.cpp), take beyond their own size: processors without products of
    bfloat16 lay them out in four bytes a number. Their own size is within `BLOCK_ROWS`, since a
    block with such weights has half as many rows at a time."""
    weights = shape.width * (shape.query_width + 3 * shape.inner)
    is_ready = _has_whole_blocks(shape, layout) and weights <= READY_FLOATS
    return float((FLOAT - layout.compute_bytes) * weights * is_ready)


def narrowed_bytes(shape: Shape, tokens: int, layout: Layout) -> list[tuple[float, float]]:
    """Where the last block has few tokens behind attention (`narrows`): the activations, and the
    gradients beside them, at the instants of a backward at which what was behind it is freed."""
    kept = activation_bytes(shape, tokens, layout, 0)
    gradients = backward_bytes(shape, tokens, layout)
    if not _has_whole_blocks(shape, layout):
        return [(kept, gradients)]
    # Queries are as few: there are gradients of keys and values, and of the input that those make.
    of_last = layout.compute_bytes * tokens * (2 * shape.kv_width + shape.width)
    others = activation_bytes(replace(shape, layers=shape.layers - 1), tokens, layout)
    others -= layout.compute_bytes * tokens * shape.width  # no norm comes behind them
    return [(kept, of_last), (others, gradients)]


def logits_bytes(shape: Shape, tokens: int, layout: Layout, *, backward: bool) -> float:
    """Vocabulary logits in use at once, and in the backward their gradient; 0 for a scalar head.

    The CPU's operations write the gradient over the logits. If these come in several chunks, every
    chunk makes a gradient of the head that is then added to the others'. Trained rows' logits are
    put into a copy, and their gradient is taken out of one (`models/token_rows`); the reference,
    which is what scores under LoRA, runs without them, unless the run goes on from an adapter that
    has some (not counted).
    """
    if shape.is_scalar:
        return 0.0
    most = logits_rows(shape, layout, layout.compute_bytes)
    size = min(tokens, most) * shape.vocabulary * layout.compute_bytes
    if not backward:
        return size
    if not layout.on_cpu:
        return 2.0 * size
    copies = 2 if layout.token_rows else 1
    return copies * size + (tokens > most) * layout.compute_bytes * shape.vocabulary * shape.width


def logits_rows(shape: Shape, layout: Layout, size: int) -> int:
    """Rows of logits, in numbers of `size` bytes, that are made at once (ops/logits.py)."""
    budget = BUDGET_BYTES["cpu" if layout.on_cpu else "cuda"]
    return max(1, budget // (shape.vocabulary * size))


def kv_bytes(shape: Shape, rows: int, tokens: int, layout: Layout, slices: int = 1) -> float:
    """KV memory of `rows` answers in parallel, prompt and answer `tokens` long, and states: theirs,
    of a prompt whose samples come in, and of what prompts begin with alike.

    Args:
        slices: ranks that each have a share of the heads, or a whole one.
    """
    held = -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    layers = shape.layers - shape.keyless
    width = shape.kv_width / min(slices, shape.kv_heads)
    keys = 2.0 * layout.compute_bytes * layers * width
    slots = rows + 1 + min(SNAPSHOT_SLOTS, rows)
    return rows * keys * held + slots * state_bytes(shape, layout)


def state_bytes(shape: Shape, layout: Layout) -> float:
    """What layers keep of one answer, however long it is."""
    return float(layout.compute_bytes * shape.state + FLOAT * shape.state_floats)


def packed_bytes(shape: Shape, layout: Layout) -> float:
    """The copy of all linear weights and of the vocabulary head that a CPU decodes from, and of an
    embedding with trained rows. Processors whose registers hold 4 numbers (ARM, old x86) take four
    bytes a number in half precision too."""
    matrices = 2 if layout.token_rows else 1
    linears = shape.linear_weights + matrices * shape.vocabulary * shape.width
    return float(layout.compute_bytes * (linears + shape.adapters(layout.lora_rank)))


def generation_bytes(
    shape: Shape, layout: Layout, *, rows: int, prompt: int, new: int, packs: bool, slices: int = 1
) -> Bytes:
    """What a rollout adds to the resident weights.

    Args:
        rows: answers in parallel on one rank, or on those that hold slices together. prompt, new:
            tokens of each.
        packs: decoding reads a second, packed copy of the weights (Llama-like on a CPU).
        slices: ranks that hold slices of one model.
    """
    rows = min(rows, logits_rows(shape, layout, FLOAT))
    decoding: Bytes = {
        "KV memory": kv_bytes(shape, rows, prompt + new, layout, slices),
        "logits": 2.0 * FLOAT * rows * shape.vocabulary,
        "activations": forward_bytes(shape, min(rows * prompt, PREFILL_TOKENS), layout),
    }
    return decoding | answering_weights(shape, layout, packs=packs, slices=slices)


def answering_weights(shape: Shape, layout: Layout, *, packs: bool, slices: int = 1) -> Bytes:
    """The weights that a rollout reads, where they are not those that rest: slices of the linear
    layers and of experts in one tensor, and the rest whole; or all gathered, and packed.

    Args:
        packs, slices: as of `generation_bytes`.
    """
    if slices > 1:
        return _slices(shape, layout, slices)
    packed = {"packed weights": packed_bytes(shape, layout)} if packs else {}
    in_flight = {"weights in flight": in_flight_bytes(shape, layout)}
    return packed | in_flight | working_bytes(shape, layout, at_once=True)


def _slices(shape: Shape, layout: Layout, slices: int) -> Bytes:
    """What a rank holds of a model in slices. Quantized weights' are integers, and their adapters
    beside them, here counted whole; to other slices they are added."""
    linear = shape.linear_weights / slices
    # Of key heads that are fewer than the ranks each holds a whole one.
    keys = 2 * shape.layers * shape.width * shape.kv_width
    linear += keys * (1 / min(slices, shape.kv_heads) - 1 / slices)
    others = shape.parameters - shape.linear_weights - shape.stacked * (1 - 1 / slices)
    if not quantized_weights(shape, layout):
        return {"slices": layout.compute_bytes * (others + linear)}
    integers = FROZEN_BYTES[layout.frozen] * (linear + shape.untied_head)
    others += beside_base(shape, layout) - shape.untied_head
    most = max(shape.largest_linear / slices, shape.untied_head)
    return {
        "slices": integers + layout.compute_bytes * others,
        "dequantized weights": layout.compute_bytes * most,
    }
