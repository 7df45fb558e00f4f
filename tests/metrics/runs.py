"""Run folders written by hand, so that a test does not depend on MetricLog."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.metrics.records import Record


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def metrics_line(stage: str, step: int, **values: Any) -> dict[str, Any]:
    return {"stage": stage, "step": step, "time": 1.7e9 + step, "values": values}


def history(stage: str, metric: str, values: Sequence[float], first: int = 1) -> list[Record]:
    return [Record(stage, first + i, 0.0, {metric: value}) for i, value in enumerate(values)]
