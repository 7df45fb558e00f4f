"""The knobs of reward functions: how they are run, combined and tested."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os.path import normpath
from pathlib import PurePath
from typing import Literal

from tandem.config.knob import at_home, knob
from tandem.errors import ConfigError

EnsembleName = Literal["sum", "mean", "worst-case", "uncertainty"]
"""What several reward models' scores of an answer make."""


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """How reward functions are run, combined and tested."""

    deadline_seconds: float = knob(5.0, gt=0)
    """Longest that a reward function may take for one answer; then its worker process is killed
    and replaced, and the answer counts as failed."""
    workers: int = knob(0, ge=0)
    """Processes that score answers side by side; 0: one per core, at most 16. More of them pay
    where a reward function waits for a service."""
    memory_gb: float = knob(4.0, ge=0)
    """Memory in GiB that a worker process may map beyond what the function's imports take; 0 sets
    no limit."""
    on_none: Literal["drop", "zero"] = knob("drop")
    """An answer for which every reward is None: leave it out of the update, or score it 0."""
    on_failure: Literal["none", "zero", "stop"] = knob("none")
    """An answer on which a reward function fails (it raises, takes too long, dies, returns no
    number): its reward is None, or 0, or the run stops. Failures are counted either way."""
    combine: Literal["sum", "group"] = knob("sum")
    """Several rewards make one score: their weighted sum, or the weighted sum of each normalized
    first within the answers to one prompt (GDPO, arXiv:2601.05242)."""
    reward_models: tuple[str, ...] = knob((), path=True)
    """Further reward models beside the stage's own, each FOLDER_OR_NAME or FOLDER_OR_NAME:WEIGHT.
    scoring.ensemble makes one score of theirs and the first one's. A model of weight 0 is only
    watched: its scores are logged and do not count."""
    ensemble: Literal["sum", "mean", "worst-case", "uncertainty"] = knob("sum")
    """What several reward models' normalized scores of an answer make: their sum by weight, their
    mean by weight, the lowest of them (worst-case optimization), or their mean less
    scoring.uncertainty_coef times their variance (uncertainty-weighted optimization). The last two
    keep a policy from answers that one model overrates (arXiv:2310.02743)."""
    uncertainty_coef: float = knob(0.1, gt=0)
    """Of the variance in ensemble uncertainty. Scores have standard deviation 1 on the SFT policy's
    answers."""
    self_test: bool = knob(True)
    """Before the first step, check on a few rows that each reward function scores the reference
    answer above an empty one and above another row's; stop if it does not."""
    answer_column: str = knob("answer")
    """The column with a row's reference answer, or a path into one such as
    reward_model.ground_truth; reward functions get it as `answer`. With the default, a row without
    that column gives what it has in reward_model.ground_truth, reward_spec.ground_truth or
    extra_info.answer."""

    def __post_init__(self) -> None:
        at_home(self)


@dataclass(frozen=True, slots=True)
class WeightedModel:
    """A reward model beside the stage's own.

    source: folder or hub name. weight: of its normalized scores; 0: they are logged alone. label:
    its name in metrics.
    """

    source: str
    weight: float
    label: str


def weighted_models(texts: Sequence[str]) -> tuple[WeightedModel, ...]:
    """Read `scoring.reward_models`; labels are `reward_model.` and the last part of each path, with
    a number where two are called the same.

    Raises:
        ConfigError: one names no model, or a model twice.
    """
    found: list[WeightedModel] = []
    for text in texts:
        source, weight = text, 1.0
        before, _, after = text.rpartition(":")
        with suppress(ValueError):
            source, weight = (before, float(after)) if before else (text, 1.0)
        problem = f"scoring.reward_models must be FOLDER_OR_NAME[:WEIGHT]; {text!r}"
        if not source.strip("/. ") or not math.isfinite(weight):
            raise ConfigError(f"{problem} names no model or no finite weight. Fix it.")
        if any(normpath(model.source) == normpath(source) for model in found):
            raise ConfigError(f"{problem} is given twice. Remove one, or change its weight.")
        # Reward functions have labels without a dot but where two of them are called the same.
        plain = "reward_model." + re.sub(r"[^\w.-]", "_", PurePath(source).name)
        label, number = plain, 1
        while label in {model.label for model in found}:
            number += 1
            label = f"{plain}_{number}"
        found.append(WeightedModel(source, weight, label))
    return tuple(found)


def ensemble_problems(scoring: ScoringConfig) -> Iterator[str]:
    """Rules for what several reward models' scores make."""
    how, default = scoring.ensemble, ScoringConfig()
    counted = [model for model in weighted_models(scoring.reward_models) if model.weight != 0]
    if how != "sum" and not counted:
        yield (
            f"scoring.ensemble must be sum without a reward model beside the first whose weight is "
            f"not 0; got {how}. Name some in scoring.reward_models, or remove it"
        )
    if how != "uncertainty" and scoring.uncertainty_coef != default.uncertainty_coef:
        yield (
            "scoring.uncertainty_coef must go with scoring.ensemble uncertainty, which reads it; "
            f"got {scoring.uncertainty_coef:g} with {how}. Set scoring.ensemble, or remove it"
        )
    for model in counted:
        if how in ("mean", "uncertainty") and model.weight < 0:
            yield (
                f"scoring.reward_models must have weights of 0 or more with scoring.ensemble "
                f"{how}, which takes their mean; got {model.weight:g} of {model.source}. Raise it"
            )
        elif how == "worst-case" and model.weight != 1:
            yield (
                "scoring.reward_models must have weight 1 (or 0, to be watched) with "
                f"scoring.ensemble worst-case, which takes the lowest score; got {model.weight:g} "
                f"of {model.source}. Remove the weight"
            )
