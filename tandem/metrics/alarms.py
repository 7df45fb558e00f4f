"""Published thresholds: when a run is going wrong, and what to change.

A rule measures one quantity after a record that carries its metric and compares it with its
threshold. An alarm is set off when the comparison holds for `in_a_row` such records and did not
before the last one: once, until it recovers. The state is the history itself, so a run that is
continued neither repeats nor forgets an alarm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.metrics.history import History
from tandem.metrics.metric import declared_by
from tandem.metrics.names import check_stage
from tandem.metrics.records import Record
from tandem.metrics.rules import ALARMS, Rule

__all__ = ["ALARMS", "Alarm", "check_alarms"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that a record set off; a line of alarms.jsonl."""

    stage: str
    step: int
    alarm: str
    value: float
    threshold: float
    advice: str


def check_alarms(
    stage: str, history: Sequence[Record], thresholds: Mapping[str, float] | None = None
) -> list[Alarm]:
    """The alarms that the last record of `history` sets off.

    Args:
        stage: whose rules to apply.
        history: the stage's records, oldest first; other stages' records are not looked at.
        thresholds: in place of published ones, by alarm name.
    Raises:
        ConfigError: unknown stage, or a threshold for an alarm that there is not.
    """
    check_stage(stage)
    own = thresholds or {}
    for name in own:
        if name not in {rule.name for rule in ALARMS}:
            raise ConfigError(
                f"thresholds must name alarms of tandem.metrics.rules; got {name!r}. "
                f"Use one of {', '.join(rule.name for rule in ALARMS)}."
            )
    if not history or history[-1].stage != stage:
        return []
    alarms, kind = [], declared_by(stage)
    for rule in ALARMS:
        if kind in rule.stages and (rule.metric == "*" or rule.metric in history[-1].values):
            threshold = own.get(rule.name, rule.threshold)
            if _sets_off(rule, stage, history, threshold):
                value = rule.measure(History(stage, history, len(history)))
                assert value is not None
                advice = f"{rule.meaning} {rule.advice}"
                step = history[-1].step
                alarms.append(Alarm(stage, step, rule.name, value, threshold, advice))
    return alarms


def _sets_off(rule: Rule, stage: str, history: Sequence[Record], threshold: float) -> bool:
    last = History(stage, history, len(history))
    if not rule.holds(last, threshold):
        return False
    ends = last.ends_with(rule.metric, rule.in_a_row + 1)
    held = [rule.holds(History(stage, history, end), threshold) for end in ends]
    now_held, before_held = held[: rule.in_a_row], held[1 : rule.in_a_row + 1]
    was_on = len(before_held) == rule.in_a_row and all(before_held)
    return len(now_held) == rule.in_a_row and all(now_held) and not was_on
