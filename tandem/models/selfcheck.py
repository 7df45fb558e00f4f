"""The check of a twin against its model, before a run relies on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.errors import ModelError
from tandem.models.blocks import has_experts
from tandem.models.hf_logging import quiet
from tandem.models.modes import evaluating
from tandem.models.source import positions_in
from tandem.models.twin import (
    decodes,
    keeps_states,
    kv_shapes,
    own_forwards,
    running,
    supports_packing,
    twin_of,
)
from tandem.ops.attention_context import BLOCK_TOKENS, Decode, KVMemory, Packed, attending

TRUSTED_GAP = 1e-5
"""Mean |log-prob difference|, in nats, up to which the sampler's log-probs replace a forward's."""

_REROUTED = 1 / 8
"""The share of a mixture's tokens that rounding may send to other experts, in half precision."""
_LENGTHS = (23, 9)  # longer and shorter than a block of KV memory


class Decoder(Protocol):
    """What computes answers: a `generation.runner.Runner`, which models may not import."""

    def prefill(
        self,
        token_ids: Tensor,
        lengths: Sequence[int],
        tables: Tensor,
        starts: None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """Logits (G, V) of the last token of each of G prompts."""

    def decode(
        self, token_ids: Tensor, positions: Tensor, tables: Tensor, states: Tensor | None = None
    ) -> Tensor:
        """Logits (n, V) of one more token per row."""

    def close(self) -> None:
        """Free what it holds."""


MakeDecoder = Callable[[PreTrainedModel, KVMemory, int], Decoder]
"""Takes a model, KV memory with a spare block and slot at its end, and the longest sequence."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the twin's numbers compare on random tokens.

    bitwise: decoding token by token gave the packed forward's logits to the last bit, on these
        few tokens and with this number of threads. If all operations are those of `ops`, it does so
        on any tokens; a family's own layers may still differ in a last bit in a large batch.
    gap, largest_gap: mean and largest |log-prob difference| of decoding and the packed forward, in
        nats. For a family that does not decode (`twin.decodes`) the mean is infinite, and what
        `engine.checks` gives as the largest is of Hugging Face's generate.
    to_model: largest difference of packed logits and the model's own forward, relative to the
        largest logit.
    """

    bitwise: bool
    gap: float
    largest_gap: float
    to_model: float

    @property
    def trustworthy(self) -> bool:
        """Whether log-probs from decoding may replace those of the training forward."""
        return self.bitwise or self.gap < TRUSTED_GAP


@torch.no_grad()
def check_twin(
    model: PreTrainedModel,
    *,
    trains_elsewhere: bool = False,
    make_decoder: MakeDecoder | None = None,
) -> Agreement:
    """Compare the model's own forward, the twin's packed one and its decoding.

    Args:
        trains_elsewhere: this twin only generates (`twin.standing_in`), so that its decoding is
            compared with the model's own forward instead of with its packed one.
        make_decoder: what decodes in the run (`generation.make_runner`); None: the twin's
            modules.
    Raises:
        ModelError: the twin's logits, or their likeliest tokens, differ from the model's.
    """
    rows = random_rows(model, _LENGTHS)
    with evaluating(model):
        runs = running(model)
        # Which warns of slow operations of the family's own that the twin does not run.
        with quiet() if supports_packing(model) else nullcontext():
            full = torch.cat([runs(input_ids=row[None], use_cache=False).logits[0] for row in rows])
        packed = _packed_logits(model, rows)
        decoded = _decoded_logits(model, rows, make_decoder or _Modules) if decodes(model) else None
    to_model = _require_close(model, full, packed, "packed")
    if decoded is None:
        return Agreement(False, math.inf, math.inf, to_model)
    places = _decoded_places(rows)
    _require_close(model, full[places], decoded, "decoding")
    trained = (full if trains_elsewhere else packed)[places]
    gap = torch.log_softmax(decoded.float(), -1) - torch.log_softmax(trained.float(), -1)
    gap = gap.abs()
    is_equal = torch.equal(decoded, trained)
    return Agreement(is_equal, float(gap.mean()), float(gap.max()), to_model)


@torch.no_grad()
def check_slices(model: PreTrainedModel) -> float:
    """Compare slices that run a model's own forward (`twin.standing_in`, by_generate) with that.

    Returns:
        the largest difference of their logits, relative to the largest.
    Raises:
        ModelError: they differ by more than rounding.
    """
    rows, runs = random_rows(model, _LENGTHS), running(model)
    full, sliced = (
        torch.cat([one(input_ids=row[None], use_cache=False).logits[0] for row in rows])
        for one in (model, runs)
    )
    return _require_close(model, full, sliced, "sliced")


def random_rows(model: PreTrainedModel, lengths: Sequence[int], *, room: int = 0) -> list[Tensor]:
    """Rows of tokens of these lengths, or as long as positions leave `room` behind them."""
    most = (positions_in(model.config) or max(lengths) + room) - room
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocabulary, (min(n, most),), generator=generator) for n in lengths]
    return [row.to(model.device) for row in rows]


