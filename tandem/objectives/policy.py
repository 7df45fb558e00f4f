"""Losses of a policy on tokens that an earlier policy sampled, as sums over tokens.

All take (B, T) tensors that may hold anything off the response, and an advantage per token; they
differ in what the ratio to the sampling policy does to it. At ratio 1 the three have one gradient,
that of REINFORCE (of `sequence_ratio_loss` with the mean of each answer's advantages).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tandem.errors import ShapeError
from tandem.objectives.masked import masked_sum, require_same_shape


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Sums over response tokens: the loss (with gradient) and what to watch.

    clipped: tokens whose gradient the clip cut: clipped_low below its lower bound, clipped_high
    above its upper one (the cap of CISPO and the bound of the dual clip among these). kl: k3
    estimate of KL(sampling policy, policy). ratio, abs_log_ratio: sums; max_ratio: the largest.
    """

    loss: Tensor
    clipped: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kl: Tensor
    ratio: Tensor
    abs_log_ratio: Tensor
    max_ratio: Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    token_weights: Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, negated.

        ratio = exp(logprobs - old_logprobs)
        -w min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
        where A < 0, with dual_clip c: -w max(that minimum, c A)

    Args:
        dual_clip: c > 1, the most that a ratio counts for where A < 0; 0 sets no bound there.
        token_weights: w, of the loss alone and not of the metrics; None weighs every token 1. Its
            denominator is `aggregation`'s; that of the metrics is response tokens.
    Source: arXiv:1707.06347 eq. 7; two bounds: arXiv:2503.14476 (DAPO) eq. 10; dual clip:
        arXiv:1912.09729 eq. 5.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, advantages, response_mask)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    is_low = (clipped < unclipped) & (advantages < 0)
    is_high = (clipped < unclipped) & (advantages > 0)
    if dual_clip > 0:
        bound = dual_clip * advantages
        is_high = is_high | ((surrogate < bound) & (advantages < 0))
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, bound), surrogate)
    return _summed(surrogate, response_mask, token_weights, log_ratio, ratio, is_low, is_high)


def capped_reinforce_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    max_ratio: float,
    token_weights: Tensor | None = None,
) -> PolicyLoss:
    """CISPO: REINFORCE whose weight is the ratio, without gradient and at most `max_ratio`.

        -w stopgrad(min(ratio, max_ratio)) A logprob

    No token loses its gradient; one whose ratio is large only counts for less.

    Args:
        max_ratio: the ratio's own bound, as in ScaleRL and TRL (5). verl's CISPO bounds the
            ratio to [1 - low, 1 + high] instead.
    Source: arXiv:2506.13585 (CISPO); the upper bound alone: arXiv:2510.13786 (ScaleRL).
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, advantages, response_mask)
    ratio = log_ratio.exp()
    surrogate = ratio.detach().clamp(max=max_ratio) * advantages * logprobs
    is_high = (ratio > max_ratio) & (advantages != 0)
    nowhere = torch.zeros_like(is_high)
    return _summed(surrogate, response_mask, token_weights, log_ratio, ratio, nowhere, is_high)


def sequence_ratio_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    token_weights: Tensor | None = None,
) -> PolicyLoss:
    """GSPO: the clipped surrogate of an answer's ratio, on each of its tokens.

        s = exp(mean over the answer of (logprobs - old_logprobs))
        -w min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

    With w = 1 / length an answer counts once (`aggregation` by sequence, the paper's). s is so
    near 1 that its bounds are about a thousandth of a token's; ratio metrics are the tokens'.

    Source: arXiv:2507.18071 eq. 5 to 7.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, advantages, response_mask)
    lengths = response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    whole = (log_ratio.sum(dim=1, keepdim=True) / lengths).exp()
    unclipped = whole * advantages
    clipped = whole.clamp(1 - clip_low, 1 + clip_high) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    is_cut = clipped < unclipped
    is_low, is_high = is_cut & (advantages < 0), is_cut & (advantages > 0)
    ratio = log_ratio.exp()
    return _summed(surrogate, response_mask, token_weights, log_ratio, ratio, is_low, is_high)


