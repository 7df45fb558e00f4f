"""The signals that ask a process to stop, and who hears them for a while."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
)
"""Ctrl-C, a scheduler's or a shell's end, a lost terminal, and what SLURM is asked to send before
it takes a job off (`--signal=B:USR1@120`)."""


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have the stopping signals go to `handler`; the earlier handlers return after.

    One that is ignored (SIGHUP under nohup) stays so, and nothing is changed on a thread that is
    not the main one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    heeded = [n for n in STOPPING if is_main and signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def holding_back() -> Iterator[None]:
    """Stopping signals wait until the end of this; in a process started within, until it calls
    `let_through`. So none comes while Python starts, which would be a traceback or no word at all.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """Hear the stopping signals that the process which started this one held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
