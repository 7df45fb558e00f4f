"""Predictions of a run beside what it measured, by phase: `predictions.jsonl` in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tandem.metrics.folder import PREDICTIONS_FILE as PREDICTIONS_FILE

WHOLE = "stage"
"""The phase of a stage's own line: its peak over all phases, and all of its time."""

EVALUATE = "evaluate"
"""The phase of one evaluation; of its memory nothing is predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A phase predicted and measured, on the first rank.

    predicted_bytes, measured_bytes: the peak, of a CPU resident. seconds: of a step (load: once);
    predicted_seconds is CPU seconds of a rank on a CPU, where cpu_seconds was measured, and None
    where the machine's speed was not known. process_bytes: resident before any model. parts: of the
    predicted live bytes. terms: what
    the time was predicted from. case: a word on the run, for tables.
    """

    stage: str
    phase: str
    ranks: int
    hardware: str
    dtype: str
    predicted_bytes: float
    measured_bytes: float
    live_bytes: float = 0.0
    process_bytes: float = 0.0
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    cpu_seconds: float | None = None
    steps: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)
    rows: Mapping[str, Any] = field(default_factory=dict)
    constants: str = ""
    case: str = ""

    @property
    def memory_error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else math.nan

    @property
    def time_error(self) -> float:
        """The same of seconds; of CPU seconds where there are any. NaN where one is not known."""
        measured = self.cpu_seconds or self.measured_seconds
        if not measured or self.predicted_seconds is None:
            return math.nan
        return self.predicted_seconds / measured - 1


def add_outcomes(folder: Path, outcomes: Iterable[Outcome]) -> None:
    """Append to the run's predictions.jsonl."""
    with (folder / PREDICTIONS_FILE).open("a", encoding="utf-8") as file:
        for outcome in outcomes:
            file.write(json.dumps(asdict(outcome)) + "\n")


def read_outcomes(folder: Path) -> list[Outcome]:
    """A run's outcomes, the last of each stage and phase; lines that cannot be read are left out,
    because a run may have been killed while it wrote one."""
    path = folder / PREDICTIONS_FILE
    found: dict[tuple[str, str], Outcome] = {}
    if not path.is_file():
        return []
    for line in path.read_text("utf-8", "replace").splitlines():
        try:
            values: dict[str, Any] = json.loads(line)
            outcome = Outcome(**values)
        except (ValueError, TypeError):
            continue
        found[outcome.stage, outcome.phase] = outcome
    return list(found.values())