TokenLosses = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""logprobs, old_logprobs, advantages and response_mask, all (B, T), to each token's loss, (B, T).
Rows are some answers of an update, so that one answer's loss must not depend on another's."""


def given_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    token_losses: TokenLosses,
    token_weights: Tensor | None = None,
) -> PolicyLoss:
    """The token losses of a function that the user gives; no token counts as clipped.

    Raises:
        ShapeError: it returns something else than (B, T) numbers, or none that depend on
            `logprobs`.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, advantages, response_mask)
    losses = token_losses(logprobs, old_logprobs, advantages, response_mask)
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        found = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise ShapeError(f"token_losses must return a tensor of floats (B, T); got {found}.")
    if losses.shape != response_mask.shape:
        raise ShapeError(
            f"token_losses must return a loss for each token, {tuple(response_mask.shape)}; got "
            f"{tuple(losses.shape)}. Return them as they are, not their sum or mean."
        )
    if logprobs.requires_grad and not losses.requires_grad:
        raise ShapeError(
            "token_losses must return losses with a gradient; got none. Compute them from the "
            "log-probs, not detached."
        )
    nowhere = torch.zeros_like(response_mask)
    return _summed(
        -losses, response_mask, token_weights, log_ratio, log_ratio.exp(), nowhere, nowhere
    )


def _log_ratio(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> Tensor:
    require_same_shape(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=response_mask
    )
    return (logprobs - old_logprobs).masked_fill(~response_mask, 0.0)


def _summed(
    surrogate: Tensor,
    mask: Tensor,
    token_weights: Tensor | None,
    log_ratio: Tensor,
    ratio: Tensor,
    is_low: Tensor,
    is_high: Tensor,
) -> PolicyLoss:
    if token_weights is not None:
        surrogate = surrogate * token_weights
    loss = -masked_sum(surrogate, mask)
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            clipped=masked_sum(is_low | is_high, mask),
            clipped_low=masked_sum(is_low, mask),
            clipped_high=masked_sum(is_high, mask),
            kl=masked_sum(torch.expm1(log_ratio) - log_ratio, mask),
            ratio=masked_sum(ratio, mask),
            abs_log_ratio=masked_sum(log_ratio.abs(), mask),
            max_ratio=ratio.masked_fill(~mask, 0.0).amax(),
        )


Aggregation = Literal["token", "sequence", "constant"]


def aggregation(
    response_mask: Tensor, by: Aggregation, *, max_tokens: int = 0
) -> tuple[Tensor | None, int]:
    """How per-token losses become one number: weights (B, T) and the denominator of their sum.

        token      every response token counts alike (arXiv:2503.14476, "token-level loss")
        sequence   every answer counts alike: its tokens' mean (arXiv:2402.03300 eq. 3, GRPO)
        constant   every token counts 1 / (answers * max_tokens), so that neither its answer's
                   length nor the others' matters (arXiv:2503.20783, Dr. GRPO)

    Args:
        response_mask: (B, T) bool, of the whole step: all micro-batches, all ranks.
        max_tokens: of an answer; for `constant` alone.
    Returns:
        weights, None where all are 1, and the denominator.
    """
    weights = aggregation_weights(response_mask, by)
    if by == "token":
        return weights, int(response_mask.sum())
    num_answers = int(response_mask.any(dim=1).sum())
    return weights, num_answers * max_tokens if by == "constant" else num_answers


def aggregation_weights(response_mask: Tensor, by: Aggregation) -> Tensor | None:
    """The weights of `aggregation` alone, of any rows; the device is asked for nothing."""
    if by != "sequence":
        return None
    return response_mask.float() / response_mask.sum(dim=1, keepdim=True).clamp(min=1)
