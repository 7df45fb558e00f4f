"""The run folder's line files: metrics.jsonl, samples.jsonl, alarms.jsonl.

One JSON object per line, appended and flushed. A kill can leave half of a last line: readers
ignore it, `cut_lines` removes it. Non-finite numbers are written as "nan", "inf", "-inf".
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from tandem.errors import CheckpointError
from tandem.files import append, replace
from tandem.files import read as read_file

T = TypeVar("T")

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
ALARMS_FILE = "alarms.jsonl"

# JSON allows these unescaped; terminals, `splitlines` and UTF-8 do not.
_UNSAFE = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


class Answer(TypedDict):
    """One answer to a prompt and its score (None: not scored)."""

    text: str
    score: float | None


@dataclass(frozen=True, slots=True)
class Record:
    """One line of metrics.jsonl. `step` counts from 1 (0: before the first update); `time` is Unix
    time in seconds."""

    stage: str
    step: int
    time: float
    values: Mapping[str, float]


def read_metrics(run_dir: Path | str) -> list[Record]:
    """Every record of the run in the order written; empty if nothing was logged yet.

    Args:
        run_dir: the run's folder, also while it runs.
    Returns:
        a record per logged step: its `stage`, `step`, `time` (Unix, in seconds), and `values` by
        metric name (docs/metrics.md).
    Raises:
        CheckpointError: if a line, other than a half-written last one, is not a record.
    """
    return read_lines(Path(run_dir) / METRICS_FILE, parse_record)


def parse_record(line: Mapping[str, Any]) -> Record:
    """The record in one decoded line; KeyError, TypeError or ValueError if it is not one."""
    # One text for each name, of which a long run's records hold millions.
    values = {sys.intern(str(name)): float(value) for name, value in dict(line["values"]).items()}
    return Record(str(line["stage"]), int(line["step"]), float(line["time"]), values)


def read_lines(
    path: Path, parse: Callable[[Mapping[str, Any]], T], skipped: list[str] | None = None
) -> list[T]:
    """`parse` of every line of a file, which may be missing or end in half a line.

    Args:
        parse: raises KeyError, TypeError or ValueError on a line that it rejects.
        skipped: if given, lines that cannot be read are skipped and named here.
    Raises:
        CheckpointError: if a line, other than half of a last one, cannot be read and `skipped` is
            None.
    """
    read, damaged = _read(path, parse)
    if damaged and skipped is None:
        raise CheckpointError(_not_a_line(path, *next(iter(damaged.items()))))
    if skipped is not None:
        skipped += [_not_a_line(path, number, text) for number, text in damaged.items()]
    return [line for _, line in read]


def cut_lines(
    path: Path,
    keep: Callable[[str, int], bool],
    parse: Callable[[Mapping[str, Any]], object] = dict,
) -> str:
    """Keep the lines whose (stage, step) `keep` accepts; drop a half-written last line. Atomic.

    Lines that `parse` rejects are moved to the end of `<name>.damaged` in the same folder.

    Returns:
        a message if there were any, else "".
    """
    if not path.exists():
        return ""

    def staged(line: Mapping[str, Any]) -> tuple[str, int]:
        parse(line)
        return str(line["stage"]), int(line["step"])

    read, damaged = _read(path, staged)
    aside = path.with_name(f"{path.name}.damaged")
    if damaged:
        append(aside, b"".join(text + b"\n" for text in damaged.values()))
    kept = b"".join(text + b"\n" for text, (stage, step) in read if keep(stage, step))
    if kept != read_file(path):
        replace(path, kept)
    if not damaged:
        return ""
    lines = ", ".join(map(str, list(damaged)[:3])) + (", ..." if len(damaged) > 3 else "")
    moved = f"{len(damaged)} damaged lines ({lines}) were moved to {aside.name}"
    return f"{path}: {moved}; the run continues"


def _read(
    path: Path, parse: Callable[[Mapping[str, Any]], T]
) -> tuple[list[tuple[bytes, T]], dict[int, bytes]]:
    """The lines of a file that `parse` accepts, each with what it made of it, and those that it
    rejects, by line number; half of a last line, without its end, is in neither."""
    raw = read_file(path).split(b"\n") if path.exists() else []
    read: list[tuple[bytes, T]] = []
    damaged: dict[int, bytes] = {}
    for number, text in enumerate(raw, start=1):
        if not text.strip():
            continue
        try:
            read.append((text, parse(json.loads(text.decode()))))
        except (ValueError, TypeError, KeyError, RecursionError):
            if number < len(raw):
                damaged[number] = text
    return read, damaged


def _not_a_line(path: Path, number: int, text: bytes) -> str:
    return (
        f"{path}:{number} must be one JSON object with a stage and a step; got "
        f"{text[:60].decode(errors='replace')!r}. Remove that line and run the command again."
    )


def json_line(line: Mapping[str, Any]) -> str:
    """One line of a file, newline included; safe for UTF-8 and for terminals."""
    text = json.dumps(_finite(line), ensure_ascii=False, allow_nan=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", text) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