def _packed_logits(model: PreTrainedModel, rows: list[Tensor]) -> Tensor:
    device = model.device
    positions = torch.cat([torch.arange(len(row), device=device) for row in rows])
    with attending(Packed.of_lengths([len(row) for row in rows], device)):
        return _logits(model, torch.cat(rows), positions)


def _decoded_logits(
    model: PreTrainedModel, rows: list[Tensor], make_decoder: MakeDecoder
) -> Tensor:
    """Prefill of each row's first half, then the rest token by token, both rows side by side.

    Returns:
        logits (M, V) at the M `_decoded_places`.
    """
    device = model.device
    width = -(-max(len(row) for row in rows) // BLOCK_TOKENS)
    dtype = twin_of(model).dtype
    has_states = keeps_states(model)
    memory = KVMemory(
        kv_shapes(model), width * len(rows) + 1, dtype=dtype, device=device,
        num_slots=len(rows) + 1 if has_states else 0,
    )  # fmt: skip
    slots = torch.arange(len(rows) - 1, -1, -1, device=device) if has_states else None
    # Blocks in descending order, so that a decoder that ignores the table fails.
    tables = torch.arange(width * len(rows) - 1, -1, -1, dtype=torch.int32, device=device)
    tables = tables.view(len(rows), width)
    decoder = make_decoder(model, memory, width * BLOCK_TOKENS)
    try:
        halves = _halves(rows)
        ids = torch.cat([row[:n] for row, n in zip(rows, halves, strict=True)])
        parts = [[logits] for logits in decoder.prefill(ids, halves, tables, None, slots)]
        for place in range(min(halves), max(len(row) for row in rows)):
            live = [i for i, row in enumerate(rows) if halves[i] <= place < len(row)]
            if not live:
                continue
            at = torch.full((len(live),), place, device=device)
            ids = torch.stack([rows[i][place] for i in live])
            # A decoder may write its next logits into the same tensor.
            states = None if slots is None else slots[live]
            logits = decoder.decode(ids, at, tables[live], states).clone()
            for i, row_logits in zip(live, logits, strict=True):
                parts[i].append(row_logits)
    finally:
        decoder.close()
    return torch.cat([torch.stack(part) for part in parts])


def _halves(rows: list[Tensor]) -> list[int]:
    return [max(1, len(row) // 2) for row in rows]


def _decoded_places(rows: list[Tensor]) -> Tensor:
    """The indices, in the packed rows, of the tokens whose logits decoding returns."""
    places, first = [], 0
    for row, half in zip(rows, _halves(rows), strict=True):
        places.append(torch.arange(first + half - 1, first + len(row), device=row.device))
        first += len(row)
    return torch.cat(places)


class _Modules:
    """Decodes by the twin's modules."""

    def __init__(self, model: PreTrainedModel, memory: KVMemory, longest: int) -> None:
        self._model, self._memory = model, memory

    def prefill(
        self,
        token_ids: Tensor,
        lengths: Sequence[int],
        tables: Tensor,
        starts: None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """As `Decoder` says."""
        device = token_ids.device
        plain = Packed.of_lengths(lengths, device)
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        step = Packed(plain.cu_seqlens, plain.max_length, self._memory, tables, slots=states)
        with attending(step):
            return _logits(self._model, token_ids, positions)[plain.cu_seqlens[1:].long() - 1]

    def decode(
        self, token_ids: Tensor, positions: Tensor, tables: Tensor, states: Tensor | None = None
    ) -> Tensor:
        """As `Decoder` says."""
        with attending(Decode(positions, tables, self._memory, states)):
            return _logits(self._model, token_ids, positions)

    def close(self) -> None:
        """There is nothing to free."""


def _logits(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> Tensor:
    output = twin_of(model)(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    return output.logits[0]


def _advice(model: PreTrainedModel) -> str:
    """What to do about a twin that computes something else."""
    if wrapped := own_forwards(model):
        return (
            f"Module {wrapped[0]!r} has a forward set on its object, which calls the model's own "
            "attention: put it into a subclass, or undo it (del module.forward)."
        )
    return "This family is not supported."


def _require_close(model: PreTrainedModel, own: Tensor, ours: Tensor, road: str) -> float:
    """Equal up to rounding, and the same likeliest token except in near ties.

    In half precision rounding also sends a few of a mixture's tokens to other experts. A wrong
    layer shows in nearly all tokens.
    """
    scale, eps = max(1.0, float(own.float().abs().max())), torch.finfo(own.dtype).eps
    tolerance = 4 * math.sqrt(eps)
    rerouted = _REROUTED if eps > 1e-4 and has_experts(model) else 0.0
    apart = (own.float() - ours.float()).abs().amax(-1) / scale
    largest = float(apart.max())
    top = own.float().topk(2, dim=-1)
    clear = top.values[:, 0] - top.values[:, 1] > 2 * tolerance * scale
    differs = (apart > tolerance) | clear & (ours.argmax(-1) != top.indices[:, 0])
    if math.isnan(largest) or int(differs.sum()) > rerouted * len(differs):
        raise ModelError(
            f"the {road} forward of family {model.config.model_type!r} must give its own forward's "
            f"logits; got a largest difference of {largest:.3g} of the largest logit. "
            f"{_advice(model)}"
        )
    return largest
