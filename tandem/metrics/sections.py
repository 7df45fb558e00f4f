"""What the report shows: its sections as rows of text and charts, for report.html.j2 to lay out.

Every function takes a run folder and skips what the folder does not have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from tandem.config.stages import Stage
from tandem.metrics.charts import Point, Series, line_chart, stacked_bar
from tandem.metrics.folder import (
    RunFolder,
    finite,
    list_or_empty,
    mapping_or_empty,
    number_or_none,
)
from tandem.metrics.metric import PHASES, Metric
from tandem.metrics.names import metric_or_unknown, title_of
from tandem.metrics.table import METRICS
from tandem.metrics.text import duration, short_number, trimmed, with_unit
from tandem.text import counted

Row = Mapping[str, Any]

_OTHER_FROM = 0.005
"""Share of a stage's time from which the time outside all phases gets a row."""
_SAMPLES = "samples_per_prompt"
_NO_UNIT = ("", "share", "ratio", "norm", "normalized reward")
"""Units that a number is clear without: shares are shown as percentages."""
_WITH_UNIT = ("share", "bytes", "seconds", "TFLOP/s")
"""Units that `with_unit` writes behind the number."""
_RATES = ("tokens_per_second", "samples_per_second", "tflops")


def when(folder: RunFolder) -> str:
    """Date and time (UTC) of the first record."""
    times = [record.time for record in folder.records if 0 < record.time < 1e11]
    if not times:
        return ""
    return time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(min(times))).lstrip("0")


def stages_of_run(folder: RunFolder) -> list[tuple[str, str]]:
    """(name, state) of the stages in the config and of those with records; the state is empty for
    a stage that has not run."""
    states = {
        str(stage): ""
        for stage in list_or_empty(folder.config.get("stages", folder.config.get("steps")))
    }
    for stage in folder.stages():
        seconds = total_seconds(folder, stage)
        states[stage.name] = _steps(folder, stage) + (f" · {duration(seconds)}" if seconds else "")
    return list(states.items())


def result_cards(folder: RunFolder) -> list[Row]:
    """The result in a few numbers: each stage's model on held-out rows, and the total time."""
    cards = []
    for stage in folder.stages():
        best = finite(folder.series(stage.name, "heldout_best_step"))
        for metric in METRICS:
            points = finite(folder.series(stage.name, metric.name)) if metric.card else []
            if stage.family not in metric.families or not points:
                continue
            title = title_of(metric.name, stage.family)
            label = f"{stage.short} model: {title[0].lower()}{title[1:]}"
            (first_step, before), (last_step, value) = points[0], points[-1]
            detail = f"at step {last_step:.0f}"
            if len(points) > 1:
                start = f"at step {first_step:.0f}" if first_step else "before training"
                detail = f"{with_unit(before, metric.unit)} {start}"
            if metric.is_heldout and best and best[-1][1] in (kept := dict(points)):
                # Its models are the result, not the last step's.
                detail += f"; {with_unit(value, metric.unit)} at the last step, {last_step:.0f}"
                value = kept[best[-1][1]]
                detail = f"step {best[-1][1]:.0f}, the best of {len(best)} evaluations; {detail}"
            unit = "" if metric.unit in _NO_UNIT else f"{metric.unit}; "
            cards.append((label, with_unit(value, metric.unit), unit + detail))
    if total := sum(total_seconds(folder, stage) for stage in folder.stages()):
        cards.append(("Total time of all stages", duration(total), "without loading and saving"))
    return [dict(zip(("label", "value", "detail"), card, strict=True)) for card in cards]


def result_table(folder: RunFolder) -> Row:
    """The evaluation's numbers, a column per model."""
    samples = number_or_none(mapping_or_empty(folder.config.get("sampling")).get(_SAMPLES)) or 1
    note = ""
    if samples > 1 and any(stage.family == "rl" for stage in folder.stages()):
        note = (
            "Every model answered each held-out prompt once. Evaluations during RL stages take "
            f"{samples:g} answers to each, so their means are others."
        )
    return {**figures(folder.evaluation), "note": note}


