"""This process: its memory, its limits, the processes it forks, and whom it ends with.

Linux tells a process's memory in a file, macOS a command; macOS takes no limit on memory.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tandem.stopping import STOPPING, holding_back, let_through

LAUNCHER = "TANDEM_LAUNCHER"
"""Names the process id of the launcher of several ranks, in their environment."""
_PR_SET_PDEATHSIG = 1
_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Resident bytes of this process now; 0 where the system does not say."""
    try:
        return int(_STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return _told_by_ps()


def _told_by_ps() -> int:
    command = ["ps", "-o", "rss=", "-p", str(os.getpid())]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return int(told) * 1024
    except (OSError, ValueError):
        return 0


def trim_heap() -> None:
    """Return what the C library's heap holds of freed memory to the system, where it can: glibc
    keeps blocks of megabytes once it has seen such blocks freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def lower_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Lower one of `resource`'s limits, never past what is allowed; `hard` is `soft` if None.

    Where less is allowed, the soft limit stays as far below the hard one. A system that does not
    take the limit leaves the process without it.
    """
    margin = 0 if hard is None else hard - soft
    now, allowed = resource.getrlimit(kind)
    limit = soft + margin
    if allowed != resource.RLIM_INFINITY:
        limit = min(limit, allowed)
    soft = max(0, limit - margin)
    if now != resource.RLIM_INFINITY:
        soft = min(soft, now)
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (soft, limit))


def is_launched() -> bool:
    """Whether our launcher started this process, rather than one of its ranks."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def fork(work: Callable[[], object]) -> int:
    """Have a forked process do `work` and end, whether or not that raises; its id.

    The stopping signals end it at once, and reach neither process before it is ready for them. Hold
    them back outside as well (`stopping.holding_back`) until the id is where it will be waited for.

    Raises:
        OSError: the system gives no process.
    """
    with holding_back(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        process = os.fork()
        if process == 0:
            try:
                for number in STOPPING:
                    signal.signal(number, signal.SIG_DFL)
                let_through()
                work()
            finally:
                os._exit(0)
    return process


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends; Linux alone.

    Args:
        parent: that process's id; if it is gone already, this one ends here.
    """
    with suppress(OSError, AttributeError):  # a system without the call
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)
