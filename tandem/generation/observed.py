"""Log-probs of drawn tokens and of the likeliest ones, for the answers that ask for them.

They are the model's own, of softmax(logits) without temperature, penalties or truncation, and so
equal to those of a forward over the whole answer. What a model has beyond its tokenizer counts in
the softmax, and is not listed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.ops import dense


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-prob in nats, and (id, log-prob) of the likeliest tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def observe(
    logits: Tensor, tokens: Tensor, count: int, num_ids: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of tokens and of the likeliest ones, on the logits' device.

    Args:
        logits: (n, V).
        tokens: (n,) int64.
        count: how many of the likeliest, at most V.
        num_ids: the likeliest are those of the tokens below it.
    Returns:
        (n,) float32 nats, (n, count) int64 ids, the likeliest first, (n, count) float32 nats.
    """
    chosen, _ = dense.token_logprobs(logits, tokens, 1.0, False)
    ids = _likeliest(logits[:, :num_ids], min(count, num_ids, logits.shape[1]))
    # A column at a time through the same operation: a token has one log-prob, however it is asked.
    columns = [dense.token_logprobs(logits, column, 1.0, False)[0] for column in ids.unbind(1)]
    likeliest = torch.stack(columns, dim=1) if columns else chosen.new_zeros((len(tokens), 0))
    return chosen, ids, likeliest


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """(n, count) ids, the likeliest first; of equal logits, of which bf16 has many, the lowest.

    Which of them `topk` takes depends on how many it is asked for, and so on other answers.
    """
    if not count:
        return torch.empty((len(logits), 0), dtype=torch.long, device=logits.device)
    none = logits.shape[1]
    values, ids = logits.topk(count, dim=-1)
    border = values[:, -1:]
    lowest_first = torch.arange(none, 0, -1, device=logits.device, dtype=torch.int32)
    ties = torch.where(logits == border, lowest_first, 0).topk(count, dim=-1).values
    found = torch.cat((torch.where(values > border, ids, none), none - ties), dim=1)
    found = found.sort(dim=1).values
    values = logits.gather(1, found.clamp(max=none - 1)).masked_fill(found == none, -torch.inf)
    order = values.argsort(dim=1, descending=True, stable=True)[:, :count]
    return found.gather(1, order).clamp(max=none - 1)  # where all is NaN none is found


def read_observed(
    tokens: Sequence[int], observed: tuple[Tensor, Tensor, Tensor], counts: Collection[int]
) -> list[TokenLogprobs]:
    """What `observe` found, as the host reads it; `counts` of the likeliest for each token."""
    chosen, ids, likeliest = (part.tolist() for part in observed)
    return [
        TokenLogprobs(
            token, chosen[i], tuple(zip(ids[i][:count], likeliest[i][:count], strict=True))
        )
        for i, (token, count) in enumerate(zip(tokens, counts, strict=True))
    ]
