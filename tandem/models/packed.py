"""Forwards over packed sequences: only the real tokens of a batch, so no work on padding.

N is the number of tokens that are computed: the real tokens in the order of the batch's rows, or,
where rows begin with the same prompt, that prompt once and then each row's response. Tokens that
nothing asked for depends on are left out: those after the last state that a row is asked for, and
past the last block's attention (`ops.attention_context.Wanted`) all but the states asked for.
Families whose attention cannot be reached (`twin.supports_packing`) run padded, and the real tokens
are picked afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from tandem.errors import ShapeError
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
class PromptGroup:
    """Rows of a batch that begin with the same prompt.

    rows: their numbers, in order. prompt_tokens: the tokens before the first response token, 0 for
    a row without a response, which is a group of its own.
    """

    rows: list[int]
    prompt_tokens: int


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
    mask = batch.response_mask
    if mask.device.type == "cpu":
        return batch.token_ids[mask]
    flat = mask.flatten()
    places = torch.where(flat, flat.cumsum(0) - 1, count)  # all others in one place more
    made = batch.token_ids.new_empty(count + 1)
    return made.scatter_(0, places, batch.token_ids.flatten())[:count]


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
    """Whether rows that begin with the same prompt run it once, with the same numbers.

    That needs a model in which a token depends on the tokens before it alone, and no dropout, which
    would draw one mask for all of them.
    """
    return decodes(model) and not drops_now(model)


def prompt_groups(batch: TokenBatch) -> list[PromptGroup]:
    """The rows of a batch by prompt, told by its tokens; in the order of the groups' first rows."""
    batch = batch.on_host()
    answered = batch.response_mask.any(dim=1).tolist()
    lengths = batch.response_mask.int().argmax(dim=1).tolist()
    ids = batch.token_ids.numpy()
    groups: dict[bytes | int, PromptGroup] = {}
    for row, (has_response, length) in enumerate(zip(answered, lengths, strict=True)):
        if not has_response:
            groups[row] = PromptGroup([row], 0)
            continue
        group = groups.setdefault(ids[row, :length].tobytes(), PromptGroup([], length))
        group.rows.append(row)
    return list(groups.values())


def packed_rows(
    batch: TokenBatch,
    real: Tensor,
    asked: Tensor | None = None,
    *,
    shares: bool = False,
    kept: KeptStates | None = None,
) -> PackedRows:
    """The tokens of a batch side by side.

    Rows of one prompt need not be neighbors; with a shared prompt they stand together here.

    Args:
        real: (B, T) bool, on the host: the tokens to compute, each row's first ones.
        asked: (B, T) bool, on the host, a subset: the tokens whose states are asked for; None: all.
        shares: rows that begin with the same prompt run it once.
        kept: states of the batch's tokens, if they are all there.
    """
    host = batch.on_host()
    lengths = real.sum(dim=1).tolist()
    groups = prompt_groups(host) if shares else []
    columns = [host.token_ids, _places(host)]
    if kept is not None and bool((kept.rows[real] >= 0).all()):
        columns.append(kept.rows)
    if not any(len(group.rows) > 1 for group in groups):
        # Every token stands once, in the order of the question.
        prefixes, order = None, None
        made = [column[real] for column in columns]
        index = (real.flatten().cumsum(0) - 1).view(real.shape)
        wanted = index[real if asked is None else asked]
    else:
        lengths, prefixes, shifts = _segments(groups, lengths)
        shared, starts, others = torch.tensor(shifts, device="cpu")[:, :, None]
        places = _places(host)
        index = places + torch.where(places < shared, starts, others)
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
    groups: Sequence[PromptGroup], row_lengths: Sequence[int]
) -> tuple[list[int], list[int], tuple[list[int], ...]]:
    """The lengths of the segments that shared prompts make and the segment that each continues
    (-1: none); and of each row: tokens of its shared prompt, where that begins, and where position
    0 of the rest would stand."""
    lengths: list[int] = []
    prefixes: list[int] = []
    shared, starts, shifts = ([0] * len(row_lengths) for _ in range(3))
    total = 0
    for group in groups:
        prompt = group.prompt_tokens if len(group.rows) > 1 else 0
        start, prefix = total, -1
        if prompt:
            prefix = len(lengths)
            lengths.append(prompt)
            prefixes.append(-1)
            total += prompt
        for row in group.rows:
            shared[row], starts[row], shifts[row] = prompt, start, total - prompt
            rest = row_lengths[row] - prompt
            if rest:
                lengths.append(rest)
                prefixes.append(prefix)
                total += rest
    return lengths, prefixes, (shared, starts, shifts)


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