def figures(evaluation: Mapping[str, Any]) -> Row:
    """An evaluation's numbers, a column per model; `best` holds the columns of the best."""
    models = mapping_or_empty(evaluation.get("models"))
    rows = []
    for name in map(str, dict.fromkeys(n for values in models.values() for n in _keys(values))):
        metric = metric_or_unknown(name)
        numbers = [number_or_none(mapping_or_empty(v).get(name)) for v in models.values()]
        rows.append(
            {
                "name": name,
                "title": title_of(name),
                "unit": "" if metric.unit in _NO_UNIT else metric.unit,
                "meaning": metric.meaning,
                "cells": ["" if n is None else with_unit(n, metric.unit) for n in numbers],
                "best": _best(numbers, metric.better),
            }
        )
    return {"labels": list(map(str, models)), "rows": rows}


def reward_tables(folder: RunFolder) -> list[Row]:
    """The reward model's reliability and the best of n samples, where they were measured."""
    bins = list(map(mapping_or_empty, list_or_empty(folder.evaluation.get("reliability"))))
    names = ("pairs", "confidence", "accuracy")
    labels = ("pairs", "mean sigmoid(margin)", "share right")
    tables: list[tuple[str, Sequence[str], list[list[Any]]]] = [
        ("Reward model by confidence", labels, [[b.get(n) for n in names] for b in bins])
    ]
    found = mapping_or_empty(folder.evaluation.get("best_of_n"))
    points = {
        str(label): list(map(mapping_or_empty, list_or_empty(of_policy)))
        for label, of_policy in found.items()
    }
    rows = [
        [across[0].get("n"), across[0].get("kl"), *(point.get("mean_reward") for point in across)]
        for across in zip(*points.values(), strict=False)
    ]
    columns = ("n", "KL, nats", *(f"reward of {label}" for label in points))
    tables.append(("Best of n samples, by the reward", columns, rows))
    return [
        {
            "title": title,
            "labels": labels,
            "rows": [
                [_number_text(number_or_none(cell), digits=3) for cell in row] for row in rows
            ],
        }
        for title, labels, rows in tables
        if rows
    ]


def _keys(values: Any) -> Iterable[Any]:
    return mapping_or_empty(values).keys()


def _best(numbers: Sequence[float | None], better: str) -> set[int]:
    """Where the best of several numbers is, ties included; nowhere if all are equal."""
    known = [n for n in numbers if n is not None and math.isfinite(n)]
    if not better or not known or min(known) == max(known):
        return set()
    best = max(known) if better == "higher" else min(known)
    return {column for column, number in enumerate(numbers) if number == best}


def alarm_rows(folder: RunFolder) -> list[Row]:
    """Alarms in the order raised."""
    return [
        {
            "name": str(line.get("alarm", "")),
            "at": _at(line),
            "value": _number_text(line.get("value")),
            "threshold": _number_text(line.get("threshold")),
            "advice": str(line.get("advice", "")),
        }
        for line in folder.alarms
    ]


def stage_curves(folder: RunFolder) -> list[Row]:
    """Every stage's charts and the table of all its metrics."""
    curves: list[Row] = []
    for stage in folder.stages():
        charts: dict[str, list[Metric]] = {}  # by title, in the order of METRICS
        for metric in METRICS:
            if metric.chart and stage.family in metric.families:
                charts.setdefault(metric.chart, []).append(metric)
        figures = (_figure(folder, stage, *chart) for chart in charts.items())
        curves.append(
            {
                "title": stage.title,
                "steps": _steps(folder, stage),
                "figures": list(filter(None, figures)),
                "rows": _metric_rows(folder, stage),
            }
        )
    return curves


