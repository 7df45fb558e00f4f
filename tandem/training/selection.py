"""Which of a stage's evaluations is the best: whose models it leaves, and when it ends early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.checkpoint.state import SavedState, load_state_of
from tandem.config.optimizer import SupervisedConfig
from tandem.config.rules import selecting
from tandem.config.schema import RLConfig
from tandem.config.stages import Stage
from tandem.errors import CheckpointError
from tandem.metrics.names import find_metric, title_of
from tandem.metrics.text import short_number, trimmed
from tandem.parallel.world import World
from tandem.text import counted

FACTS = ("best_step", "evaluations", "last_step", "last_value")
"""Of a stage that has kept its best evaluation's models, in its manifest: the step that it is at,
among how many evaluations, the last one's step and, if it is finite, its measure."""


class Selection:
    """The best evaluation so far, by the stage's `measure`; of equal ones the first.

    An evaluation without a finite value is no improvement. The evaluation before the first step
    counts as any other.

    Attributes:
        keeps: whether the stage is to end with the best one's models.
        step: the best one's; None: no evaluation had a finite value.
    """

    def __init__(self, stage: Stage, section: SupervisedConfig | RLConfig) -> None:
        self.keeps = section.keep_best
        self.step: int | None = None
        self._stage = stage
        self._patience = section.patience
        self._is_on = bool(selecting(section))
        self._sign = 1.0 if find_metric(stage.measure).better == "higher" else -1.0
        self._value = math.nan
        self._num_evaluations = 0
        self._without_improvement = 0
        self._last: tuple[int, float] = (0, math.nan)

    @property
    def kept_step(self) -> int | None:
        """The step whose checkpoint must be kept; None if there is none."""
        return self.step if self.keeps else None

    @property
    def ends(self) -> bool:
        """Whether the stage's patience is over."""
        return 0 < self._patience <= self._without_improvement

    def hear(self, step: int, evaluation: Mapping[str, float], world: World) -> dict[str, float]:
        """An evaluation was made; returns what is to be logged beside it. A collective."""
        if not self._is_on:
            return {}
        # The first rank decides: all must save the same steps and end at the same one.
        found: list[float] = world.all_gather_object(evaluation.get(self._stage.measure, math.nan))
        value = found[0]
        self._num_evaluations += 1
        self._last = step, value
        is_better = self.step is None or self._sign * value > self._sign * self._value
        if math.isfinite(value) and is_better:
            self.step, self._value, self._without_improvement = step, value, 0
        else:
            self._without_improvement += 1
        return {} if self.kept_step is None else {"heldout_best_step": float(self.kept_step)}

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint holds of it, as JSON takes it."""
        if not self._is_on:
            return {}
        last, value = self._last
        return {
            "selection": {
                "step": self.step,
                "value": _or_none(self._value),
                "evaluations": self._num_evaluations,
                "without_improvement": self._without_improvement,
                "last": [last, _or_none(value)],
            }
        }

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's numbers."""
        if not self._is_on:
            return
        known = numbers["selection"]
        self.step, self._value = known["step"], _or_nan(known["value"])
        self._num_evaluations = known["evaluations"]
        self._without_improvement = known["without_improvement"]
        last, value = known["last"]
        self._last = last, _or_nan(value)

    def facts(self) -> dict[str, float]:
        """What the stage's manifest says of the models that it keeps: `FACTS`."""
        if self.kept_step is None:
            return {}
        values = (self.kept_step, self._num_evaluations, *self._last)
        return dict(zip(FACTS, map(float, values), strict=True))

    def end(self, num_steps: int) -> str:
        """The line on a stage that ends before its `num_steps` steps."""
        name, since = self._stage.name, counted(self._without_improvement, "evaluation")
        measure = _words(self._stage)
        best = f"no {measure} was finite"
        if self.step is not None:
            best = f"{measure} {_number(self._value)} of step {self.step} was not improved on"
        return (
            f"{name}: ends after step {self._last[0]} of {num_steps}: {best} in {since} "
            f"({self._stage.section}.patience)"
        )

    def result(self) -> list[str]:
        """What is said at the end of the models that are kept."""
        name = self._stage.name
        if not self.keeps:
            return []
        if self.step is None:
            lacking = f"no evaluation had a finite {_words(self._stage)} to compare"
            return [f"warning: {name}: {lacking}, so the last step's models are kept"]
        facts = {self._stage.measure: self._value, **self.facts()}
        lines = [f"{name}: {described(self._stage, facts)}"]
        if self.step == 0 and self._num_evaluations > 1:
            lines.append(
                f"warning: {name}: no step improved on the start: {self.model} stays as it began. "
                "Lower the learning rate, or look at the rows"
            )
        return lines

    @property
    def model(self) -> str:
        """What the stage trains, in words."""
        return "the policy" if self._stage.leaves == "policy" else "the reward model"


def best_state(checkpoints: Path, step: int, world: World) -> SavedState:
    """The checkpoint of a stage's best evaluation; a collective.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return load_state_of(checkpoints, step, world)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} It is that of the best evaluation, whose models the stage is to leave. Bring "
            f"back what was there, or remove {checkpoints} to begin the stage again."
        ) from None


def described(stage: Stage, facts: Mapping[str, float]) -> str:
    """Which evaluation's models a stage keeps, by its facts: "best of 12 evaluations: step 240,
    held-out loss 2.31 (the last, step 600: 2.4)"; empty if it keeps the last step's."""
    if "best_step" not in facts:
        return ""
    step, last = int(facts["best_step"]), int(facts["last_step"])
    text = f"best of {counted(int(facts['evaluations']), 'evaluation')}: step {step}"
    if stage.measure in facts:
        text += f", {_words(stage)} {_number(facts[stage.measure])}"
    if step == last:
        return f"{text}, the last"
    return f"{text} (the last, step {last}: {_number(facts.get('last_value', math.nan))})"


def _words(stage: Stage) -> str:
    """The stage's measure, as it stands in a sentence."""
    title = title_of(stage.measure, stage.family)
    return title[0].lower() + title[1:]


def _number(value: float) -> str:
    return trimmed(short_number(value)) if math.isfinite(value) else "not finite"


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
