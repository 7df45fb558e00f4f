"""The report's charts and the table of every metric, per stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from tandem.config.stages import stage_of
from tandem.metrics.charts import Series, line_chart
from tandem.metrics.folder import RunFolder, declared, finite
from tandem.metrics.metric import declared_by
from tandem.metrics.panels import PANELS, Panel
from tandem.metrics.text import short_number, with_unit


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart with its caption; `legend` holds (colour number, label, last value)."""

    title: str
    unit: str
    meaning: str
    legend: tuple[tuple[int, str, str], ...]
    svg: Markup


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One line of the table of all metrics of a stage."""

    name: str
    unit: str
    first: str
    last: str
    low: str
    high: str
    meaning: str


@dataclass(frozen=True, slots=True)
class StageCurves:
    """One stage's section."""

    stage: str
    title: str
    steps: str
    figures: tuple[Figure, ...]
    rows: tuple[MetricRow, ...]


def stage_curves(folder: RunFolder) -> list[StageCurves]:
    """Every stage's charts and the table of all its metrics."""
    return [
        StageCurves(
            stage=stage,
            title=stage_of(stage).title,
            steps=f"{max(r.step for r in folder.records if r.stage == stage):,} steps",
            figures=tuple(
                f for panel in PANELS[declared_by(stage)] if (f := _figure(folder, stage, panel))
            ),
            rows=_metric_rows(folder, stage),
        )
        for stage in folder.stages()
    ]


def _figure(folder: RunFolder, stage: str, panel: Panel) -> Figure | None:
    unit = declared(panel.lines[0][0]).unit
    scale = 100.0 if unit == "share" else 1.0
    lines, legend = [], []
    for number, (metric, label) in enumerate(panel.lines, start=1):
        points = folder.series(stage, metric)
        scaled = [(step, value * scale) for step, value in points]
        lines.append(Series(label, scaled, _kind(metric)))
        if points:
            legend.append((number, label, with_unit(points[-1][1], unit)))
    if not any(finite(line.points) for line in lines):
        return None
    shown = {"share": "%", "ratio": "", "norm": ""}.get(unit, unit)
    meaning = declared(panel.lines[0][0]).meaning
    return Figure(panel.title, shown, meaning, tuple(legend), line_chart(panel.title, shown, lines))


def _kind(metric: str) -> Literal["noisy", "exact", "marks"]:
    if metric.startswith("heldout_"):
        return "marks"
    return "exact" if metric.endswith(("learning_rate", "_coef")) else "noisy"


def _metric_rows(folder: RunFolder, stage: str) -> tuple[MetricRow, ...]:
    names = dict.fromkeys(n for r in folder.records if r.stage == stage for n in r.values)
    rows = []
    for name in names:
        values = [value for _, value in folder.series(stage, name)]
        numbers = [value for value in values if math.isfinite(value)]
        ends = (min(numbers), max(numbers)) if numbers else (math.nan, math.nan)
        metric = declared(name)
        rows.append(
            MetricRow(
                name=name,
                unit=metric.unit,
                first=short_number(values[0]),
                last=short_number(values[-1]),
                low=short_number(ends[0]),
                high=short_number(ends[1]),
                meaning=metric.meaning,
            )
        )
    return tuple(rows)
