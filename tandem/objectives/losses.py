"""Losses as sums over tokens or rows. Nothing here divides by a count.

The caller divides once, by the count over the whole optimizer step (all micro-batches, all
ranks), so a gradient does not depend on how the step was cut up. Each function returns the
differentiable sum first, then sums for the metrics, detached.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.objectives.masked import masked_sum, require_same_shape


def sft_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum of -log p over the tokens in `mask` (B, T), in nats. Denominator: those tokens."""
    return -masked_sum(logprobs, mask)


def dft_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Dynamic fine-tuning: `sft_loss` with each token weighted by its own probability, which has no
    gradient, so that unlikely tokens pull less. Denominator: the tokens in `mask` (B, T).

    Source: arXiv:2508.05629, the loss of a token -sg(p) log p.
    """
    return -masked_sum(logprobs.detach().exp() * logprobs, mask)


@dataclass(frozen=True, slots=True)
class PairwiseLoss:
    """Sums over pairs: the loss (with gradient), wins, margins, and the centering penalty."""

    loss: Tensor
    accuracy: Tensor
    margin: Tensor
    center_penalty: Tensor


def wins_of(margins: Tensor) -> Tensor:
    """1.0 where the chosen answer is ahead, 0.5 at a tie, else 0.0; the margins' shape, float32."""
    return (margins > 0).float() + 0.5 * (margins == 0).float()


def pairwise_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    center_coef: float = 0.0,
    margins: Tensor | None = None,
    weights: Tensor | None = None,
) -> PairwiseLoss:
    """Bradley-Terry loss of a reward model. Denominator: pairs, or the sum of their weights.

        -log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2

    Args:
        chosen, rejected: (B,) scores at the last real token, reward-model units.
        margins: (B,) how much better the chosen answer was called; None: 0.
        weights: (B,) of each pair, in every sum: 1 / C(K, 2) for the pairs of a ranking of K
            answers; None: 1.
    A tie counts as half a win. The margin is the loss's alone, not the metrics'.
    Source: arXiv:2203.02155 eq. 1; margin: arXiv:2307.09288 eq. 2; centering: arXiv:2312.09244
    eq. 2.
    """
    require_same_shape(chosen=chosen, rejected=rejected)
    weights = torch.ones_like(chosen, dtype=torch.float32) if weights is None else weights
    margin = chosen.float() - rejected.float()
    penalty = (weights * (chosen.float() + rejected.float()).square()).sum()
    asked = margin if margins is None else margin - margins
    loss = -(weights * F.logsigmoid(asked)).sum() + center_coef * penalty
    return PairwiseLoss(
        loss, (weights * wins_of(margin)).sum(), (weights * margin).detach().sum(), penalty.detach()
    )


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Sums over response tokens: the loss (with gradient), and tokens whose gradient was cut."""

    loss: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    value_clip: float,
) -> ValueLoss:
    """Half the squared error of the critic, clipped around its old values.

        v_clip = old + clip(v - old, -c, c)        0.5 max((v - R)^2, (v_clip - R)^2)

    `value_clip` = 0 leaves the plain squared error. Denominator: response tokens.
    Source: arXiv:2005.12729 (PPO2's value clipping).
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=response_mask)
    plain = (values - returns).square()
    if value_clip == 0:
        zero = torch.zeros((), device=values.device)
        return ValueLoss(0.5 * masked_sum(plain, response_mask), zero)
    change = values - old_values
    moved = old_values + change.clamp(-value_clip, value_clip)
    clipped = (moved - returns).square()
    loss = 0.5 * masked_sum(torch.maximum(plain, clipped), response_mask)
    # Within the clip, old + (v - old) may still be a last bit off v: that is not clipping.
    counts = (clipped > plain) & (change.abs() > value_clip)
    return ValueLoss(loss, masked_sum(counts.detach(), response_mask))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the mask; 0 when returns do not vary."""
    errors, targets = (returns - values)[mask].float(), returns[mask].float()
    if len(targets) == 0:
        return 0.0
    variance = (targets - targets[0]).var(correction=0)  # exactly 0 where they are equal
    if variance < 1e-12:
        return 0.0
    return float(1 - errors.var(correction=0) / variance)
