"""The file of `tandem sample`, written a few prompts at a time and continued after a kill.

    answers.jsonl        the rows
    answers.jsonl.made   JSON: what they are made from, how many prompts are done, and how many
                         bytes of the file hold their rows

Rows are appended and synced first; then the second file is replaced. Bytes beyond those that it
counts are of an interrupted write and are removed before the next one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tandem.errors import CheckpointError
from tandem.files import lock, named, remove_left, sync, way_out, write_all
from tandem.files import replace as replace_file
from tandem.text import visible
from tandem.training.differences import difference


@dataclass
class Progress:
    """How far a file is, and what was counted on the way.

    prompts, bytes: done, and the size of their rows. left: prompts without a row, by reason.
    answers, tokens, cut_off, blank, unscored: answers in all, their tokens, those that the length
    limit cut off, that are blank, that have no reward though there is one to give.
    rewards, among, best: sums over the scored answers, over the num_among that may be chosen, and
    over the best of those of each of num_best prompts.
    longest: most tokens of a prompt with an answer. seconds: of generation.
    """

    prompts: int = 0
    bytes: int = 0
    rows: int = 0
    answers: int = 0
    tokens: int = 0
    cut_off: int = 0
    blank: int = 0
    unscored: int = 0
    scored: int = 0
    rewards: float = 0.0
    num_among: int = 0
    among: float = 0.0
    num_best: int = 0
    best: float = 0.0
    longest: int = 0
    seconds: float = 0.0
    left: dict[str, int] = field(default_factory=dict)

    def leave(self, reason: str) -> None:
        """A prompt has no row."""
        self.left[reason] = self.left.get(reason, 0) + 1


class SampleFile:
    """A file that is being written; a context manager, which holds a lock on it.

    Attributes:
        progress: what is in it; `add` saves its numbers.
    """

    def __init__(self, path: Path, made_from: Mapping[str, Any], *, num_prompts: int) -> None:
        """
        Args:
            made_from: all that the rows depend on, as JSON has it.
            num_prompts: how many there are in all.
        """
        self.path = path
        self.progress = Progress()
        self._made_from = json.loads(json.dumps(made_from))
        self._num_prompts = num_prompts
        self._file: BinaryIO | None = None

    @property
    def beside(self) -> Path:
        """The file that says what the rows are made from."""
        return self.path.with_name(f"{self.path.name}.made")

    def open(self) -> None:
        """Take up the file where it was left, or begin it.

        Raises:
            CheckpointError: it is not of this command, was made from something else, was changed,
                or another process is writing it; or the disk refuses.
        """
        try:
            self._open()
        except OSError as error:
            raise self._unwritable(error) from None

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not self.path.is_file():
            raise CheckpointError(f"{self._shown} must be a plain file; got something else.")
        if not self.path.exists():  # it was removed, to be made anew
            self.beside.unlink(missing_ok=True)
        with named(self.path):
            self._file = lock(self.path)
        if self._file is None:
            raise CheckpointError(
                f"{self._shown} must be written by one tandem sample at a time; got another that "
                "is running. Wait until it ends, or give another --output."
            )
        remove_left(self.path.parent, (self.beside.suffix,), self.beside.name)
        if self.beside.exists() or self.path.stat().st_size:
            self.progress = self._known()
        else:
            self._save()
            sync(self.path.parent)
        if not self.is_finished:
            os.ftruncate(self._file.fileno(), self.progress.bytes)

    @property
    def is_finished(self) -> bool:
        """Whether every prompt is done."""
        return self.progress.prompts >= self._num_prompts

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows; the progress so far, with them, is on disk when this returns.

        Raises:
            CheckpointError: the disk refuses; the rows before these are kept.
        """
        assert self._file is not None
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        content = "".join(lines).encode()
        try:
            if content:
                write_all(self._file, memoryview(content))
                with named(self.path):
                    os.fsync(self._file.fileno())
            self.progress.rows += len(rows)
            self.progress.bytes += len(content)
            self._save()
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Release the file; where nothing was answered, remove it."""
        if self._file is None:
            return
        if self.progress.prompts == 0 and self.path.is_file() and not self.path.stat().st_size:
            self.beside.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
        self._file.close()
        self._file = None

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._shown} must be a file that can be written; got: {error.strerror or error}. "
            f"{way_out(error)} or give another --output; what is written is kept."
        )

    def _save(self) -> None:
        record = {"made_from": self._made_from, "progress": asdict(self.progress)}
        replace_file(self.beside, json.dumps(record, indent=1, ensure_ascii=False).encode())

    @property
    def _shown(self) -> str:
        return visible(str(self.path))

    def _known(self) -> Progress:
        """How far the file is, once it is found to be this command's."""
        advice = "Remove it, or give another --output."
        try:
            record = json.loads(self.beside.read_text(encoding="utf-8"))
            made_from, progress = dict(record["made_from"]), Progress(**record["progress"])
        except FileNotFoundError:
            raise CheckpointError(
                f"{self._shown} must be a new file or one that tandem sample has begun; got one "
                f"without {visible(self.beside.name)} beside it. {advice}"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(
                f"{visible(str(self.beside))} must be what tandem sample wrote; got something "
                f"else. Remove it and {visible(self.path.name)}, or give another --output."
            ) from None
        if progress.prompts == 0:  # a model or function could not be loaded, say
            return Progress()
        changed = [
            difference(name, made_from.get(name), self._made_from.get(name))
            for name in sorted(made_from.keys() | self._made_from.keys())
            if made_from.get(name) != self._made_from.get(name)
        ]
        if changed and progress.rows == 0:  # there is nothing to lose
            return Progress()
        if changed:
            raise CheckpointError(
                f"{self._shown} was made with other settings, rows or models than these; changed: "
                f"{', '.join(changed)}. To make it anew remove it, or give another --output."
            )
        size = self.path.stat().st_size
        whole = progress.prompts >= self._num_prompts
        if size < progress.bytes or (whole and size != progress.bytes):
            raise CheckpointError(
                f"{self._shown} must be as tandem sample left it, {progress.bytes:,} bytes; got "
                f"{size:,}. {advice}"
            )
        return progress
