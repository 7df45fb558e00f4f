"""Forwards over packed sequences: only the real tokens of a batch, so no work on padding.

N is the number of tokens that are computed: the real tokens in the order of the batch's rows, or,
where rows begin alike (`beginnings`), each beginning once and then what continues it: prompts, and
each row's response. Tokens that nothing asked for depends on are left out: those after the last
state that a row is asked for, and past the last block's attention (`ops.attention_context.Wanted`),
on a CPU with their queries, all but the states asked for. Families whose attention cannot be
reached (`twin.supports_packing`) run padded, and the real tokens are picked afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from tandem.errors import ShapeError
from tandem.models.beginnings import Beginning, PromptGroup, in_company, prompt_groups
from tandem.models.blocks import decoder_blocks
from tandem.models.recompute import require_whole_layers
from tandem.models.replayed import KeptStates, replayed_states
from tandem.models.twin import (
    base_forward,
    compares_once,
    decodes,
    has_dropout,
    running,
    supports_packing,
    twin_of,
    why_unpacked,
)
from tandem.ops import gpu
from tandem.ops.attention_context import Packed, Wanted, WholeSequences, attending
from tandem.types import TokenBatch


@dataclass(frozen=True, slots=True)
class PackedRows:
    """How a batch's tokens stand side by side.

    token_ids, positions: (N,) int64; positions count from 0 in every row.
    step: the sequences that they are, and the tokens whose states are wanted.
    asked: (R,) int64, where among the wanted tokens (of all N if `step.wanted` is None) the states
        asked for stand, in the order of the question; None: they are those, in their order.
    kept: (N,) int64, the rows of kept states that the tokens have; None: nothing was kept.

    Example: rows [p q a d] and [p q b c] of one prompt [p q], asked for the token before each
    response token, are the tokens p q a b at positions 0 1 2 2, of which 1, 2 and 3 are wanted and
    0 1 0 2 of those asked for.
    """

    token_ids: Tensor
    positions: Tensor
    step: Packed
    asked: Tensor | None
    kept: Tensor | None = None


@compares_once
def hidden_states(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Last hidden states (N, D) of all real tokens of a batch, row by row, with gradient.

    Positions count from 0 in every row; a token sees its own row up to itself.
    """
    if not supports_packing(model):
        return _padded_states(model, batch)[batch.attention_mask]
    return _states(model, packed_rows(batch, batch.on_host().attention_mask))


@compares_once
def predictor_states(
    model: PreTrainedModel, batch: TokenBatch, kept: KeptStates | None = None
) -> Tensor:
    """(R, D) for the R response tokens, in the order of the mask: the last hidden state of the
    token before each, with gradient. Rows may share their prompts (`shares_prompts`).

    Args:
        kept: states of the batch's tokens, from the weights that the model has now: where they are
            all there, its layers do not run.
    Raises:
        ShapeError: the mask holds at index 0, which nothing precedes.
    """
    if not supports_packing(model):
        return _padded_states(model, batch)[_before_responses(batch)]
    rows = _rows_asked(model, batch, ends=False, kept=kept)
    if kept is None or rows.kept is None:
        return _states(model, rows)
    states = replayed_states(
        twin_of(model), rows.token_ids, rows.positions, rows.step, kept, rows.kept
    )
    return states if rows.asked is None else states[rows.asked]


def response_tokens(batch: TokenBatch, count: int) -> Tensor:
    """(R,) int64: the response tokens in the order of the mask.

    Args:
        count: R, which the host then need not ask the device for.
    """
    return at_responses(batch.token_ids, batch.response_mask, count)


def at_responses(values: Tensor, mask: Tensor, count: int) -> Tensor:
    """(R,): the values (B, T) where the mask holds, in its order; `count`: R."""
    if mask.device.type == "cpu":
        return values[mask]
    flat = mask.flatten()
    places = torch.where(flat, flat.cumsum(0) - 1, count)  # all others in one place more
    made = values.new_empty(count + 1)
    return made.scatter_(0, places, values.flatten())[:count]


