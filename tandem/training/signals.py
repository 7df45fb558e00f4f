"""Signals that ask a run to stop: the first lets the running step finish, the second does not."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from tandem.errors import Stopped
from tandem.process import is_launched
from tandem.stopping import handling, note_stop, put_off


class _Lasting(io.RawIOBase):
    """A descriptor that takes everything, also when its reader has gone."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, content: Any) -> int:
        try:
            return os.write(self._descriptor, content)
        except OSError:
            return len(content)


def outlive_readers() -> None:
    """From now on what is printed to a terminal or pipe that is gone is lost, and no error: a run
    whose terminal was closed must save its step."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            stream.flush()
            lasting = io.BufferedWriter(_Lasting(stream.fileno()))
            # By the line, so that what is said here and there comes out in order.
            text = io.TextIOWrapper(lasting, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, text)


class StopSignals:
    """Within: the first stopping signal is kept for the next `requested`, a second ends at once.

    Not one of several ranks: to these the launcher passes its own on, which may have come to all
    processes of the job; at its second it ends them itself.

    Where nothing is worth finishing (`deferring` is false: models load, rows are read) the first
    one ends the run too, by `Stopped`. On a thread that is not the main one nothing is installed.
    """

    def __init__(self, print_line: Callable[[str], None], finishes: str = "this step") -> None:
        """`print_line` shows a line to the user; `finishes`: what the first signal waits for."""
        self.requested = 0
        self.deferring = False
        self._print_line = print_line
        self._finishes = finishes
        self._handling = handling(self._take)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.__exit__(None, None, None)
        note_stop(0)

    def _take(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested and is_launched():
            return
        if self.requested:
            with suppress(RuntimeError):  # it came in the middle of printing
                self._print_line(f"{name} again: stopped at once. What was saved before is kept.")
            # Not through handlers and threads, which might wait for something.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.deferring and put_off(number, frame):
            return
        self.requested = number
        note_stop(number)
        if not self.deferring:
            # Should it get lost where Python ignores exceptions, the next step's end still asks.
            raise Stopped(number, "before a step was running")
        with suppress(RuntimeError):
            self._print_line(
                f"{name}: the run stops after {self._finishes}, saved. A second signal stops it "
                "at once."
            )
