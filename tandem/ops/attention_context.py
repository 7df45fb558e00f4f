"""What one forward pass is over, for the attention layers inside it to read.

A model's forward knows nothing of packed sequences or block tables; `attending` says, around the
call, which sequences stand side by side (`Packed`) or which rows continue by a token (`Decode`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from tandem.errors import ShapeError
from tandem.ops import gpu
from tandem.ops.sizes import BLOCK_TOKENS as BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How a layer attends: score scale; keys in sight (0: all); soft cap (0: none); sinks (H,)."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one layer keeps of a sequence, however long it is.

    conv: (W - 1, C), the last inputs of a causal convolution of W tokens over C channels.
    matrix: (H, K, V), the state of a linear recurrence.
    """

    conv: tuple[int, int] = (0, 0)
    matrix: tuple[int, int, int] = (0, 0, 0)

    def bytes_per_sequence(self, dtype: torch.dtype) -> int:
        """Of both; matrices are float32."""
        return math.prod(self.conv) * dtype.itemsize + math.prod(self.matrix) * 4


NO_STATE = StateShape()


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps: per token kv_heads keys and as many values, per sequence `state`."""

    kv_heads: int = 0
    key_width: int = 0
    value_width: int = 0
    state: StateShape = NO_STATE

    @property
    def numbers_per_token(self) -> int:
        """Keys and values of a token, counted in numbers."""
        return self.kv_heads * (self.key_width + self.value_width)


class KVMemory:
    """Keys and values of every layer, in blocks of BLOCK_TOKENS tokens that a table lists.

    On a CPU a layer's keys are (blocks, heads, key_width, 16), transposed so that sixteen keys
    are read at once, and its values (blocks, heads, 16, value_width); on a GPU both are
    (blocks, 16, heads, width). Layers that keep a state of a sequence have it beside that, in slots
    that are numbered by themselves: inputs of a convolution (slots, W - 1, C), and matrices
    (slots, H, K, V) in float32.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int = 0,
    ) -> None:
        """Zeroed memory of `num_blocks` blocks and `num_slots` slots per layer."""
        self.num_blocks, self.num_slots, self.shapes = num_blocks, num_slots, tuple(shapes)
        self.layers: list[tuple[Tensor, Tensor]] = []
        for shape in shapes:
            heads, key, value = shape.kv_heads, shape.key_width, shape.value_width
            if device.type == "cpu":
                sizes = (heads, key, BLOCK_TOKENS), (heads, BLOCK_TOKENS, value)
            else:
                sizes = (BLOCK_TOKENS, heads, key), (BLOCK_TOKENS, heads, value)
            keys, values = (
                torch.zeros(num_blocks, *size, dtype=dtype, device=device) for size in sizes
            )
            self.layers.append((keys, values))
        self.states = [
            (
                torch.zeros(num_slots, *shape.state.conv, dtype=dtype, device=device),
                torch.zeros(num_slots, *shape.state.matrix, device=device),
            )
            for shape in (shapes if num_slots else ())
        ]

    def copy_states(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots (m,) of every layer, for samples that go on from one prompt."""
        for layer in self.states:
            for tensor in layer:
                if tensor.numel():
                    tensor[targets] = tensor[sources]

    def free(self) -> None:
        """Let go of all of it."""
        self.layers.clear()
        self.states.clear()

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks (m,) of every layer, for sequences that leave a shared prefix."""
        for keys, values in self.layers:
            keys[targets] = keys[sources]
            values[targets] = values[sources]


class Before:
    """What KV memory holds of B sequences that go on: `starts` tokens, with `counts` new ones each.

    tables: (B, W) int32, all blocks of each sequence, those of the new tokens too. starts are
    multiples of BLOCK_TOKENS, so that new tokens begin a block of their own. starts_at: (B,) int64,
    the same on the device. Everything is known on the host: nothing waits for the device.
    """

    def __init__(
        self, tables: Tensor, starts: Sequence[int], counts: Sequence[int], device: torch.device
    ) -> None:
        self.tables, self.starts, self.counts = tables, tuple(starts), tuple(counts)
        self.starts_at = gpu.sent(list(starts), device)
        self._written_out: tuple[Tensor, Tensor, Tensor] | None = None

    def tables_of_new(self) -> Tensor:
        """(B, W') int32, from the first new token's block on."""
        first = torch.tensor([start // BLOCK_TOKENS for start in self.starts])
        width = max(1, -(-max(self.counts) // BLOCK_TOKENS))
        columns = first[:, None] + torch.arange(width)
        columns = columns.clamp(max=self.tables.shape[1] - 1)
        return self.tables.gather(1, gpu.sent(columns.tolist(), self.tables.device))

    def written_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where all M tokens of the sequences lie, old and new in order: their blocks (M,), their
        places in them (M,); and (B + 1,) int32, where each sequence begins among them."""
        if self._written_out is None:
            device = self.tables.device
            lengths = [a + b for a, b in zip(self.starts, self.counts, strict=True)]
            ends = [*accumulate(lengths, initial=0)]
            counts = gpu.sent(lengths, device)
            rows = torch.arange(len(lengths), device=device)
            rows = rows.repeat_interleave(counts, output_size=ends[-1])
            places = torch.arange(ends[-1], device=device) - gpu.sent(ends[:-1], device)[rows]
            blocks = self.tables[rows, places // BLOCK_TOKENS].long()
            self._written_out = (
                blocks, places % BLOCK_TOKENS, gpu.sent(ends, device, torch.int32)
            )  # fmt: skip
        return self._written_out


@dataclass(slots=True)
class Wanted:
    """The tokens whose last hidden states are asked for.

    rows: (K,) int64, ascending, which of the N tokens. alone: set in the forward by a last block
    that gives the states of these tokens alone: what follows attention, on a CPU also a query, is
    computed for no other.
    """

    rows: Tensor
    alone: bool = False

    def of(self, *states: Tensor) -> list[Tensor]:
        """Their rows of states (1, N, D), in the last block."""
        self.alone = True
        return [state[0].index_select(0, self.rows)[None] for state in states]


@dataclass(frozen=True, slots=True)
class Packed:
    """B segments side by side, N tokens: training, scoring and prefill.

    A segment is a whole sequence, or it continues another one, as several may: responses a prompt,
    and prompts what they begin with alike. Its tokens attend to that segment, to what that
    continues in turn, and to their own.

    cu_seqlens: (B + 1,) int32, where each begins. max_length: of the longest sequence, in tokens.
    prefixes: (B,) int32, the segment that a segment continues, -1 where it is whole itself; None:
        all are whole. A continuation stands directly after the segment that it continues, or after
        others that continue that, however indirectly.
    memory, block_tables: where prefill keeps the keys and values of these tokens, (B, max_blocks)
        int32.
    before: what memory holds of the sequences already; None: nothing of any. max_length then
        counts that too.
    slots: (B,) int64, where memory keeps the sequences' states; None: no layer has any.
    wanted: the tokens whose last states are asked for; None: all.
    """

    cu_seqlens: Tensor
    max_length: int
    memory: KVMemory | None = None
    block_tables: Tensor | None = None
    prefixes: Tensor | None = None
    before: Before | None = None
    wanted: Wanted | None = None
    slots: Tensor | None = None
    _whole: list[WholeSequences] = field(default_factory=list, repr=False, compare=False)

    @staticmethod
    def of_lengths(
        lengths: Sequence[int],
        device: torch.device,
        prefixes: Sequence[int] | None = None,
        wanted: Wanted | None = None,
    ) -> Packed:
        """Segments of these lengths, in this order; `prefixes` and `wanted` as above."""
        ends = gpu.sent([*accumulate(lengths, initial=0)], device, torch.int32)
        if prefixes is None:
            return Packed(ends, max(lengths, default=0), wanted=wanted)
        whole: list[int] = []  # the tokens of each with what it continues
        for length, prefix in zip(lengths, prefixes, strict=True):
            whole.append(length + (whole[prefix] if prefix >= 0 else 0))
        longest = max(whole, default=0)
        found = gpu.sent(prefixes, device, torch.int32)
        return Packed(ends, longest, prefixes=found, wanted=wanted)

    def whole(self) -> WholeSequences:
        """The same sequences without shared prefixes, for attention that knows of none."""
        if not self._whole:
            self._whole.append(_whole_sequences(self))
        return self._whole[0]


@dataclass(frozen=True, slots=True)
class WholeSequences:
    """Segments and what they continue, written out as M tokens of whole sequences.

    packed: the sequences. tokens: (M,) int64, which of the N tokens each is. back: (N,) int64,
    where among the M each of the N stands, in one of the sequences that hold it.
    """

    packed: Packed
    tokens: Tensor
    back: Tensor


def _whole_sequences(step: Packed) -> WholeSequences:
    """Those that nothing continues: a segment that others continue is the beginning of theirs."""
    assert step.prefixes is not None
    bounds, prefixes = step.cu_seqlens.tolist(), step.prefixes.tolist()
    places = torch.arange(bounds[-1], device=step.cu_seqlens.device)
    back = torch.empty_like(places)
    lengths: list[int] = []
    tokens: list[Tensor] = []
    continued, total = set(prefixes), 0
    for segment in range(len(prefixes)):
        if segment in continued:
            continue
        path = [segment]
        while prefixes[path[-1]] >= 0:
            path.append(prefixes[path[-1]])
        begin = total
        for part in reversed(path):
            tokens.append(places[bounds[part] : bounds[part + 1]])
            back[tokens[-1]] = torch.arange(total, total + len(tokens[-1]), device=back.device)
            total += len(tokens[-1])
        lengths.append(total - begin)
    packed = Packed.of_lengths(lengths, back.device)
    return WholeSequences(packed, torch.cat(tokens), back)


@dataclass(frozen=True, slots=True)
class Decode:
    """n sequences that each get one more token, which attends to all before it.

    positions: (n,) int64, the new token's index in its sequence.
    block_tables: (n, max_blocks) int32; entry j of a row is the block of tokens 16 j to 16 j + 15.
    slots: (n,) int64, where memory keeps the sequences' states; None: no layer has any.
    """

    positions: Tensor
    block_tables: Tensor
    memory: KVMemory
    slots: Tensor | None = None


@dataclass(slots=True)
class Recording:
    """One sequence, to learn what each layer keeps and how far it sees.

    shapes, windows: fill by the index of layers that attend; a window of 0 is all keys.
    states: fill the same way, by the index of layers that keep a state of their sequence.
    why_not: what a layer asks for that attention over packed sequences does not have.
    """

    packed: Packed
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    states: dict[int, StateShape] = field(default_factory=dict)
    why_not: list[str] = field(default_factory=list)


AttentionMetadata = Packed | Decode | Recording
_local = threading.local()


@contextmanager
def attending(step: AttentionMetadata) -> Iterator[None]:
    """Within, on this thread: attention layers work on `step`.

    A caller's `torch.autocast` does not reach inside: layers compute in the type that their
    weights rest in, so that training and generation agree, and recorded steps hold no casts.
    """
    before = getattr(_local, "step", None)
    _local.step = step
    try:
        with torch.autocast(_device_of(step).type, enabled=False):
            yield
    finally:
        _local.step = before


def _device_of(step: AttentionMetadata) -> torch.device:
    if isinstance(step, Decode):
        return step.positions.device
    return (step.packed if isinstance(step, Recording) else step).cu_seqlens.device


def current_step() -> AttentionMetadata:
    """What `attending` set.

    Raises:
        ShapeError: a forward of a twin outside `attending`.
    """
    step: AttentionMetadata | None = getattr(_local, "step", None)
    if step is None:
        raise ShapeError(
            "a twin's forward must run inside `attending`; got none. Call it through "
            "models.forward, which says what the forward is over."
        )
    return step


def wanted_tokens() -> Wanted | None:
    """What the forward around this call is asked for; None: every token's state."""
    step = current_step()
    return step.wanted if isinstance(step, Packed) else None


def longest_packed() -> int:
    """Tokens of the longest of the sequences that the forward around this call packs side by side;
    0 if it does something else, or there is none."""
    step: AttentionMetadata | None = getattr(_local, "step", None)
    return step.max_length if isinstance(step, Packed) else 0
