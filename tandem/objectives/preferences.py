"""Losses of policies on preferences: DPO and its relatives on pairs, KTO on labelled answers.

Sums over pairs or answers, as in `losses`; the caller divides once, over the whole optimizer step.
docs/preferences.md has the formulas side by side with the names that other trainers use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import ShapeError
from tandem.objectives.losses import wins_of
from tandem.objectives.masked import require_same_shape

_LOG_2 = 0.6931471805599453
PairLossName = Literal["sigmoid", "cdpo", "robust", "ipo", "apo-zero", "apo-down", "simpo", "orpo"]


@dataclass(frozen=True, slots=True)
class AnswerLogprobs:
    """What the losses read of one side of B pairs, or of B answers.

    total: (B,) float32 nats, log-probs summed over each answer, its EOS included; with gradient.
    tokens: (B,) how many they are, at least 1.
    reference: (B,) the same sum under the frozen reference; None where the loss needs none.
    """

    total: Tensor
    tokens: Tensor
    reference: Tensor | None = None

    def __post_init__(self) -> None:
        require_same_shape(total=self.total, tokens=self.tokens)
        if self.reference is not None:
            require_same_shape(total=self.total, reference=self.reference)

    def select(self, rows: Tensor) -> AnswerLogprobs:
        """Some of the answers, which a (B,) bool or their numbers choose."""
        reference = None if self.reference is None else self.reference[rows]
        return AnswerLogprobs(self.total[rows], self.tokens[rows], reference)

    @property
    def mean(self) -> Tensor:
        """(B,) nats per token."""
        return self.total / self.tokens

    @property
    def log_ratio(self) -> Tensor:
        """(B,) log(policy / reference) of the whole answer, nats."""
        assert self.reference is not None, "this loss needs a reference"
        return self.total - self.reference


@dataclass(frozen=True, slots=True)
class PairLoss:
    """Sums over pairs: the loss (with gradient), wins, and each side's implicit reward."""

    loss: Tensor
    accuracy: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor


def pair_loss(
    name: PairLossName,
    chosen: AnswerLogprobs,
    rejected: AnswerLogprobs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    average: bool = True,
    sft_coef: float = 0.0,
) -> PairLoss:
    """A preference loss by name, with -p_chosen times `sft_coef` added. Denominator: pairs.

        d = log-ratio(chosen) - log-ratio(rejected), summed over each answer; p = mean log-prob
        sigmoid  -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)   arXiv:2305.18290 eq. 7
        cdpo     the same, for e > 0                                     E. Mitchell, "cDPO" (2023)
        robust   [(1 - e) L(d) - e L(-d)] / (1 - 2 e), L of sigmoid      arXiv:2403.00409
        ipo      (d - 1 / (2 beta))^2, d per token if `average`          arXiv:2310.12036 eq. 17
        apo-zero sigmoid(-beta h(chosen)) + sigmoid(beta h(rejected))    arXiv:2408.06266
        apo-down sigmoid(beta h(chosen)) + sigmoid(-beta d)              the same; h = log-ratio
        simpo    -log sigmoid(beta (p_chosen - p_rejected) - gamma)      arXiv:2405.14734 eq. 6
        orpo     -p_chosen - beta log sigmoid(o_chosen - o_rejected),    arXiv:2403.07691 eq. 6, 7
                 o = p - log(1 - e^p), the log odds of a token

    Args:
        beta: of orpo the weight lambda. label_smoothing: e, in [0, 0.5).
        gamma: simpo's target margin. average: ipo's log-ratios are means over tokens.
        sft_coef: of the term that imitates the chosen answer (arXiv:2404.19733 eq. 1, per token of
            the answer).
    A tie counts as half a win.
    """
    if name in ("simpo", "orpo"):
        found = _without_reference(name, chosen, rejected, beta, gamma)
    else:
        found = _against_reference(name, chosen, rejected, beta, label_smoothing, average)
    if sft_coef:
        found = replace(found, loss=found.loss - sft_coef * chosen.mean.sum())
    return found


PairLosses = Callable[[AnswerLogprobs, AnswerLogprobs], Tensor]
"""The chosen and the rejected answers of B pairs to each pair's loss, (B,). They are some pairs of
an update, so that one pair's loss must not depend on another's."""


def given_pair_loss(
    losses: PairLosses,
    chosen: AnswerLogprobs,
    rejected: AnswerLogprobs,
    *,
    beta: float,
    sft_coef: float = 0.0,
) -> PairLoss:
    """The losses of a function that the user gives. Denominator: pairs.

    Args:
        beta: of the implicit rewards, which are measured as DPO's.
        sft_coef: as of `pair_loss`.
    Raises:
        ShapeError: it returns something else than a number per pair with a gradient.
    """
    found = losses(chosen, rejected)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        got = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise ShapeError(f"a loss on pairs must return a tensor of floats (B,); got {got}.")
    if found.shape != chosen.total.shape:
        raise ShapeError(
            f"a loss on pairs must return a loss for each pair, {tuple(chosen.total.shape)}; got "
            f"{tuple(found.shape)}. Return them as they are, not their sum or mean."
        )
    if chosen.total.requires_grad and not found.requires_grad:
        raise ShapeError(
            "a loss on pairs must return losses with a gradient; got none. Compute them from the "
            "log-probs, not detached."
        )
    found = found - sft_coef * chosen.mean if sft_coef else found
    return _pair_loss(found.float(), beta * chosen.log_ratio, beta * rejected.log_ratio)


