"""The scores of a rollout's answers: from reward models, reward functions or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from tandem.config.schema import RLConfig
from tandem.data.render import Renderer
from tandem.engine.scoring import Ensemble, RewardScorer
from tandem.errors import DataError
from tandem.objectives.advantages import has_signal
from tandem.objectives.rewards import (
    clipped_scores,
    combined_scores,
    disagreement,
    overlong_penalty,
)
from tandem.parallel.world import World
from tandem.rewards.scoring import RewardFunctions
from tandem.training.algorithm import Algorithm
from tandem.training.conversations import conversation_metrics
from tandem.training.reward_function import RewardColumns, function_scores, named_metrics
from tandem.types import Rollout

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
    has_models: whether a reward model scored. A score of one that is not finite is NaN, and an
        answer to which a model that counts gives none has none of the others' either.
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
    has_models: bool = False
    num_unscored: int = 0
    columns: RewardColumns | None = None
    of_tokens: tuple[tuple[float, ...], ...] = ()

    def require_some(self) -> None:
        """
        Raises:
            DataError: no answer could be scored.
        """
        if bool(self.is_scored.any()):
            return
        told = [self.columns.failure()] if self.columns is not None else []
        told += [
            f"{label} gave no finite score of {int(column.isnan().sum())} answers"
            for label, column in self._models().items()
            if bool(column.isnan().any())
        ]
        why = f" ({'; '.join(filter(None, told))})" if any(told) else ""
        if self.columns is None:
            raise DataError(
                "the reward model must give at least one answer of a rollout a finite score; got "
                f"none for all {len(self.scores)}{why}. Use --dtype bf16 or fp32, or another model."
            )
        raise DataError(
            "the reward function must score at least one answer of a rollout; got None for all "
            f"{len(self.scores)}{why}. Look at the columns it reads."
        )

    def _models(self) -> dict[str, Tensor]:
        """Each reward model's normalized scores, by its name in metrics."""
        if not self.has_models:
            return {}
        named = zip(self.labels, self.further.unbind(dim=1), strict=True)
        return {"reward_model": self.model, **dict(named)}

    def tell_failed_models(
        self, print_line: Callable[[str], None] | None, answers: str = "answers"
    ) -> None:
        """Show a line for each reward model without a finite score of some answers: how many, and
        what becomes of them.

        Args:
            print_line: None prints.
            answers: what they are called.
        """
        print_line = print_line or partial(print, flush=True)
        models = self._models().items()
        for (label, column), weight in zip(models, (1.0, *self.weights), strict=False):
            lacking = column.isnan()
            if not (count := int(lacking.sum())):
                continue
            by_function = lacking & ~self.function.isnan()
            fates = {
                "left out": int((lacking & ~self.is_scored).sum()),
                "rewarded by functions alone": int(by_function.sum()),
                "scored 0": int((lacking & self.is_scored & ~by_function).sum()),
            }
            fate = ", ".join(f"{number} {what}" for what, number in fates.items() if number)
            which = label.removeprefix("reward_model").removeprefix(".")
            if weight == 0:
                fate = "its weight is 0, so no reward changes"
            model = f"reward model {which}".rstrip()
            print_line(f"{model} gave {count} of {len(column)} {answers} no finite score: {fate}")

    def _failed_models(self) -> Tensor:
        """(B,) bool: answers to which a reward model that counts gives no finite score."""
        failed = torch.zeros_like(self.is_scored)
        for column, weight in zip(self._models().values(), (1.0, *self.weights), strict=False):
            failed |= column.isnan() & (weight != 0)
        return failed

    @staticmethod
    def joined(parts: Sequence[ScoredAnswers]) -> ScoredAnswers:
        """All answers of several rollouts."""
        columns = [part.columns for part in parts if part.columns is not None]
        return ScoredAnswers(
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in _PER_ANSWER},
            labels=parts[0].labels,
            weights=parts[0].weights,
            are_alike=parts[0].are_alike,
            has_models=parts[0].has_models,
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
        return values | self._metrics_of_each() | self._ensemble_metrics()

    def _metrics_of_each(self) -> dict[str, float]:
        """What each function and each of several models scored, and on what they failed."""
        values: dict[str, float] = {}
        failed = self._failed_models()
        if num_failed := int(failed.sum()):
            values["reward_failures/result"] = float(num_failed)
        if self.columns is not None:
            found = self.columns.metrics()
            for name in values.keys() & found.keys():
                found[name] += values[name]
            values |= found
            failed |= self.columns.failed.to(failed.device)
        if self.columns is not None or num_failed:
            values["reward_failed"] = float(failed.float().mean())
        if self.columns is not None or self.labels or num_failed:
            for label, column in self._models().items():
                values |= named_metrics(label, column)
        return values

    def _ensemble_metrics(self) -> dict[str, float]:
        """How far reward models differ that judge the same, and what watched ones say."""
        counts = torch.tensor(self.weights, device=self.further.device) != 0
        values = {}
        models = torch.cat([self.model[:, None], self.further[:, counts]], dim=1)
        apart = disagreement(models[~models.isnan().any(dim=1)])
        if self.are_alike and len(apart):
            values["reward_model_disagreement"] = float(apart.mean())
        watched = self.further[:, ~counts]
        if not bool(watched.isnan().all()):
            values["reward_watched"] = float(watched.nanmean())
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
    raw = function = nothing
    ensemble, every_model = Ensemble(), nothing[:, None]
    has_models = scorer is not None and config.reward_model_weight > 0
    if scorer is not None and has_models:
        raw, ensemble = _finite(scorer.raw(rollout, renderer)), scorer.ensemble
        others = [other.scorer for other in ensemble.others]
        further = [other.normalized(other.raw(rollout, renderer)) for other in others]
        every_model = _finite(torch.stack([scorer.normalized(raw), *further], dim=1))
    columns = None
    of_tokens: tuple[tuple[float, ...], ...] = ()
    if rewards is not None:
        columns = function_scores(rewards, rollout, renderer, world)
        function = columns.total
        weight = config.reward_function_weight
        of_tokens = tuple(tuple(weight * r for r in row) for row in columns.of_tokens)
    models, model_weights = ensemble.columns(every_model)
    counts = torch.tensor(ensemble.weights, device=every_model.device) != 0
    # A sum or a mean of some of the models is in other units than that of all.
    lacks_one = every_model[:, counts].isnan().any(dim=1)
    models = models.masked_fill(lacks_one[:, None], torch.nan)
    is_scored = ~(lacks_one & function.isnan())
    num_unscored = int((~is_scored).sum())
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
        model=every_model[:, 0],
        further=every_model[:, 1:],
        function=function,
        labels=tuple(other.label for other in ensemble.others),
        weights=tuple(other.weight for other in ensemble.others),
        are_alike=ensemble.how != "sum",
        has_models=has_models,
        num_unscored=num_unscored,
        columns=columns,
        of_tokens=of_tokens,
    )


def _finite(scores: Tensor) -> Tensor:
    """The same with NaN for every score that is not finite."""
    return scores.masked_fill(~scores.isfinite(), torch.nan)
