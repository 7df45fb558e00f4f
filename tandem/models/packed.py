"""Forwards over packed sequences: only the real tokens of a batch, so no work on padding.

N is the number of tokens that are computed: the real tokens in the order of the batch's rows, or,
where rows begin with the same prompt, that prompt once and then each row's response. Families
whose attention cannot be reached (`twin.supports_packing`) run padded, and the real tokens are
picked afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import ShapeError
from tandem.models.recompute import require_whole_layers
from tandem.models.twin import base_forward, decodes, supports_packing, twin_of, why_unpacked
from tandem.ops import gpu
from tandem.ops.attention_context import Packed, WholeSequences, attending
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
    step: the sequences that they are.
    predictors: (R,) int64, where among the N the token before each response token stands, in the
        order of the mask.
    index: (B, T) int64, where among the N a real token stands; meaningless at padding.

    Example: rows [p q a] and [p q b c] of one prompt [p q] are the tokens p q a b c at positions
    0 1 2 2 3, with index [0 1 2 .] and [0 1 3 4].
    """

    token_ids: Tensor
    positions: Tensor
    step: Packed
    predictors: Tensor
    index: Tensor


def hidden_states(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Last hidden states (N, D) of all real tokens of a batch, row by row, with gradient.

    Positions count from 0 in every row; a token sees its own row up to itself.
    """
    if not supports_packing(model):
        return _padded_states(model, batch)[batch.attention_mask]
    return _states(model, _row_by_row(batch))


def predictor_states(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """(R, D) for the R response tokens, in the order of the mask: the last hidden state of the
    token before each, with gradient. Rows may share their prompts (`shares_prompts`).

    Raises:
        ShapeError: the mask holds at index 0, which nothing precedes.
    """
    if not supports_packing(model):
        return _padded_states(model, batch)[:, :-1][_before_responses(batch)]
    rows = packed_rows(batch) if shares_prompts(model) else _row_by_row(batch)
    return _states(model, rows)[rows.predictors]


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


def last_states(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """(B, D): the last hidden state of each row's last real token, with gradient. Rows may share
    their prompts (`shares_prompts`)."""
    ends = batch.lengths() - 1
    if not supports_packing(model):
        return _padded_states(model, batch)[torch.arange(len(batch), device=ends.device), ends]
    rows = packed_rows(batch) if shares_prompts(model) else _row_by_row(batch)
    return _states(model, rows)[rows.index.gather(1, ends[:, None])[:, 0]]


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


def packed_rows(batch: TokenBatch) -> PackedRows:
    """The tokens of a batch side by side, each prompt that several rows share once.

    Rows of one prompt need not be neighbors; they stand together here.
    """
    groups = prompt_groups(batch)
    if all(len(group.rows) == 1 for group in groups):
        return _row_by_row(batch)
    lengths: list[int] = []
    prefixes: list[int] = []
    row_lengths = batch.on_host().lengths().tolist()
    # Of each row: tokens of its shared prompt, where that begins, and where position 0 of the
    # rest would stand.
    shared, starts, shifts = ([0] * len(batch) for _ in range(3))
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
            lengths.append(row_lengths[row] - prompt)
            prefixes.append(prefix)
            total += lengths[-1]
    return _placed(batch, lengths, prefixes, total, (shared, starts, shifts))


def _placed(
    batch: TokenBatch,
    lengths: Sequence[int],
    prefixes: Sequence[int],
    total: int,
    columns: tuple[list[int], ...],
) -> PackedRows:
    host = batch.on_host()
    shared, starts, shifts = torch.tensor(columns, device="cpu")[:, :, None]
    places = _places(host)
    index = places + torch.where(places < shared, starts, shifts)
    where = index[host.attention_mask]
    # A token that several rows share is written by each of them, with one value.
    token_ids, positions = (torch.empty(total, dtype=torch.long, device="cpu") for _ in range(2))
    token_ids[where] = host.token_ids[host.attention_mask]
    positions[where] = places[host.attention_mask]
    return _sent(batch, token_ids, positions, index, lengths, prefixes)


def _row_by_row(batch: TokenBatch) -> PackedRows:
    """Each row whole, whatever its prompt."""
    host = batch.on_host()
    mask = host.attention_mask
    lengths = host.lengths().tolist()
    return _sent(batch, host.token_ids[mask], _places(host)[mask], real_positions(host), lengths)


def _places(batch: TokenBatch) -> Tensor:
    """(B, T): each token's number in its row."""
    width = batch.token_ids.shape[1]
    return torch.arange(width, device=batch.token_ids.device).expand_as(batch.token_ids)


def _sent(
    batch: TokenBatch,
    token_ids: Tensor,
    positions: Tensor,
    index: Tensor,
    lengths: Sequence[int],
    prefixes: Sequence[int] | None = None,
) -> PackedRows:
    """Rows laid out on the host, where the batch is; to a device in one transfer."""
    predictors = index[:, :-1][_before_responses(batch.on_host())]
    step = Packed.of_lengths(lengths, torch.device("cpu"), prefixes)
    device = batch.token_ids.device
    if device.type == "cpu":
        return PackedRows(token_ids, positions, step, predictors, index)
    parts = [token_ids, positions, predictors, index, step.cu_seqlens]
    whole = None
    if step.prefixes is not None:  # a GPU's attention knows of none
        whole = step.whole()
        parts += [step.prefixes, whole.packed.cu_seqlens, whole.tokens, whole.back]
    token_ids, positions, predictors, index, ends, *more = gpu.sent_together(parts, device)
    if whole is None:
        moved = Packed(ends.int(), step.max_length)
    else:
        shared, own_ends, tokens, back = more
        own = Packed(own_ends.int(), whole.packed.max_length)
        moved = Packed(
            ends.int(),
            step.max_length,
            prefixes=shared.int(),
            _whole=[WholeSequences(own, tokens, back)],
        )
    return PackedRows(token_ids, positions, moved, predictors, index)


def _states(model: PreTrainedModel, rows: PackedRows) -> Tensor:
    with attending(rows.step):
        return base_forward(twin_of(model), rows.token_ids[None], rows.positions[None])[0]


def _padded_states(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """(B, T, D). No mask: a causal model's token sees nothing to its right, where padding is."""
    if model.training and torch.is_grad_enabled():
        require_whole_layers(model, why_unpacked(model))
    states: Tensor = model.base_model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    return states


def drops_now(model: PreTrainedModel) -> bool:
    """Whether forwards draw dropout masks: in train mode, with some rate above 0, of the config or,
    as an adapter's, of a module."""
    if not model.training:
        return False
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    settings = vars(model.config.get_text_config())
    return any(
        "drop" in name and isinstance(rate, float) and rate > 0 for name, rate in settings.items()
    )


def real_positions(batch: TokenBatch) -> Tensor:
    """(B, T) int64: a real token's index among the N, row by row; meaningless at padding."""
    return batch.attention_mask.flatten().cumsum(0).view(batch.attention_mask.shape) - 1


def _before_responses(batch: TokenBatch) -> Tensor:
    """(B, T - 1) bool: the next token is a response token.

    A model's output at a token speaks of the next one; this is the one place that knows.
    """
    if bool(batch.response_mask[:, 0].any()):
        raise ShapeError(
            "response_mask must not hold at index 0; got a row that begins with a response. Give "
            "every row a token before its answer."
        )
    return batch.response_mask[:, 1:]