def _without_reference(
    name: PairLossName, chosen: AnswerLogprobs, rejected: AnswerLogprobs, beta: float, gamma: float
) -> PairLoss:
    chosen_reward, rejected_reward = beta * chosen.mean, beta * rejected.mean
    if name == "simpo":
        losses = -F.logsigmoid(chosen_reward - rejected_reward - gamma)
    else:
        odds = log_odds(chosen.mean) - log_odds(rejected.mean)
        losses = -chosen.mean - beta * F.logsigmoid(odds)
    return _pair_loss(losses, chosen_reward, rejected_reward)


def _against_reference(
    name: PairLossName,
    chosen: AnswerLogprobs,
    rejected: AnswerLogprobs,
    beta: float,
    smoothing: float,
    average: bool,
) -> PairLoss:
    ratios = chosen.log_ratio, rejected.log_ratio
    if name == "ipo" and average:
        ratios = ratios[0] / chosen.tokens, ratios[1] / rejected.tokens
    rewards = beta * ratios[0], beta * ratios[1]
    margin = rewards[0] - rewards[1]
    plain, swapped = -F.logsigmoid(margin), -F.logsigmoid(-margin)
    if name in ("sigmoid", "cdpo"):
        losses = (1 - smoothing) * plain + smoothing * swapped
    elif name == "robust":
        losses = ((1 - smoothing) * plain - smoothing * swapped) / (1 - 2 * smoothing)
    elif name == "ipo":
        losses = (ratios[0] - ratios[1] - 1 / (2 * beta)).square()
    elif name == "apo-zero":
        losses = torch.sigmoid(-rewards[0]) + torch.sigmoid(rewards[1])
    else:
        losses = torch.sigmoid(rewards[0]) + torch.sigmoid(-margin)
    return _pair_loss(losses, *rewards)


def _pair_loss(losses: Tensor, chosen_reward: Tensor, rejected_reward: Tensor) -> PairLoss:
    margin = (chosen_reward - rejected_reward).detach()
    return PairLoss(
        losses.sum(),
        wins_of(margin).sum(),
        chosen_reward.detach().sum(),
        rejected_reward.detach().sum(),
    )


def log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) of (B,) log p <= 0, in float32.

    log p is kept 1e-7 below 0, where the odds of a certain token would be infinite; its gradient
    there is 0.
    """
    logprobs = logprobs.float()
    return logprobs - log1mexp(logprobs.clamp(max=-torch.finfo(torch.float32).eps))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0 without cancellation.

    Source: M. Maechler, "Accurately computing log(1 - exp(-|a|))" (2012): expm1 near 0, log1p far
    from it.
    """
    near = x > -_LOG_2
    # Each branch gets a value that it can take: where both run, neither brings a NaN gradient.
    of_near = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    of_far = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, of_near, of_far)


@dataclass(frozen=True, slots=True)
class KTOLoss:
    """Sums over answers: the loss (with gradient), and the implicit rewards of either label."""

    loss: Tensor
    desirable_reward: Tensor
    undesirable_reward: Tensor


def kto_loss(
    answers: AnswerLogprobs,
    is_desirable: Tensor,
    baseline: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> KTOLoss:
    """KTO on answers labelled one by one. Denominator: answers.

        h = log-ratio, summed over the answer
        desirable    lambda_D (1 - sigmoid(beta (h - z)))
        undesirable  lambda_U (1 - sigmoid(beta (z - h)))

    Args:
        is_desirable: (B,) bool.
        baseline: z >= 0, of the whole optimizer step (`kto_baseline`); no gradient.
    Source: arXiv:2402.01306 eq. 8.
    """
    require_same_shape(total=answers.total, is_desirable=is_desirable)
    h = answers.log_ratio
    gain = torch.where(is_desirable, beta * (h - baseline), beta * (baseline - h))
    weights = torch.where(is_desirable, desirable_weight, undesirable_weight)
    rewards = beta * h.detach()
    return KTOLoss(
        (weights * (1 - torch.sigmoid(gain))).sum(),
        (rewards * is_desirable).sum(),
        (rewards * ~is_desirable).sum(),
    )


def kto_baseline(log_ratios: Tensor) -> float:
    """z = max(0, mean of log(policy / reference)) over answers put behind prompts of other rows.

    Args:
        log_ratios: (B,) nats, of the whole optimizer step; none at all gives 0.
    Source: arXiv:2402.01306 section 4.1, the estimate of KL(policy, reference).
    """
    return max(0.0, float(log_ratios.double().mean())) if len(log_ratios) else 0.0
