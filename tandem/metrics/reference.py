"""docs/metrics.md, generated from the metrics and alarms themselves.

Rewrite the page with `python -m tandem.metrics.reference > docs/metrics.md`.
"""

from __future__ import annotations

import sys

from tandem.metrics.metric import STAGES, Metric
from tandem.metrics.names import METRICS
from tandem.metrics.rules import ALARMS, Rule
from tandem.metrics.text import short_number

_INTRO = """\
# Metrics

Every number that a run logs, under one name with one meaning. A step's record is one line of
`metrics.jsonl` in the run's folder,
`{"stage": "sft", "step": 12, "time": 1732060800.0, "values": {"loss": 2.31}}`, and the same number
is the Weights & Biases tag `<stage>/<name>`; TensorBoard's are `<stage>/<name>` too, or
`<stage>-<group>/<name>` (`ppo-reward`, `ppo-kl`, `ppo-update`, `ppo-answers`, and `-held-out` and
`-cost` of every stage), so that each group folds. Steps count from 1; step 0 is measured before the
first update. A number that is not finite is written as `"nan"`, `"inf"` or `"-inf"`.
A name that is not on this page cannot be logged.

Units: `nats` are natural-log units; a `share` is a fraction of 1; `reward units` are the reward
model's raw scores and whatever is made of them; `normalized reward` is in standard deviations of
the SFT policy's scores around their mean. This page is generated from `tandem/metrics`.
"""

_ALARM_INTRO = """\
## Alarms

After every record the quantities below are compared with their thresholds. An alarm is shown,
written to `alarms.jsonl` and listed in the report once, until it recovers. It never stops the run.
"""


_SUPERVISED = "SFT, reward model, DPO"
_PPO = "PPO"
_COST = "Time and memory, per phase"


def markdown() -> str:
    """The reference page: every metric by stage, then every alarm."""
    parts = [_INTRO]
    for title in (_SUPERVISED, _PPO, _COST):
        rows = [_metric_row(metric) for metric in METRICS if _under(metric) == title]
        head = "| name | unit | logged by | meaning | healthy |\n|---|---|---|---|---|"
        parts.append("\n".join([f"## {title}\n", head, *rows]) + "\n")
    head = (
        "| alarm | stages | quantity | when | what it means | what to change | source |\n"
        "|---|---|---|---|---|---|---|"
    )
    parts.append("\n".join([_ALARM_INTRO, head, *map(_alarm_row, ALARMS)]) + "\n")
    return "\n".join(parts)


def _under(metric: Metric) -> str:
    if metric.stages == STAGES:
        return _COST
    return _PPO if metric.stages == ("ppo",) else _SUPERVISED


def _metric_row(metric: Metric) -> str:
    name = metric.name
    if metric.members:
        name = name.replace("*", "<phase>")
    elif name.endswith("/*"):
        name = name.replace("*", "<data set>")
    meaning = f"{metric.meaning} Source: {metric.source}." if metric.source else metric.meaning
    if metric.members:
        meaning = f"{meaning} Phases: {', '.join(metric.members)}."
    logged = "all" if metric.stages == STAGES else ", ".join(metric.stages)
    return _row(f"`{name}`", metric.unit, logged, meaning, metric.healthy)


def _alarm_row(rule: Rule) -> str:
    when = f"{rule.condition} {short_number(rule.threshold)}"
    if rule.in_a_row > 1:
        when += f", {rule.in_a_row} in a row"
    if rule.after_step > 0:
        when += f", after step {rule.after_step}"
    stages = ", ".join(rule.stages) if rule.stages != STAGES else "all"
    return _row(
        f"`{rule.name}`", stages, rule.quantity, when, rule.meaning, rule.advice, rule.source
    )


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
