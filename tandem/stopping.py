"""The signals that ask a process to stop, and temporary handlers for them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
)
"""Ctrl-C, termination, a lost terminal, and the signal that SLURM can send before it ends a job
(`--signal=B:USR1@120`)."""


_asked = 0


def note_stop(number: int) -> None:
    """Keep for `stop_asked` that this signal came; 0: none."""
    global _asked
    _asked = number


def stop_asked() -> int:
    """The signal after which what is running may be finished; 0 for none.

    Signals are the process's own, so one number is enough for all that is in it. A wait for
    something that may never come must end then.
    """
    return _asked


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], None], signals: Sequence[signal.Signals] = STOPPING
) -> Iterator[None]:
    """Send the stopping signals, or those given, to `handler` in this block.

    Ignored signals (SIGHUP under nohup) stay ignored. Does nothing outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    heeded = [n for n in signals if is_main and signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def put_off(number: int, frame: FrameType | None) -> bool:
    """Whether Python would print an exception that is raised here, and go on: in a finalizer. Then
    the signal comes again in a moment."""
    if frame is None:
        return False
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if not file.endswith(("weakref.py", "_bootstrap>")) and name != "__del__":
        return False
    threading.Timer(0.02, os.kill, (os.getpid(), number)).start()
    return True


@contextmanager
def deferring() -> Iterator[None]:
    """A stopping signal that comes in this block comes when it has ended.

    To block it (`holding_back`) would not do where there are other threads: the system gives it to
    one of them, and Python has the main one handle it.
    """
    came: list[int] = []
    with handling(lambda number, frame: came.append(number)):
        yield
    if came:
        signal.raise_signal(came[0])


@contextmanager
def leaving_at_ctrl_c() -> Iterator[None]:
    """Within: Ctrl-C ends the process at once with one line, however often it comes.

    For a command that has nothing to save: an exception inside an import, a load or the exit may
    print a traceback of its own.
    """
    leaves = False

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal leaves
        if leaves:  # this one came while the first was being told
            return
        leaves = True
        with suppress(OSError, RuntimeError):  # it may have interrupted a print
            sys.stdout.flush()
        with suppress(OSError):
            os.write(2, b"tandem: stopped.\n")
        os._exit(128 + number)

    with handling(leave, (signal.SIGINT,)):
        yield


@contextmanager
def holding_back() -> Iterator[None]:
    """Block the stopping signals in this block, and in a process started inside it until that calls
    `let_through`: while Python starts, they would print a traceback or nothing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """Unblock the stopping signals that the parent process blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
