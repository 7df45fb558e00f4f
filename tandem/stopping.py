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
