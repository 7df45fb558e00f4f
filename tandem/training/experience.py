"""The scoring pass: a Rollout becomes an Experience, all that the updates need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from tandem.config.schema import RLConfig
from tandem.data.render import Renderer
from tandem.engine.hybrid import PolicyNumbers, RLHFEngine
from tandem.engine.scoring import Ensemble, RewardScorer
from tandem.errors import BadStepError, DataError
from tandem.objectives.advantages import has_signal
from tandem.objectives.kl import token_kl
from tandem.objectives.losses import explained_variance
from tandem.objectives.masked import masked_mean, masked_std, masked_sum
from tandem.objectives.rewards import (
    clipped_scores,
    combined_scores,
    disagreement,
    overlong_penalty,
    token_rewards,
)
from tandem.parallel.world import World
from tandem.rewards.scoring import RewardFunctions
from tandem.training.algorithm import Algorithm
from tandem.training.conversations import conversation_metrics
from tandem.training.policy_functions import required_advantages
from tandem.training.reward_function import RewardColumns, function_scores, named_metrics
from tandem.training.rollout_rows import at_tokens, selected
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
    if algorithm.is_rewarded and not bool(scored.is_scored.any()):
        raise DataError(
            "the reward function must score at least one answer of a rollout; got None for all "
            f"{len(rollout)}{scored.failure()}. Look at the columns it reads."
        )
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


_PER_ANSWER = (
    *("scores", "shown", "mixed", "is_scored", "was_clipped"),
    *("raw", "model", "further", "function"),
)
"""The tensors of `ScoredAnswers`."""


@dataclass(frozen=True, slots=True)
class ScoredAnswers:
    """Where each answer's score came from; all (B,) float32 but `further` and the two bool masks.

    model, raw: the reward model's score, normalized and as it came (NaN without a model).
    further: (B, M) the normalized scores of the reward models beside it, called `labels`; a model
        of weight 0 in `weights` is only watched. are_alike: those that count judge the same, as
        `scoring.ensemble` says unless it is their sum.
    function: the reward functions', weighted and added (NaN without one, or where all said None).
    mixed: models and functions weighted and added. shown: mixed less the missing-EOS penalty,
        clipped. scores: what is learned from: `shown`, or the same of rewards that were normalized
        in their groups first where `scoring.combine` says so; those have mean 0 in each group and
        would say nothing as a metric. All are 0 where is_scored is false.
    num_unscored: answers that nothing scored. columns: each function's scores.
    of_tokens: of each answer the part of `mixed` that functions gave single tokens of it
        (`RewardColumns.of_tokens`), weighted; empty where none does.
    """

    scores: Tensor
    shown: Tensor
    mixed: Tensor
    is_scored: Tensor
    was_clipped: Tensor
    raw: Tensor
    model: Tensor
    further: Tensor
    function: Tensor
    labels: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    are_alike: bool = False
    num_unscored: int = 0
    columns: RewardColumns | None = None
    of_tokens: tuple[tuple[float, ...], ...] = ()

    def failure(self) -> str:
        """What reward functions failed on, in parentheses; "" if on nothing."""
        told = self.columns.failure() if self.columns is not None else ""
        return f" ({told})" if told else ""

    @staticmethod
    def joined(parts: Sequence[ScoredAnswers]) -> ScoredAnswers:
        """All answers of several rollouts."""
        columns = [part.columns for part in parts if part.columns is not None]
        return ScoredAnswers(
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in _PER_ANSWER},
            labels=parts[0].labels,
            weights=parts[0].weights,
            are_alike=parts[0].are_alike,
            num_unscored=sum(part.num_unscored for part in parts),
            columns=RewardColumns.joined(columns) if columns else None,
            of_tokens=tuple(chain.from_iterable(part.of_tokens for part in parts)),
        )

    def without_overlong(self, rollout: Rollout, algorithm: Algorithm) -> ScoredAnswers:
        """The same with DAPO's soft overlong penalty taken from the scores, after their clip."""
        if algorithm.overlong_penalty == 0:
            return self
        lengths = rollout.batch.response_mask.sum(dim=1)
        taken = algorithm.overlong_penalty * overlong_penalty(
            lengths, max_tokens=algorithm.max_tokens, buffer=algorithm.overlong_buffer
        )
        taken = taken.masked_fill(~self.is_scored, 0.0)
        return replace(self, scores=self.scores - taken, shown=self.shown - taken)

    def has_signal(self, group: Tensor) -> Tensor:
        """(B,) bool: the scored answers of a group whose scores differ."""
        found = torch.zeros_like(self.is_scored)
        found[self.is_scored] = has_signal(self.scores[self.is_scored], group[self.is_scored])
        return found

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """The metrics that speak of answers, over all of them."""
        lengths = rollout.batch.response_mask.sum(dim=1).float()
        chosen, mixed = self.shown[self.is_scored], self.mixed[self.is_scored]
        values = {
            "reward": float(chosen.mean()) if len(chosen) else 0.0,
            "reward_before_penalty": float(mixed.mean()) if len(mixed) else 0.0,
            "reward_std": float(chosen.std(correction=0)) if len(chosen) else 0.0,
            "reward_unscored": float(self.num_unscored),
            "reward_clipped": float(self.was_clipped.float().mean()),
            "response_tokens": float(lengths.mean()),
            "response_tokens_max": float(lengths.max()),
            "eos_rate": float(rollout.finished.float().mean()),
        }
        num_groups = len(rollout.group.unique())
        if len(rollout) > num_groups:
            with_signal = len(rollout.group[self.has_signal(rollout.group)].unique())
            values["groups_without_signal"] = 1 - with_signal / num_groups
        parts = {
            "reward_raw": self.raw,
            "reward_model_score": self.model,
            "reward_function_score": self.function,
        }
        values |= conversation_metrics(rollout)
        values |= {
            name: float(part.nanmean())
            for name, part in parts.items()
            if not bool(part.isnan().all())
        }
        if self.columns is not None:
            values |= self.columns.metrics()
        for k, label in enumerate(self.labels):
            values |= named_metrics(label, self.further[:, k])
        has_others = self.columns is not None or bool(self.labels)
        if has_others and not bool(self.model.isnan().all()):
            values |= named_metrics("reward_model", self.model)
        return values | self._ensemble_metrics()

    def _ensemble_metrics(self) -> dict[str, float]:
        """How far reward models differ that judge the same, and what watched ones say."""
        counts = torch.tensor(self.weights, device=self.further.device) != 0
        values = {}
        if self.are_alike:
            models = torch.cat([self.model[:, None], self.further[:, counts]], dim=1)
            values["reward_model_disagreement"] = float(disagreement(models).mean())
        if not bool(counts.all()):
            values["reward_watched"] = float(self.further[:, ~counts].mean())
        return values


