"""Predictions of a run beside what it measured, by phase: `predictions.jsonl` in its folder."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tandem.files import append, read
from tandem.metrics.folder import PREDICTIONS_FILE as PREDICTIONS_FILE
from tandem.metrics.folder import mapping
from tandem.metrics.records import read_lines
from tandem.text import counted, visible

OF_A_STEP = ("generate", "score", "train")
"""The phases of a step."""

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
    predicted live bytes. slack_bytes: of the predicted, what was fitted to other runs' memory; None
    in records from before it was kept. terms: what the time was predicted from. rows: of the whole
    stage, which it was predicted from, held-out ones included. case: a word on the run, for tables.
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
    slack_bytes: float | None = None
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
    """Append to the run's predictions.jsonl, in place of half a line that a killed run left.

    Raises:
        OSError: the disk refuses.
    """
    path = folder / PREDICTIONS_FILE
    half = len(read(path).rpartition(b"\n")[2]) if path.exists() else 0
    if half:
        os.truncate(path, path.stat().st_size - half)
    lines = "".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)
    append(path, lines.encode())


def read_outcomes(folder: Path) -> list[Outcome]:
    """A run's outcomes, the last of each stage and phase. Damaged lines are left out, and
    their number is printed on stderr; half a last line is what a killed run leaves."""
    damaged: list[str] = []
    found = read_lines(folder / PREDICTIONS_FILE, _outcome, damaged)
    if damaged:
        lines = counted(len(damaged), "damaged line")
        path = visible(str(folder / PREDICTIONS_FILE))
        print(f"warning: {path}: left out {lines}", file=sys.stderr)
    return list({(outcome.stage, outcome.phase): outcome for outcome in found}.values())


def _outcome(line: Mapping[str, Any]) -> Outcome:
    """The outcome in one decoded line; TypeError if it is not one."""
    found = Outcome(**mapping(line))
    required = (found.predicted_bytes, found.measured_bytes, found.live_bytes, found.process_bytes)
    given = (
        found.predicted_seconds, found.measured_seconds, found.cpu_seconds, found.slack_bytes
    )  # fmt: skip
    if not all(isinstance(number, int | float) for number in required):
        raise TypeError
    if not all(number is None or isinstance(number, int | float) for number in given):
        raise TypeError
    for part in (found.parts, found.terms, found.rows):
        mapping(part)
    return found
