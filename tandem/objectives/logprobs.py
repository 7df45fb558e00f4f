"""Log-probs and entropy of chosen tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tandem.ops import dense
from tandem.ops.logits import rows_at_once


def scatter_to_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) values of the tokens in `mask` back to (B, T) float32, 0 elsewhere; keeps gradients."""
    placed = torch.zeros(mask.shape, dtype=torch.float32, device=values.device)
    return placed.masked_scatter(mask, values.float())


def token_logprobs(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    max_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and the entropy of its distribution, without the whole logits.

        logprob = log softmax(z)[target]      entropy = -sum softmax(z) log softmax(z)
        z = logits / temperature

    Args:
        logits_of: the vocabulary head, (n, D) -> (n, V).
        hidden: (N, D), the state that predicts each target.
        targets: (N,) int64.
        vocabulary: V.
        with_entropy: compute the entropy (zeros otherwise).
        max_rows: most rows through the head at once; None takes the device's budget of bytes
            (`ops.logits`). With more than one chunk the backward pass computes each chunk's logits
            again rather than keep them.
    Returns:
        logprobs (N,) and entropy (N,), float32 nats, with gradient.
    """
    # The logits come in the type of the states, or under autocast in a smaller one.
    rows = max_rows or rows_at_once(vocabulary, hidden.dtype, hidden.device)
    if len(targets) <= rows:
        return _chunk_logprobs(logits_of, hidden, targets, temperature, with_entropy)
    parts = [
        checkpoint(
            _chunk_logprobs,
            logits_of,
            hidden[i : i + rows],
            targets[i : i + rows],
            temperature,
            with_entropy,
            use_reentrant=False,
        )
        for i in range(0, len(targets), rows)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _chunk_logprobs(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    logits = logits_of(hidden)
    return dense.token_logprobs(logits, targets, temperature, with_entropy, keep_logits=False)
