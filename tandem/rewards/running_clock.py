"""A clock that stands still while its process does: for the deadlines of reward functions."""

from __future__ import annotations

import time

SLICE = 0.25
"""The longest wait between two readings, in seconds."""
_GAP = 1.0
"""Seconds between two readings after which the process must have been stopped."""


class RunningClock:
    """Seconds for which this process has run.

    A stopped process (SIGSTOP, a job that SLURM suspends, a paused container) does not see its
    workers' answers, and they are stopped with it: a deadline must not pass meanwhile, or their
    answers would lack a score. Read it every `SLICE` seconds while you wait; a longer gap than
    those of a busy machine counts as one slice.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._last = time.monotonic()

    def __call__(self) -> float:
        """The seconds since it was made, without those in which the process was stopped."""
        now = time.monotonic()
        passed, self._last = now - self._last, now
        self._seconds += passed if passed < _GAP else SLICE
        return self._seconds
