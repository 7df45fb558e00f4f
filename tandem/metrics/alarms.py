"""Published thresholds (alarms.yaml): when a run is going wrong, and what to change.

A rule measures one quantity after each record that has its metric and compares it with its
threshold. It raises an alarm when the condition starts to hold for `in_a_row` such records, and
again only after it has recovered. The state is the history itself, so a resumed run neither
repeats nor forgets an alarm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.config.stages import FAMILIES, Family, stage_of
from tandem.errors import ConfigError
from tandem.metrics import measures
from tandem.metrics.measures import History, Measure
from tandem.metrics.names import find_metric
from tandem.metrics.records import Record
from tandem.yaml_text import shipped_table


@dataclass(frozen=True, slots=True)
class Rule:
    """One published alarm.

    metric: checked after records that have it (`*`: all), in the stages whose family logs it.
    condition: whether the alarm is raised above or below the threshold. meaning, advice: what it
    means and what to change. measure: the quantity; by default the metric's newest value.
    quantity: the same in words, if it is not just the metric. source: whose threshold it is.
    in_a_row: for how many records that have the metric. after_step: never at or before this step
    (-1: also before the first update). without_reward: the advice in a stage without rewards, if it
    is another.
    """

    name: str
    metric: str
    condition: Literal["above", "below"]
    threshold: float
    meaning: str
    advice: str
    measure: Measure = measures.now
    quantity: str = ""
    source: str = "Tandem's own"
    in_a_row: int = 1
    after_step: int = 0
    without_reward: str = ""

    @property
    def families(self) -> tuple[Family, ...]:
        """The families of stages that it applies to."""
        return FAMILIES if self.metric == "*" else find_metric(self.metric).families

    def is_about(self, record: Record) -> bool:
        """Whether the record has the metric."""
        return self.metric == "*" or self.metric in record.values

    def holds(self, history: History, threshold: float) -> bool:
        """Whether the condition holds after the last record of `history`."""
        is_known = self.metric == "*" or math.isfinite(history.record.values[self.metric])
        if history.record.step <= self.after_step or not is_known:
            return False
        value = self.measure(history, self.metric)
        if value is None:
            return False
        return value > threshold if self.condition == "above" else value < threshold


def _rule(row: dict[str, Any]) -> Rule:
    condition: Literal["above", "below"] = "above" if "above" in row else "below"
    measure = getattr(measures, row.pop("measure", "now"))
    return Rule(condition=condition, threshold=float(row.pop(condition)), measure=measure, **row)


ALARMS: tuple[Rule, ...] = tuple(map(_rule, shipped_table(Path(__file__).with_name("alarms.yaml"))))
"""Every alarm, in the order of the reference page."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that a record raised; a line of alarms.jsonl."""

    stage: str
    step: int
    alarm: str
    value: float
    threshold: float
    advice: str


def check_alarms(records: Sequence[Record], thresholds: Mapping[str, float]) -> list[Alarm]:
    """The alarms that the last of a stage's records raises; the cost does not grow with their
    number.

    Args:
        records: all of one stage, at least one, oldest first.
        thresholds: in place of the published ones, by alarm name.
    Raises:
        ConfigError: a threshold for an unknown alarm.
    """
    for name in thresholds:
        if name not in {rule.name for rule in ALARMS}:
            raise ConfigError(
                f"thresholds must name alarms of tandem.metrics.alarms; got {name!r}. "
                f"Use one of {', '.join(rule.name for rule in ALARMS)}."
            )
    stage, last, alarms = records[-1].stage, History(records, len(records)), []
    family, rewarded = stage_of(stage).family, stage_of(stage).rewarded
    for rule in ALARMS:
        if rule.metric == "kl" and rule.condition == "above" and not rewarded:
            continue  # the teacher is far at first; that is what is learned
        threshold = thresholds.get(rule.name, rule.threshold)
        if family in rule.families and _is_raised(rule, last, threshold):
            value = rule.measure(last, rule.metric)
            assert value is not None
            todo = rule.advice if rewarded else rule.without_reward or rule.advice
            advice = f"{rule.meaning} {todo}"
            alarms.append(Alarm(stage, last.record.step, rule.name, value, threshold, advice))
    return alarms


def _is_raised(rule: Rule, last: History, threshold: float) -> bool:
    """Whether the condition holds for `in_a_row` records now, and did not one record earlier."""
    if not rule.is_about(last.record) or not rule.holds(last, threshold):
        return False
    ends = (end for end in range(last.end, 0, -1) if rule.is_about(last.records[end - 1]))
    held = [
        rule.holds(History(last.records, end), threshold)
        for end in itertools.islice(ends, rule.in_a_row + 1)
    ]
    was_on = len(held) > rule.in_a_row and all(held[1:])
    return len(held) >= rule.in_a_row and all(held[: rule.in_a_row]) and not was_on
