"""The run folder's records of answers: answers.jsonl, rollouts.jsonl and followed.jsonl.

All lines begin with stage, step and `every`. A file that outgrows its limit keeps every second of
its recorded steps, and from then on records only those, so that what is left covers the whole
training. docs/page.md names the fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.files import append, read, replace
from tandem.metrics.records import ALARMS_FILE, METRICS_FILE, SAMPLES_FILE, json_line

ANSWERS_FILE = "answers.jsonl"
"""One line per step: the reward, length, KL and end of every answer, and all advantages."""
ROLLOUTS_FILE = "rollouts.jsonl"
"""One line per recorded answer, token by token."""
FOLLOWED_FILE = "followed.jsonl"
"""One line per held-out prompt and evaluation: the same prompts over the whole stage."""
ROWS_FILE = "data_rows.json"
"""A few rows of the training data, token by token, with what is learned."""
ANSWER_FILES = (ANSWERS_FILE, ROLLOUTS_FILE, FOLLOWED_FILE)
LINE_FILES = (METRICS_FILE, SAMPLES_FILE, ALARMS_FILE, *ANSWER_FILES)
"""Every file of lines that a stage appends to; a continued stage cuts them."""

_HEAD = re.compile(rb'\{"stage": "([^"]+)", "step": (\d+), "every": (\d+)')


class AnswerLines:
    """One stage's lines of one file, of at most about `limit` bytes, or of one step.

    What it knows it reads from the file, so that a continued run goes on as if never stopped.
    """

    def __init__(self, path: Path, stage: str, limit: int, every: int = 1) -> None:
        """`every`: where the file has no lines of the stage, as `recorded_every`."""
        self.path = path
        self._stage = stage
        self._limit = limit
        own = [line for line in _lines(path) if _head(line)[0] == stage]
        self._size = sum(map(len, own))
        self.every = _head(own[-1])[2] if own else every
        """Steps that are multiples of it are recorded."""

    def is_due(self, step: int) -> bool:
        """Whether a step's lines are to be written."""
        return self._limit > 0 and step % self.every == 0

    def write(self, step: int, lines: Sequence[Mapping[str, Any]]) -> str:
        """Append a step's lines in one write; returns a notice if older steps had to go."""
        head = {"stage": self._stage, "step": step, "every": self.every}
        content = "".join(json_line({**head, **line}) for line in lines).encode()
        append(self.path, content)
        self._size += len(content)
        return self._thin() if self._size > self._limit else ""

    def _thin(self) -> str:
        """Keep every second recorded step, until the lines fill half of the limit or are of one
        step: without any, a continued run would not know `every`."""
        kept, before = _lines(self.path), self.every
        while self._size > self._limit // 2 and len(self._steps(kept)) > 1:
            self.every *= 2
            kept = [line for line in kept if self._keeps(*_head(line)[:2])]
            self._size = sum(len(line) for line in kept if _head(line)[0] == self._stage)
        if self.every == before:
            return ""
        head = rb'{"stage": "%s", "step": \2, "every": %d' % (self._stage.encode(), self.every)
        replace(
            self.path,
            b"".join(
                _HEAD.sub(head, line, count=1) if _head(line)[0] == self._stage else line
                for line in kept
            ),
        )
        return (
            f"{self.path.name} has reached log.record_bytes ({self._limit}): it keeps every "
            f"{self.every}th step instead of every {before}th"
        )

    def _steps(self, lines: Sequence[bytes]) -> set[int]:
        return {step for stage, step, _ in map(_head, lines) if stage == self._stage}

    def _keeps(self, stage: str, step: int) -> bool:
        return stage != self._stage or step % self.every == 0


def recorded_every(path: Path, stage: str) -> int:
    """Which steps of a stage a file records (multiples of it), by its last line of the stage; 1 if
    it has none. A continued stage asks before its later lines are cut, which may be all it has."""
    own = [head for head in map(_head, _lines(path)) if head[0] == stage]
    return own[-1][2] if own else 1


def _lines(path: Path) -> list[bytes]:
    return read(path).splitlines(keepends=True) if path.exists() else []


def _head(line: bytes) -> tuple[str, int, int]:
    """Stage, step and `every` of a line; an empty stage if it has none."""
    found = _HEAD.match(line)
    return (found[1].decode(), int(found[2]), int(found[3])) if found else ("", 0, 1)