@compares_once
def last_states(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """(B, D): the last hidden state of each row's last real token, with gradient. Rows may share
    their prompts (`shares_prompts`)."""
    if not supports_packing(model):
        ends = batch.lengths() - 1
        return _padded_states(model, batch)[torch.arange(len(batch), device=ends.device), ends]
    return _states(model, _rows_asked(model, batch, ends=True))


@compares_once
def computed_tokens(
    model: PreTrainedModel, batch: TokenBatch, *, ends: bool
) -> tuple[Tensor, Tensor]:
    """Which tokens a packed forward computes, and which of their states are asked for; (B, T) bool
    each, on the host.

    Args:
        ends: as `last_states` asks, else as `predictor_states` does.
    Raises:
        ShapeError: as `predictor_states`.
    """
    host = batch.on_host()
    real = host.attention_mask
    if ends:
        return real, real & ~pad(real[:, 1:], (0, 1))
    asked = _before_responses(host)
    # With longrope a token's numbers depend on the length of its sequence.
    return (real & _up_to_the_last(asked) if decodes(model) else real), asked


@compares_once
def narrows(model: PreTrainedModel) -> bool:
    """Whether the last block goes on behind attention with the tokens asked for alone."""
    if not supports_packing(model):
        return False
    return bool(getattr(decoder_blocks(twin_of(model))[-1], "_is_last", False))


def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether rows that begin alike run what they begin with once, with the same numbers.

    That needs a model in which a token depends on the tokens before it alone, and no dropout, which
    would draw one mask for all of them.
    """
    return decodes(model) and not drops_now(model)


def packed_rows(
    batch: TokenBatch,
    real: Tensor,
    asked: Tensor | None = None,
    *,
    shares: bool = False,
    kept: KeptStates | None = None,
) -> PackedRows:
    """The tokens of a batch side by side.

    Rows that begin alike need not be neighbors; they stand together here.

    Args:
        real: (B, T) bool, on the host: the tokens to compute, each row's first ones.
        asked: (B, T) bool, on the host, a subset: the tokens whose states are asked for; None: all.
        shares: rows that begin alike run what they begin with once.
        kept: states of the batch's tokens, if they are all there.
    """
    host = batch.on_host()
    lengths = real.sum(dim=1).tolist()
    groups = prompt_groups(host) if shares else []
    columns = [host.token_ids, _places(host)]
    if kept is not None and bool((kept.rows[real] >= 0).all()):
        columns.append(kept.rows)
    if not any(len(group.rows) > 1 or group.beginnings for group in groups):
        # Every token stands once, in the order of the question.
        prefixes, order = None, None
        made = [column[real] for column in columns]
        index = (real.flatten().cumsum(0) - 1).view(real.shape)
        wanted = index[real if asked is None else asked]
    else:
        lengths, prefixes, index = _segments(groups, lengths, real.shape[1])
        # A token that several rows share is written by each of them, with one value.
        made = [
            torch.empty(sum(lengths), dtype=torch.long, device="cpu").index_copy_(
                0, index[real], column[real]
            )
            for column in columns
        ]
        wanted, order = index[real if asked is None else asked].unique(return_inverse=True)
    if not len(wanted):  # the forward must run all the same, for other ranks
        order = wanted
    narrows = 0 < len(wanted) < sum(lengths)
    step = Packed.of_lengths(
        lengths, torch.device("cpu"), prefixes, Wanted(wanted) if narrows else None
    )
    rows = PackedRows(made[0], made[1], step, order, made[2] if len(made) > 2 else None)
    device = batch.token_ids.device
    return rows if device.type == "cpu" else _sent(rows, device)


def _segments(
    groups: Sequence[PromptGroup], row_lengths: Sequence[int], width: int
) -> tuple[list[int], list[int], Tensor]:
    """The lengths of the segments that beginnings, prompts and responses make, and the segment that
    each continues (-1: none); and (B, width) int64, where each token of a row stands among theirs
    (behind a row's tokens: anything)."""
    ends, prefixes = [0], list[int]()
    index = torch.zeros((len(row_lengths), width), dtype=torch.long, device="cpu")
    places = torch.arange(width, device="cpu")
    there = index.new_zeros(width)  # where the tokens stand of the segments that may be continued

    def add(begin: int, end: int, prefix: int) -> int:
        there[begin:end] = places[: end - begin] + ends[-1]
        ends.append(ends[-1] + end - begin)
        prefixes.append(prefix)
        return len(prefixes) - 1

    opened: list[tuple[Beginning, int]] = []  # with their segments
    for group in in_company(groups):
        while opened and opened[-1][0] not in group.beginnings:
            opened.pop()
        for part in group.beginnings[len(opened) :]:
            begin, prefix = (opened[-1][0].end, opened[-1][1]) if opened else (0, -1)
            opened.append((part, add(begin, part.end, prefix)))
        begin, prefix = (opened[-1][0].end, opened[-1][1]) if opened else (0, -1)
        if len(group.rows) > 1 and group.prompt_tokens > begin:
            prefix, begin = add(begin, group.prompt_tokens, prefix), group.prompt_tokens
        for row in group.rows:
            length = row_lengths[row]
            if length > begin:
                add(begin, length, prefix)
            index[row, :length] = there[:length]
    return [b - a for a, b in pairwise(ends)], prefixes, index


def _rows_asked(
    model: PreTrainedModel, batch: TokenBatch, *, ends: bool, kept: KeptStates | None = None
) -> PackedRows:
    real, asked = computed_tokens(model, batch, ends=ends)
    return packed_rows(batch, real, asked, shares=shares_prompts(model), kept=kept)


def _places(batch: TokenBatch) -> Tensor:
    """(B, T): each token's number in its row."""
    width = batch.token_ids.shape[1]
    return torch.arange(width, device=batch.token_ids.device).expand_as(batch.token_ids)


def _up_to_the_last(asked: Tensor) -> Tensor:
    """(B, T) bool: the tokens up to the last one asked for; all in rows without any."""
    return (asked.flip(1).cumsum(1) > 0).flip(1) | ~asked.any(1, keepdim=True)


def _sent(rows: PackedRows, device: torch.device) -> PackedRows:
    """Rows laid out on the host, on a device; in one transfer."""
    step = rows.step
    parts = {"token_ids": rows.token_ids, "positions": rows.positions, "ends": step.cu_seqlens}
    if rows.asked is not None:
        parts["asked"] = rows.asked
    if step.wanted is not None:
        parts["wanted"] = step.wanted.rows
    whole = None
    if step.prefixes is not None:  # a GPU's attention knows of none
        whole = step.whole()
        parts |= {"prefixes": step.prefixes, "tokens": whole.tokens, "back": whole.back}
        parts["own_ends"] = whole.packed.cu_seqlens
    there = dict(zip(parts, gpu.sent_together([*parts.values()], device), strict=True))
    wanted = Wanted(there["wanted"]) if "wanted" in there else None
    ends = there["ends"].int()
    if whole is None:
        moved = Packed(ends, step.max_length, wanted=wanted)
    else:
        own = Packed(there["own_ends"].int(), whole.packed.max_length)
        moved = Packed(
            ends,
            step.max_length,
            prefixes=there["prefixes"].int(),
            wanted=wanted,
            _whole=[WholeSequences(own, there["tokens"], there["back"])],
        )
    return PackedRows(there["token_ids"], there["positions"], moved, there.get("asked"))


def _states(model: PreTrainedModel, rows: PackedRows) -> Tensor:
    """The states asked for, (R, D)."""
    with attending(rows.step):
        states = base_forward(twin_of(model), rows.token_ids[None], rows.positions[None])[0]
    wanted = rows.step.wanted
    if wanted is not None and not wanted.alone:
        states = states.index_select(0, wanted.rows)
    return states if rows.asked is None else states[rows.asked]


def _padded_states(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """(B, T, D). No mask: a causal model's token sees nothing to its right, where padding is."""
    if model.training and torch.is_grad_enabled():
        require_whole_layers(model, why_unpacked(model))
    base = running(model).base_model
    states: Tensor = base(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    return states


def drops_now(model: PreTrainedModel) -> bool:
    """Whether forwards draw dropout masks: in train mode, with some rate above 0."""
    return model.training and has_dropout(model)


def _before_responses(batch: TokenBatch) -> Tensor:
    """(B, T) bool: the next token is a response token.

    A model's output at a token speaks of the next one; this is the one place that knows.
    """
    if bool(batch.response_mask[:, 0].any()):
        raise ShapeError(
            "response_mask must not hold at index 0; got a row that begins with a response. Give "
            "every row a token before its answer."
        )
    return batch.response_mask.roll(-1, 1)