def _figure(folder: RunFolder, stage: Stage, title: str, metrics: Sequence[Metric]) -> Row | None:
    """One chart with its legend, (color, label, last value); None without a finite number."""
    unit = metrics[0].unit
    shown = {"share": "%", "ratio": "", "norm": ""}.get(unit, unit)
    drawn = list(_lines(folder, stage, sorted(metrics, key=lambda m: m.is_heldout)))
    if not any(finite(points) for _, _, points in drawn):
        return None
    # A held-out line has the second color, with or without a training line in the chart.
    first_color = 2 if drawn[0][1].is_heldout else 1
    series, legend = [], []
    for color, (label, metric, points) in enumerate(drawn, start=first_color):
        scale = 100.0 if unit == "share" else 1.0
        kind: Any = "marks" if metric.is_heldout else "noisy"
        if metric.name.endswith(("learning_rate", "_coef")):
            kind = "exact"
        series.append(Series(label, [(step, value * scale) for step, value in points], kind, color))
        # The last step's speed is that of its batch, which may be a short one.
        speeds = [v for _, v in finite(points) if metric.name.startswith("tokens_per_second")]
        last = median(speeds) if speeds else points[-1][1]
        legend.append((color, label, with_unit(last, unit)))
    svg = line_chart(title, shown, series)
    meaning = drawn[0][1].meaning
    return {"title": title, "unit": shown, "meaning": meaning, "legend": legend, "svg": svg}


def _lines(
    folder: RunFolder, stage: Stage, metrics: Iterable[Metric]
) -> Iterable[tuple[str, Metric, list[Point]]]:
    """(label, metric, points) of what was logged; a line per phase if there are phases."""
    for metric in metrics:
        for member in metric.members or ("",):
            label = member or metric.line or ("held-out" if metric.is_heldout else "training")
            if points := folder.series(stage.name, metric.name.replace("*", member)):
                yield label, metric, points


def _metric_rows(folder: RunFolder, stage: Stage) -> list[Row]:
    rows: list[Row] = []
    for name in dict.fromkeys(n for r in folder.records if r.stage == stage.name for n in r.values):
        values = [value for _, value in folder.series(stage.name, name)]
        numbers = [value for value in values if math.isfinite(value)] or [math.nan]
        shown = [values[0], values[-1], min(numbers), max(numbers)]
        metric = metric_or_unknown(name)
        rows.append(
            {
                "name": name,
                "title": title_of(name, stage.family),
                "unit": "" if metric.unit in _WITH_UNIT else metric.unit,
                "numbers": [with_unit(value, metric.unit, digits=4) for value in shown],
                "meaning": metric.meaning,
            }
        )
    return rows


def final_answers(folder: RunFolder) -> list[Row]:
    """The evaluation's prompts with every model's answer."""
    entries = map(mapping_or_empty, list_or_empty(folder.evaluation.get("answers")))
    return [_prompt_row(entry, at="") for entry in entries if entry]


def training_answers(folder: RunFolder, count: int) -> list[Row]:
    """The newest samples drawn during training."""
    return [_prompt_row(entry, at=_at(entry)) for entry in reversed(folder.samples[-count:])]


def _prompt_row(entry: Row, at: str) -> Row:
    """A prompt and its answers; `best` marks the highest scores."""
    answers = mapping_or_empty(entry.get("answers"))
    found = [(str(label), mapping_or_empty(answer)) for label, answer in answers.items()]
    scores = [number_or_none(answer.get("score")) for _, answer in found]
    best = _best(scores, "higher")
    shown = [
        {
            "label": label,
            "text": str(answer.get("text", "")),
            "score": _number_text(scores[number], digits=3),
            "best": number in best,
        }
        for number, (label, answer) in enumerate(found)
    ]
    return {"prompt": str(entry.get("prompt", "")), "at": at, "answers": shown}


