"""The runs below a folder, and their files, kept in memory and reread only where they grew.

A run is found by looking, never by a name that a client sends: nothing outside the folder is read.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.metrics.answer_views import numbers
from tandem.metrics.answers import (
    ANSWER_FILES,
    ANSWERS_FILE,
    FOLLOWED_FILE,
    LINE_FILES,
    ROLLOUTS_FILE,
    ROWS_FILE,
)
from tandem.metrics.folder import EVALUATION_FILE, RunFolder, read_folder
from tandem.metrics.records import METRICS_FILE
from tandem.text import counted

_MARKS = ("config.yaml", METRICS_FILE)
_DEEPEST = 3
_MOST_RUNS = 1000
_MOST_LOOKED_AT = 20_000
_LONG = ("tokens", "logprobs", "ref_logprobs", "values", "rewards", "returns", "advantages")
"""Columns of rollouts.jsonl that are read again from the file when they are asked for."""
_DISTRIBUTED = ("reward", "length", "kl")
_FILES = (*LINE_FILES, "config.yaml", "command.txt", "data.json", ROWS_FILE, EVALUATION_FILE)

_REPORTED = tuple(name for name in _FILES if name not in ANSWER_FILES)
"""What `read_folder` reads."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A line of rollouts.jsonl without its per-token columns, and where the line is."""

    line: Mapping[str, Any]
    offset: int
    size: int


class GrowingLines:
    """A file of JSON lines, of which only what was appended is read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin((0, 0))

    def refresh(self) -> list[Answer]:
        """All lines that are whole objects; half-written and damaged ones are left out."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())  # not the path's, which another may have by now
                identity = (status.st_dev, status.st_ino)
                if identity != self._file or status.st_size < self._read:
                    self._begin(identity)
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._add(line)
        except OSError:
            self._begin((0, 0))
        return self.answers

    def whole(self, answer: Answer) -> Mapping[str, Any]:
        """The line with all columns; as kept in memory if the file has changed meanwhile."""
        try:
            with self.path.open("rb") as file:
                file.seek(answer.offset)
                line = json.loads(file.read(answer.size))
        except (OSError, ValueError):
            return answer.line
        same = isinstance(line, dict) and all(line.get(k) == v for k, v in answer.line.items())
        return line if same else answer.line

    def _begin(self, file: tuple[int, int]) -> None:
        """Know nothing yet of this file."""
        self.answers: list[Answer] = []
        self.damaged = 0
        """Lines that cannot be read."""
        self._read, self._file = 0, file

    def _add(self, line: bytes) -> None:
        offset, self._read = self._read, self._read + len(line)
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            kept = {name: value for name, value in found.items() if name not in _LONG}
            self.answers.append(Answer(kept, offset, len(line)))
        else:
            self.damaged += bool(line.strip())


class RunFiles:
    """One run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._rollouts = GrowingLines(path / ROLLOUTS_FILE)
        self._lines: dict[str, GrowingLines] = {}
        self._folder: tuple[str, RunFolder] | None = None
        self._spans: dict[tuple[str, str], tuple[float, float]] = {}
        self._spanned: tuple[list[Answer], int] = ([], 0)

    def version(self, names: tuple[str, ...] = _FILES) -> str:
        """Changes when one of the files does."""
        parts = []
        for name in names:
            try:
                status = (self.path / name).stat()
                parts.append(f"{status.st_mtime_ns:x}.{status.st_size:x}")
            except OSError:
                parts.append("")
        return "-".join(parts)

    def folder(self) -> RunFolder:
        """The run's files as the report reads them."""
        version = self.version(_REPORTED)
        with self._lock:
            if self._folder is None or self._folder[0] != version:
                self._folder = version, read_folder(self.path)
            return self._folder[1]

    def rollouts(self) -> list[Answer]:
        """The recorded answers, without their per-token columns."""
        with self._lock:
            return list(self._rollouts.refresh())

    def rollout(self, answer: Answer) -> Mapping[str, Any]:
        """A recorded answer with all columns."""
        return self._rollouts.whole(answer)

    def lines(self, name: str) -> list[Mapping[str, Any]]:
        """The objects of another file of lines."""
        with self._lock:
            return [answer.line for answer in self._grown(name).answers]

    def damaged(self) -> list[str]:
        """What to say of lines that are left out because they cannot be read."""
        said = []
        for name in (ANSWERS_FILE, FOLLOWED_FILE):  # as in the report
            with self._lock:
                number = self._grown(name).damaged
            if number:
                are = "is" if number == 1 else "are"
                said.append(f"{name}: {counted(number, 'line')} cannot be read and {are} left out")
        return said

    def span(self, stage: str, name: str) -> tuple[float, float] | None:
        """The lowest and highest number that answers.jsonl has of a stage; None without one."""
        with self._lock:
            found, done = self._grown(ANSWERS_FILE).answers, self._spanned[1]
            if found is not self._spanned[0]:  # the file was replaced
                self._spans, done = {}, 0
            for answer in found[done:]:
                for column in _DISTRIBUTED:
                    values = [x for x in numbers(answer.line.get(column)) if math.isfinite(x)]
                    if values:
                        key = (str(answer.line.get("stage")), column)
                        low, high = self._spans.get(key, (values[0], values[0]))
                        self._spans[key] = min(low, *values), max(high, *values)
            self._spanned = found, len(found)
            return self._spans.get((stage, name))

    def _grown(self, name: str) -> GrowingLines:
        """Another file of lines as it is now; within the lock."""
        lines = self._lines.setdefault(name, GrowingLines(self.path / name))
        lines.refresh()
        return lines

    def json(self, name: str) -> Mapping[str, Any]:
        """One of the run's JSON files; empty if it is missing or cannot be read."""
        try:
            found = json.loads((self.path / name).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def checkpoints(self, stage: str) -> list[int]:
        """The steps of a stage's checkpoints that are on disk."""
        folders = (self.path / "checkpoints" / stage).glob("step-*")
        found = (re.fullmatch(r"step-(\d+)", folder.name) for folder in folders)
        return sorted(int(match[1]) for match in found if match)


class Runs:
    """The runs in a folder, which may be one itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._known: dict[Path, RunFiles] = {}

    def all(self) -> dict[str, RunFiles]:
        """Every run by its id: its path below the folder with ~ for /, or the folder's name."""
        with self._lock:
            found = {}
            for path in self._found():
                inside = path.relative_to(self.folder).as_posix()
                name = self.folder.resolve().name if inside == "." else inside.replace("/", "~")
                found[name or "run"] = self._known.setdefault(path, RunFiles(path))
            return dict(sorted(found.items()))

    def _found(self) -> Iterator[Path]:
        """Run folders, outermost first; links and hidden folders are not followed."""
        level, found, looked_at = [self.folder], 0, 0
        for _ in range(_DEEPEST + 1):
            below: list[Path] = []
            for path in level:
                if any((path / mark).is_file() for mark in _MARKS):
                    yield path
                    found += 1
                    if found == _MOST_RUNS:
                        return
                    continue
                try:
                    entries = sorted(path.iterdir())
                except OSError:
                    continue
                looked_at += len(entries)
                if looked_at > _MOST_LOOKED_AT:
                    return
                below += [
                    entry
                    for entry in entries
                    if not entry.name.startswith(".") and not entry.is_symlink() and entry.is_dir()
                ]
            level = below
