"""docs/metrics.md, generated from the metrics and alarms themselves.

Rewrite the page with `python -m tandem.metrics.reference > docs/metrics.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tandem.config.stages import FAMILIES, Family, stage_names, stage_of
from tandem.metrics.alarms import ALARMS, Rule
from tandem.metrics.metric import Metric
from tandem.metrics.own import OWN
from tandem.metrics.table import METRICS
from tandem.metrics.text import short_number, trimmed

_INTRO = """\
# Metrics

Every number that a run logs, under one name with one meaning. A step's record is one line of
`metrics.jsonl` in the run's folder,
`{"stage": "sft", "step": 12, "time": 1732060800.0, "values": {"loss": 2.31}}`. In Weights & Biases
the same number has the tag `<stage>/<name>`; in TensorBoard too, or `<stage>-<group>/<name>` where
it belongs to a group (`ppo-reward`, `ppo-kl`, `ppo-update`, `ppo-answers`; `-held-out` and `-cost`
in every stage), which TensorBoard can fold. Steps count from 1; step 0 is measured before the
first update. A number that is not finite is written as `"nan"`, `"inf"` or `"-inf"`.
A name that is not on this page cannot be logged; numbers of your own are called `own/NAME`.

Units: `nats` are natural-log units; a `share` is a fraction of 1; `reward units` are the reward
model's raw scores and everything computed from them; `normalized reward` counts standard deviations
of the SFT policy's scores around their mean. This page is generated from `tandem/metrics`.

Which metrics and alarms a stage has depends on its family:
"""

_ALARM_INTRO = """\
## Alarms

After every record the quantities below are compared with their thresholds. An alarm is printed,
written to `alarms.jsonl` and listed in the report once, until it recovers. It never stops the run.
"""

_METRIC_HEAD = ("name", "unit", "families", "meaning", "healthy")
_ALARM_HEAD = ("alarm", "families", "quantity", "when", "what it means", "what to change", "source")


def markdown() -> str:
    """The reference page: the families, every metric, then every alarm."""
    families = [f"- {family}: {_stages_of(family)}" for family in FAMILIES]
    parts = ["\n".join([_INTRO, *families]) + "\n"]
    sections = {
        "Supervised stages and stages on pairs": lambda m: "rl" not in m.families,
        "RL stages": lambda m: "rl" in m.families and len(m.families) < len(FAMILIES),
        "All stages": lambda m: len(m.families) == len(FAMILIES),
    }
    for title, belongs in sections.items():
        rows = [_metric_row(metric) for metric in METRICS if belongs(metric)]
        parts.append(f"## {title}\n\n{_table(_METRIC_HEAD, rows)}")
    parts.append(f"{_ALARM_INTRO}\n{_table(_ALARM_HEAD, map(_alarm_row, ALARMS))}")
    return "\n".join(parts)


def _stages_of(family: Family) -> str:
    stages = map(stage_of, stage_names())
    return ", ".join(f"{s.title} (`{s.name}`)" for s in stages if s.family == family)


def _metric_row(metric: Metric) -> tuple[str, ...]:
    of_rewards = metric.name.startswith("reward_")
    if metric.members:
        member = "reason" if of_rewards else "phase"
    else:
        member = "reward function" if of_rewards else "data set"
    if metric is OWN:
        member = "name"
    name = metric.name.replace("*", f"<{member}>")
    meaning = f"{metric.meaning} Source: {metric.source}." if metric.source else metric.meaning
    if metric.members:
        meaning = f"{meaning} {member.capitalize()}s: {', '.join(metric.members)}."
    return f"`{name}`", metric.unit, _families(metric.families), meaning, metric.healthy


def _alarm_row(rule: Rule) -> tuple[str, ...]:
    when = f"{rule.condition} {trimmed(short_number(rule.threshold))}"
    if rule.in_a_row > 1:
        when += f", {rule.in_a_row} in a row"
    if rule.after_step > 0:
        when += f", after step {rule.after_step}"
    quantity = rule.quantity or rule.metric
    families = _families(rule.families)
    return f"`{rule.name}`", families, quantity, when, rule.meaning, rule.advice, rule.source


def _families(families: tuple[Family, ...]) -> str:
    return "all" if families == FAMILIES else ", ".join(families)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


if __name__ == "__main__":
    sys.stdout.write(markdown())