def score_answers(
    rollout: Rollout,
    scorer: RewardScorer | None,
    renderer: Renderer,
    config: RLConfig,
    rewards: RewardFunctions | None,
    world: World,
    *,
    combine: Literal["sum", "group"] = "sum",
) -> ScoredAnswers:
    """One score per answer, from reward models, reward functions or both.

    Args:
        scorer: the reward model, with any others; None where functions alone reward.
        renderer: the policy's.
        combine: how they become what is learned from, as `scoring.combine`.
    """
    nothing = torch.full((len(rollout),), torch.nan, device=world.device)
    raw = model = function = nothing
    ensemble, further = Ensemble(), list[Tensor]()
    if scorer is not None and config.reward_model_weight > 0:
        raw, ensemble = scorer.raw(rollout, renderer), scorer.ensemble
        model = scorer.normalized(raw)
        others = [other.scorer for other in ensemble.others]
        further = [other.normalized(other.raw(rollout, renderer)) for other in others]
    columns = None
    of_tokens: tuple[tuple[float, ...], ...] = ()
    if rewards is not None:
        columns = function_scores(rewards, rollout, renderer, world)
        function = columns.total
        weight = config.reward_function_weight
        of_tokens = tuple(tuple(weight * r for r in row) for row in columns.of_tokens)
    is_scored = ~(model.isnan() & function.isnan())
    num_unscored = int((~is_scored).sum())
    every_model = torch.stack([model, *further], dim=1)
    models, model_weights = ensemble.columns(every_model)
    mixed = (
        config.reward_model_weight * combined_scores(models, model_weights).nan_to_num()
        + config.reward_function_weight * function.nan_to_num()
    )
    in_groups = mixed
    if combine == "group":
        functions = [] if columns is None else [columns.values]
        weights = [config.reward_model_weight * weight for weight in model_weights]
        if columns is not None:
            weights += [config.reward_function_weight * weight for weight in columns.weights]
        every = torch.cat([models, *functions], dim=1)
        in_groups = combined_scores(every, weights, rollout.group.to(every.device)).nan_to_num()
    if rewards is not None and rewards.config.on_none == "zero":
        is_scored = torch.ones_like(is_scored)
    penalty = config.missing_eos_penalty * (~rollout.finished).float()
    shown, was_clipped = clipped_scores(mixed - penalty, config.reward_clip)
    scores = clipped_scores(in_groups - penalty, config.reward_clip)[0]
    return ScoredAnswers(
        scores=scores.masked_fill(~is_scored, 0.0),
        shown=shown.masked_fill(~is_scored, 0.0),
        mixed=mixed,
        is_scored=is_scored,
        was_clipped=was_clipped & is_scored,
        raw=raw,
        model=model,
        further=every_model[:, 1:],
        function=function,
        labels=tuple(other.label for other in ensemble.others),
        weights=tuple(other.weight for other in ensemble.others),
        are_alike=ensemble.how != "sum",
        num_unscored=num_unscored,
        columns=columns,
        of_tokens=of_tokens,
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
