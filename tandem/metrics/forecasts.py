"""The report's part on predictions: every phase's memory by part, predicted beside measured."""

from __future__ import annotations

from typing import Any

from tandem.config.stages import stage_names, stage_of
from tandem.metrics.charts import stacked_bar
from tandem.metrics.folder import RunFolder, mapping_or_empty, number_or_none
from tandem.metrics.text import duration, with_unit

_COLORS = 6
_WHOLE = "stage"
_SMALL = 0.01
_PROCESS = "process and allocator"
_IN_WORDS = {
    "gradient under way": "one weight's gradient",
    "activations' gradients": "gradients of activations",
    "read or checked, then AdamW and masters": "reading weights, then AdamW and fp32 masters",
}
"""Parts of the memory model whose names are short for what they are."""


def prediction_tables(folder: RunFolder) -> list[dict[str, Any]]:
    """Per stage: rows of phases, whether any time is predicted, and bars of memory by part."""
    lines = {(str(p.get("stage")), str(p.get("phase"))): p for p in folder.predictions}
    tables = []
    for stage in stage_names():
        of_stage = {phase: line for (name, phase), line in lines.items() if name == stage}
        rows = [_row(phase, line) for phase, line in of_stage.items()]
        bars = [bar for phase, line in of_stage.items() if (bar := _bar(stage, phase, line))]
        if rows:
            is_timed = any(number_or_none(p.get("predicted_seconds")) for p in of_stage.values())
            title = stage_of(stage).title
            tables.append({"title": title, "rows": rows, "is_timed": is_timed, "bars": bars})
    return tables


def _row(phase: str, line: Any) -> dict[str, Any]:
    measured, predicted = line.get("cpu_seconds"), line.get("predicted_seconds")
    if measured is None:
        measured = line.get("measured_seconds")
    memory = (line.get("measured_bytes"), line.get("predicted_bytes"))
    cells = [*_cells(*memory, "bytes"), *_cells(measured, predicted, "seconds")]
    return {"phase": "whole" if phase == _WHOLE else phase, "cells": cells}


def _cells(measured: Any, predicted: Any, unit: str) -> list[str]:
    """Measured, predicted, and how far off. A prediction of 0 is none (of evaluations' memory)."""
    sizes = [number_or_none(measured), number_or_none(predicted) or None]
    shown = ["" if size is None else duration(size) if unit == "seconds" else with_unit(size, unit)
             for size in sizes]  # fmt: skip
    off = f"{100 * (sizes[1] / sizes[0] - 1):+z.0f} %" if sizes[0] and sizes[1] else ""
    return [*shown, off]


def _bar(stage: str, phase: str, line: Any) -> dict[str, Any] | None:
    parts = {
        _IN_WORDS.get(str(name), str(name)): size
        for name, value in mapping_or_empty(line.get("parts")).items()
        if (size := number_or_none(value))
    }
    # What is predicted of the rank, and no part of it: Python, PyTorch, the allocator's reserve.
    rest = (number_or_none(line.get("predicted_bytes")) or 0.0) - sum(parts.values())
    if parts and rest > 0:
        parts[_PROCESS] = rest
    total = sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])[:_COLORS]
    shown = [(n, name, size) for n, (name, size) in enumerate(largest, start=1)
             if size > _SMALL * total]  # fmt: skip
    if not shown:
        return None
    legend = [(n, name, with_unit(size, "bytes")) for n, name, size in shown]
    bar = stacked_bar(f"{stage} {phase}: predicted memory by part", shown)
    return {"phase": phase, "bar": bar, "legend": legend}
