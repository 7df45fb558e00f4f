"""The declaration of a metric."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tandem.config.stages import Family

PHASES = ("generate", "score", "train", "evaluate", "save", "normalize", "step")
"""The timed parts of a step; `step` is the whole step and contains the others, but for `normalize`,
with which a reward model's stage ends."""

REASONS = ("exception", "timeout", "memory", "died", "processes", "result")
"""Why a reward function has no score of an answer (tandem/rewards/calling.py)."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number that a stage logs.

    name: as in metrics.jsonl. `name/*` declares a set: `seconds/*` allows `seconds/train`.
    unit: what 1 means. `share` is a fraction of 1, `ratio` has no unit.
    families: the families of stages that log it. A stage need not log all of its family's.
    better: the good direction, if there is one.
    meaning: one sentence, with the denominator if there is one.
    healthy: what it looks like in a good run.
    source: the paper or system whose definition it follows, if any.
    members: the endings that `name/*` allows; empty: any, such as data set names.
    group: its heading in TensorBoard; empty for a stage's main numbers.
    title: its title in reports and tables, if that is not the name with spaces.
    chart: the title of the report's chart that draws it; all lines of a chart share a unit.
    line: its label in that chart, if not "training" or "held-out".
    column: its label on the console; empty: not shown. card: shown at the top of the report.
    """

    name: str
    unit: str
    families: tuple[Family, ...]
    better: Literal["higher", "lower", ""]
    meaning: str
    healthy: str = ""
    source: str = ""
    members: tuple[str, ...] = ()
    group: str = ""
    title: str = ""
    chart: str = ""
    line: str = ""
    column: str = ""
    card: bool = False

    @property
    def is_heldout(self) -> bool:
        """Whether it is measured at evaluations on held-out rows, not at every step."""
        return self.name.startswith("heldout_")


def grouped(group: str, *metrics: Metric) -> tuple[Metric, ...]:
    """Metrics of one group."""
    return tuple(replace(metric, group=group) for metric in metrics)
