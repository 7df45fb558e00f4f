"""Run folders written by hand, so that a test does not depend on MetricLog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.metrics.records import Record


def metrics_line(stage: str, step: int, **values: Any) -> dict[str, Any]:
    return {"stage": stage, "step": step, "time": 1.7e9 + step, "values": values}


def history(stage: str, metric: str, values: Sequence[float], first: int = 1) -> list[Record]:
    return [Record(stage, first + i, 0.0, {metric: value}) for i, value in enumerate(values)]
