"""Signals that ask a run to stop: the first lets the running step finish, the second does not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from tandem.errors import Stopped

STOPPING = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
)
"""Ctrl-C, a scheduler's or a shell's end, a lost terminal, and what SLURM is asked to send before
it takes a job off (`--signal=B:USR1@120`)."""


class StopSignals:
    """Within: the first stopping signal is kept for the next `requested`, a second ends at once.

    Where nothing is worth finishing (`deferring` is false: models load, rows are read) the first
    one ends the run too, by `Stopped`. On a thread that is not the main one nothing is installed.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` shows a line to the user."""
        self.requested = 0
        self.deferring = False
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:  # ignored under nohup: that stays
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested:
            self._say(f"{name} again: ended at once. The last checkpoint is whole.")
            # Not through handlers and threads, which might wait for something.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = number
        if not self.deferring:
            # Should it get lost where Python ignores exceptions, the next step's end still asks.
            raise Stopped(number, "before a step was running")
        self._say(f"{name}: the run stops after this step, saved. Once more ends it at once.")
