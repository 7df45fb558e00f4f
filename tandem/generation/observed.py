"""Log-probs of drawn tokens and of the likeliest ones, for the answers that ask for them.

They are the model's own, of softmax(logits) without temperature, penalties or truncation, and so
equal to those of a forward over the whole answer.
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


def observe(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of tokens and of the likeliest ones, on the logits' device.

    Args:
        logits: (n, V).
        tokens: (n,) int64.
        count: how many of the likeliest, at most V.
    Returns:
        (n,) float32 nats, (n, count) int64 ids, the likeliest first, (n, count) float32 nats.
    """
    chosen, _ = dense.token_logprobs(logits, tokens, 1.0, False)
    count = min(count, logits.shape[1])
    ids = logits.topk(count, dim=-1).indices
    # A column at a time through the same operation: a token has one log-prob, however it is asked.
    columns = [dense.token_logprobs(logits, ids[:, i], 1.0, False)[0] for i in range(count)]
    likeliest = torch.stack(columns, dim=1) if columns else chosen.new_zeros((len(tokens), 0))
    return chosen, ids, likeliest


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
