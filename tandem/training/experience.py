"""The scoring pass: a Rollout becomes an Experience, all that the updates need."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.engine.hybrid import PolicyNumbers, RLHFEngine
from tandem.errors import BadStepError
from tandem.objectives.kl import token_kl
from tandem.objectives.losses import explained_variance
from tandem.objectives.masked import masked_mean, masked_std, masked_sum
from tandem.objectives.rewards import token_rewards
from tandem.training.algorithm import Algorithm
from tandem.training.policy_functions import required_advantages
from tandem.training.rollout_rows import at_tokens, selected
from tandem.training.scored_answers import ScoredAnswers
from tandem.types import Experience, Rollout

_OF_REWARDS = ("reward", "shaped_return", "advantage_", "groups_without_signal", "kl_coef")
"""Metrics that say nothing where only the KL is learned from."""


def shaped_rewards(
    rollout: Rollout,
    scored: ScoredAnswers,
    engine: RLHFEngine,
    algorithm: Algorithm,
    *,
    kl_coef: float,
    kept: Tensor | None = None,
    with_values: bool = True,
) -> Shaped:
    """What an experience needs besides the advantages.

    Args:
        kl_coef: of the penalty, which needs a reference where it is not 0.
        kept: (B,) bool, the answers to learn from; None, or where none of them is scored: all. The
            others count in the metrics that speak of answers.
        with_values: the critic's values too, if there is one.

    Answers that nothing could score (a reward function's None, without a reward model) are counted
    in the metric `reward_unscored`, and left out unless `scoring.on_none` makes them 0.

    Raises:
        DataError: no answer could be scored.
    """
    if algorithm.is_rewarded:
        scored.require_some()
    metrics = scored.metrics(rollout)
    of_tokens = at_tokens(rollout, scored.of_tokens)
    kept = scored.is_scored if kept is None else kept & scored.is_scored
    if not bool(kept.any()):
        kept = scored.is_scored
    scores = scored.scores
    if algorithm.is_rewarded and not bool(kept.all()):
        rows = kept.nonzero().flatten()
        rollout, scores = selected(rollout, rows), scores[rows]
        if of_tokens is not None:
            of_tokens = of_tokens[rows, : rollout.batch.token_ids.shape[1]]
    batch, mask = rollout.batch, rollout.batch.response_mask
    if of_tokens is not None and not algorithm.shares_advantage:
        metrics["reward_token_std"] = float(of_tokens[mask].std(correction=0))
    numbers = engine.policy_numbers(rollout, with_values=with_values)
    kl = torch.zeros_like(numbers.logprobs)
    if numbers.ref_logprobs is not None:
        kl = token_kl(numbers.logprobs, numbers.ref_logprobs, algorithm.reward_kl or "k1")
    paid_kl = kl_coef if algorithm.reward_kl else 0.0
    rewards = token_rewards(scores, kl, mask, kl_coef=paid_kl, of_tokens=of_tokens)
    learned = rewards
    if algorithm.shares_advantage and of_tokens is not None:
        # Added up again from its tokens, a score is a rounding error off, which tells answers of
        # equal scores apart.
        learned = token_rewards(scores, kl, mask, kl_coef=paid_kl)
    made = Experience(
        batch=batch,
        old_logprobs=numbers.logprobs,
        ref_logprobs=numbers.ref_logprobs,
        values=numbers.values,
        rewards=rewards,
        advantages=torch.zeros_like(rewards),
        scores=scores if algorithm.is_rewarded else torch.full_like(scores, torch.nan),
        group=rollout.group,
        rollout=rollout,
        metrics=metrics | {"kl_coef": kl_coef},
    )
    return Shaped(made, numbers, kl, learned)


@dataclass(frozen=True, slots=True)
class Shaped:
    """An experience that lacks advantages, and perhaps values yet; what it was made of, the KL per
    token, (B, T), and the rewards that advantages are made of, likewise: those of the experience,
    but with whole scores at the end where an answer's tokens have one advantage."""

    experience: Experience
    numbers: PolicyNumbers
    kl: Tensor
    learned: Tensor

    def with_values(self, values: Tensor) -> Shaped:
        """The same with the critic's values, (B, T)."""
        return replace(self, experience=replace(self.experience, values=values))

    def with_advantages(self, algorithm: Algorithm) -> Experience:
        """The whole experience.

        Raises:
            BadStepError: a number that comes out is not finite.
            ConfigError: the user's advantages are no pair of such tensors.
        """
        made, numbers = self.experience, self.numbers
        rollout, rewards, values = made.rollout, made.rewards, made.values
        mask = made.batch.response_mask
        found = algorithm.advantages(replace(made, rewards=self.learned))
        if algorithm.given_advantages:
            found = required_advantages(found, made)
        advantages, returns = found
        metrics = {**made.metrics, **_policy_metrics(rollout, numbers, rewards, advantages)}
        if values is not None and returns is not None:
            metrics |= _critic_metrics(values, returns, mask)
        _require_finite(
            rewards=rewards,
            values=torch.zeros(()) if values is None else values,
            logprobs=numbers.logprobs,
            kl=self.kl,
            advantages=advantages,
        )
        if algorithm.whitened is not None:
            advantages = algorithm.whitened(advantages, mask)
        if not algorithm.is_rewarded:
            metrics = {n: v for n, v in metrics.items() if not n.startswith(_OF_REWARDS)}
        in_loss = rollout.finished if algorithm.overlong_filter else None
        return replace(
            made, advantages=advantages, returns=returns, in_loss=in_loss, metrics=metrics
        )


def _critic_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    return {
        "explained_variance": explained_variance(values, returns, mask),
        "values_mean": float(masked_mean(values, mask)),
        "returns_mean": float(masked_mean(returns, mask)),
    }


def _policy_metrics(
    rollout: Rollout, numbers: PolicyNumbers, rewards: Tensor, advantages: Tensor
) -> dict[str, float]:
    mask = rollout.batch.response_mask
    metrics = {
        "shaped_return": float(masked_sum(rewards, mask) / len(rollout)),
        "entropy": float(masked_mean(numbers.entropy, mask)),
        "advantage_mean": float(masked_mean(advantages, mask)),
        "advantage_std": float(masked_std(advantages, mask)),
        "old_logprobs_sampled": float(numbers.from_sampler),
    }
    if numbers.ref_logprobs is not None:
        log_ratio = numbers.logprobs - numbers.ref_logprobs
        metrics["kl"] = float(masked_sum(log_ratio, mask) / len(rollout))
        metrics["kl_per_token"] = float(masked_mean(log_ratio, mask))
    if rollout.rank_seconds:
        slowest, total = max(rollout.rank_seconds), sum(rollout.rank_seconds)
        metrics["rank_wait"] = 1 - total / len(rollout.rank_seconds) / max(slowest, 1e-9)
    if not numbers.from_sampler:  # else the update's first forward measures it
        gap = (rollout.rollout_logprobs - numbers.logprobs).abs()
        metrics["rollout_gap"] = float(masked_mean(gap, mask))
        metrics["rollout_gap_max"] = float(gap.masked_fill(~mask, 0.0).amax())
    return metrics


def _require_finite(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadStepError(
                f"{name} of the rollout must be finite; got {int((~torch.isfinite(tensor)).sum())} "
                "that are not. Lower the learning rates, or look at the reward function."
            )