def dataset_rows(folder: RunFolder) -> list[Row]:
    """The data ledger: what became of every row, a line per data set.

    used: (count, stage). left: (count, reason, places) of rows that no stage uses. notes: (count,
    what) about rows already in those counts, or about lines that are not rows (blank ones).
    """
    rows: list[Row] = []
    for entry in filter(None, map(mapping_or_empty, list_or_empty(folder.data.get("datasets")))):
        left = []
        for reason, dropped in mapping_or_empty(entry.get("dropped")).items():
            detail = mapping_or_empty(dropped)
            places = list(map(str, list_or_empty(detail.get("first"))))
            if len(places) < (number_or_none(detail.get("count")) or 0):
                places.append("…")
            left.append((_count(detail.get("count")), f"dropped: {reason}", ", ".join(places)))
        left += [(n, f"unused: {reason}", "") for n, reason in _counts(entry.get("unused"))]
        lines = {"duplicates": entry.get("duplicates"), "blank lines": entry.get("blank_lines")}
        copies = _counts(entry.get("extra_copies"))
        notes = [
            *_counts(lines),
            *((n, f"extra copies by weight in {stage}") for n, stage in copies),
        ]
        rows.append(
            {
                "name": str(entry.get("name", "")),
                "path": str(entry.get("path", "")),
                "read": _count(entry.get("rows")),
                "used": [
                    (n, use.replace("heldout", "held-out")) for n, use in _counts(entry.get("used"))
                ],
                "left": left,
                "notes": [*notes, *_counts(entry.get("notes"))],
            }
        )
    return rows


def _counts(counts: Any) -> list[tuple[str, str]]:
    """(count, name) of a mapping's entries that are not zero."""
    named = mapping_or_empty(counts).items()
    return [(_count(value), str(name)) for name, value in named if number_or_none(value)]


def time_per_phase(folder: RunFolder) -> list[Row]:
    """Time, throughput and memory per phase, of the stages that were timed."""
    times: list[Row] = []
    for stage in folder.stages():
        seconds, total = _phase_seconds(folder, stage), total_seconds(folder, stage)
        other = total - sum(seconds.values())
        seconds["other"] = other if other > _OTHER_FROM * total else 0.0
        # A phase has the same color in every stage.
        parts = [(n, phase, s) for n, (phase, s) in enumerate(seconds.items(), start=1) if s > 0]
        if not parts:
            continue
        rows = []
        for color, phase, value in parts:
            peaks = [peak for _, peak in _phase(folder, stage, "peak_memory_bytes", phase)]
            cells = [
                duration(value),
                f"{100 * value / total:.0f} %",
                *(_rate(folder, stage, rate, phase) for rate in _RATES),
                with_unit(max(peaks), "bytes") if peaks else "",
            ]
            rows.append({"color": color, "phase": phase, "cells": cells})
        bar = stacked_bar(f"{stage.title}: time per phase", parts)
        times.append({"title": stage.title, "total": duration(total), "bar": bar, "rows": rows})
    return times


def _rate(folder: RunFolder, stage: Stage, name: str, phase: str) -> str:
    """The rate over all steps: the counts (rate times seconds) over the time of those steps."""
    seconds = dict(_phase(folder, stage, "seconds", phase))
    rates = [point for point in _phase(folder, stage, name, phase) if point[0] in seconds]
    timed = sum(seconds[step] for step, _ in rates)
    count = sum(rate * seconds[step] for step, rate in rates)
    unit = metric_or_unknown(f"{name}/{phase}").unit
    return with_unit(count / timed, unit) if timed else ""


def total_seconds(folder: RunFolder, stage: Stage) -> float:
    """Wall time of a stage as far as it was timed: its steps, or its phases if they are more
    (evaluation may be outside a step)."""
    steps = sum(value for _, value in _phase(folder, stage, "seconds", "step"))
    return max(steps, sum(_phase_seconds(folder, stage).values()))


def _phase_seconds(folder: RunFolder, stage: Stage) -> dict[str, float]:
    return {
        phase: sum(value for _, value in _phase(folder, stage, "seconds", phase))
        for phase in PHASES
        if phase != "step"
    }


def _phase(folder: RunFolder, stage: Stage, name: str, phase: str) -> list[Point]:
    return finite(folder.series(stage.name, f"{name}/{phase}"))


def _steps(folder: RunFolder, stage: Stage) -> str:
    return counted(max(r.step for r in folder.records if r.stage == stage.name), "step")


def _at(line: Row) -> str:
    return f"{line.get('stage', '')} step {line.get('step', '')}".strip()


def _count(value: Any) -> str:
    number = number_or_none(value)
    return "" if number is None else f"{number:,.0f}"


def _number_text(value: Any, digits: int = 4) -> str:
    number = number_or_none(value)
    return "" if number is None else trimmed(short_number(number, digits))
