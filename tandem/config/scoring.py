"""The knobs of reward functions: how they are run, combined and tested."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from os.path import normpath
from pathlib import PurePath
from typing import Literal

from tandem.config.knob import at_home, knob
from tandem.errors import ConfigError


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
    Their normalized scores, times their weights, are added to the first one's."""
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

    source: folder or hub name. weight: of its normalized scores. label: its name in metrics.
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
