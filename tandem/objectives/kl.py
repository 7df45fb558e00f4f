"""Estimators of KL(policy, reference) from sampled tokens, and the adaptive coefficient."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tandem.objectives.masked import require_same_shape

Estimator = Literal["k1", "k2", "k3"]


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """KL per token, in nats, from one sample of the policy.

        d = logprobs - ref_logprobs
        k1 = d      k2 = d^2 / 2      k3 = exp(-d) - 1 + d

    k1 is unbiased and may be negative. k3 is unbiased, never negative and varies less. k2 is
    biased as a value, but it is the one whose gradient is the KL's gradient (as a loss term on
    tokens that the policy sampled).
    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    # expm1 keeps the small values that exp(-d) - 1 + d loses to cancellation.
    return torch.expm1(-log_ratio) + log_ratio


KLLoss = Literal["k2-in-loss", "k3-times-ratio", "forward-k3-in-loss"]


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, placement: KLLoss
) -> Tensor:
    """KL to the reference per token, as a term of the loss, with gradient. (B, T)

        d = logprobs - ref_logprobs        k3 = exp(-d) - 1 + d
        k2-in-loss           d^2 / 2; its gradient is that of KL(policy, reference)
        k3-times-ratio       exp(logprobs - old_logprobs) k3; the same gradient in expectation
                             over tokens of the old policy, whatever the policy is by then
        forward-k3-in-loss   k3; its gradient is that of the *forward* KL(reference, policy),
                             another divergence (GRPO's paper has this one)

    k1 has no place here: its gradient in the loss is 0 in expectation. It belongs in the reward.

    Args:
        old_logprobs: of the policy that sampled; read by k3-times-ratio alone.
    Source: arXiv:2512.02556 (DeepSeek-V3.2) for the ratio; arXiv:2506.09477 for the gradients.
    """
    if placement == "k2-in-loss":
        return token_kl(logprobs, ref_logprobs, "k2")
    kl = token_kl(logprobs, ref_logprobs, "k3")
    if placement == "k3-times-ratio":
        return (logprobs - old_logprobs).exp() * kl
    return kl


def adapted_kl_coef(
    coef: float, observed: float, *, target: float, horizon: int, num_answers: int
) -> float:
    """The KL coefficient after a rollout, steered so that the KL per answer nears `target`.

        coef * (1 + clip(observed / target - 1, -0.2, 0.2) * num_answers / horizon)

    Args:
        observed: mean KL per answer of the rollout, nats.
        horizon: answers over which the coefficient may change by about e^0.2.
    Source: arXiv:1909.08593, section 2.2. Differs: the factor stays above 0 however large a
        rollout is beside the horizon.
    """
    error = min(max(observed / target - 1, -0.2), 0.2)
    return coef * max(1 + error * num_answers / horizon, 0.1)
