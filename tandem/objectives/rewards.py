"""Scores and KL, made into a reward per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tandem.errors import ShapeError
from tandem.objectives.masked import require_same_shape

_ROUNDING = 1e-12
"""Share of its parts below which a sum in float64 is a rounding error."""


def last_response_token(response_mask: Tensor) -> Tensor:
    """(B,) int64: index of each row's last response token (its EOS, or where it was cut).

    Raises:
        ShapeError: a row has no response token, so that it has nowhere to be rewarded.
    """
    if not bool(response_mask.any(dim=1).all()):
        rows = (~response_mask.any(dim=1)).nonzero().flatten().tolist()
        raise ShapeError(f"every row must have a response token; rows {rows} have none.")
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    return torch.where(response_mask, positions, -1).amax(dim=1)


def token_rewards(
    scores: Tensor,
    kl: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    of_tokens: Tensor | None = None,
) -> Tensor:
    """Reward per token: minus the KL penalty on each response token, plus the score on the last.

    Args:
        scores: (B,) one number per answer, reward units.
        kl: (B, T) nats; ignored off the response.
        response_mask: (B, T), EOS included; a response need not be contiguous.
        kl_coef: reward units per nat.
        of_tokens: (B, T) what tokens got by themselves; only the rest of the score is then on the
            last one. 0 off the response. None: nothing.
    Returns:
        (B, T) float32, 0 off the response.
    Raises:
        ShapeError: tensors disagree, or a row has no response token.
    Source: arXiv:2203.02155 eq. 2 (without ptx), per token as in arXiv:1909.08593.
    """
    require_same_shape(kl=kl, response_mask=response_mask)
    last = last_response_token(response_mask)
    rewards = (-kl_coef * kl.float()).masked_fill(~response_mask, 0.0)
    scores = scores.float()
    if of_tokens is not None:
        require_same_shape(of_tokens=of_tokens, response_mask=response_mask)
        rewards, scores = rewards + of_tokens, scores - of_tokens.sum(dim=1)
    return rewards.scatter_add(1, last[:, None], scores[:, None])


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: float) -> Tensor:
    """What is taken from an answer's score for its length: 0 up to the buffer, 1 at the limit.

        clip(1 - (max_tokens - length) / c, 0, 1)        c = buffer * max_tokens

    Exactly 1 at the limit and 0 where the buffer begins, so that scores that are equal stay so.

    Args:
        lengths: (B,) response tokens.
        buffer: share of max_tokens over which the penalty grows, in (0, 1].
    Source: arXiv:2503.14476 (DAPO) eq. 13, negated.
    """
    cache = buffer * max_tokens
    return (1.0 - (max_tokens - lengths).float() / cache).clamp(0.0, 1.0)


def normalized_scores(raw: Tensor, mean: float, std: float) -> Tensor:
    """Scores in units of the SFT policy's spread: (raw - mean) / std."""
    return (raw.float() - mean) / std


def combined_scores(
    rewards: Tensor, weights: Sequence[float], group: Tensor | None = None
) -> Tensor:
    """Several rewards of each answer made into one score: their weighted sum.

    Args:
        rewards: (B, K) one column per reward, each in its own units; NaN where it gives none.
        weights: K numbers. A reward of weight 0 counts for nothing, also not as a score.
        group: (B,) int64, equal for answers to one prompt. With it each reward is normalized in
            its group first (`group_normalized`), so that none drowns the others by its width.
    Returns:
        (B,) float32; NaN where no reward of a weight other than 0 gives a number. A missing
        reward beside others adds nothing. What cancels is exactly 0: a rounding error would pass
        for a difference between the answers of a group.
    Source: arXiv:2601.05242 eq. 4 to 6 (GDPO); the whitening over the batch that follows there is
        the advantages' affair here.
    """
    counts = torch.tensor([weight != 0 for weight in weights], device=rewards.device)
    is_scored = (~rewards.isnan() & counts).any(dim=1)
    used = rewards.double() if group is None else group_normalized(rewards, group)
    factors = torch.tensor(weights, dtype=torch.float64, device=rewards.device)
    parts = used.nan_to_num() * factors
    total = parts.sum(dim=1)
    total = total.masked_fill(total.abs() <= _ROUNDING * parts.abs().sum(dim=1), 0.0)
    return total.float().masked_fill(~is_scored, torch.nan)


def ensemble_scores(
    scores: Tensor,
    weights: Sequence[float],
    how: Literal["mean", "worst-case", "uncertainty"],
    *,
    uncertainty_coef: float = 0.0,
) -> Tensor:
    """Several reward models' scores of each answer made into one.

        mean         m = sum of w s / sum of w
        worst-case   the lowest s
        uncertainty  m - uncertainty_coef * v,    v = sum of w (s - m)^2 / sum of w

    Args:
        scores: (B, K) normalized, one column per model.
        weights: w, K numbers of at least 0, not all 0. A model of weight 0 does not count.
    Returns:
        (B,) float32.
    Source: arXiv:2310.02743 section 3.2 (WCO, UWO).
    """
    counts = [k for k, weight in enumerate(weights) if weight != 0]
    counted = scores[:, counts].double()
    if how == "worst-case":
        return counted.amin(dim=1).float()
    shares = counted.new_tensor([weights[k] for k in counts])
    mean, variance = _weighted_moments(counted, shares / shares.sum())
    return (mean if how == "mean" else mean - uncertainty_coef * variance).float()


def disagreement(scores: Tensor) -> Tensor:
    """(B,) float32: the standard deviation (over K) of models' scores (B, K) of each answer."""
    counted = scores.double()
    shares = counted.new_full((counted.shape[1],), 1 / counted.shape[1])
    return _weighted_moments(counted, shares)[1].sqrt().float()


def _weighted_moments(scores: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each row, by shares that sum to 1."""
    mean = (scores * shares).sum(dim=1)
    return mean, ((scores - mean[:, None]).square() * shares).sum(dim=1)


def group_normalized(rewards: Tensor, group: Tensor, eps: float = 1e-4) -> Tensor:
    """Each column of rewards less its mean in the group, over its standard deviation there.

    Args:
        rewards: (B, K); NaN where there is none, which counts in neither.
        group: (B,) int64.
    Returns:
        (B, K) float64; NaN stays NaN. 0 where all of a group are equal, or only one is there.
    """
    values = rewards.double()
    normalized = torch.zeros_like(values)
    for index in group.unique():
        rows = group == index
        part = values[rows]
        known = ~part.isnan()
        count = known.sum(dim=0)
        centered = (part - part.nansum(dim=0) / count).nan_to_num()
        std = (centered.square().sum(dim=0) / (count - 1).clamp(min=1)).sqrt()
        lowest = part.masked_fill(~known, torch.inf).amin(dim=0)
        highest = part.masked_fill(~known, -torch.inf).amax(dim=0)
        scale = torch.where(highest > lowest, 1 / (std + eps), 0.0)
        normalized[rows] = (centered * scale).masked_fill(~known, torch.nan)
    return normalized


def clipped_scores(scores: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Scores within +- limit (0 turns it off), and which were clipped, (B,) bool."""
    if limit == 0:
        return scores, torch.zeros_like(scores, dtype=torch.bool)
    return scores.clamp(-limit, limit), scores.abs() > limit
