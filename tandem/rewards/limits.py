"""What a process may use, who it dies with, and which processes descend from it (Linux).

Elsewhere than on Linux the calls that the kernel lacks do nothing; `can_isolate` tells.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress
from functools import cache
from pathlib import Path

from tandem.process import lower_limit

_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000


@cache
def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


def _call(name: str, *arguments: int) -> bool:
    function = getattr(_libc(), name, None)
    return function is not None and function(*arguments) == 0


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1)


def isolate() -> bool:
    """Move this process's future children into a process namespace of their own, without network.

    The first child is the namespace's init: when it dies, everything in it dies.

    Returns:
        whether the kernel allowed it.
    """
    return _call("unshare", _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET)


@cache
def can_isolate() -> bool:
    """Whether `isolate` works on this machine; tried in a process that ends at once."""
    child = os.fork()
    if child == 0:
        os._exit(0 if isolate() else 1)
    return os.waitpid(child, 0)[1] == 0


def limit_memory(num_bytes: int) -> None:
    """Let this process map `num_bytes` more than it has mapped now; 0 sets no limit."""
    if num_bytes:
        lower_limit(resource.RLIMIT_AS, _mapped_bytes() + num_bytes)


def limit_cpu(seconds: float) -> None:
    """Let this process compute for `seconds` more, whoever watches it; then it is killed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 2
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def limit_program(*, memory_bytes: int, seconds: float, file_bytes: int, processes: int) -> None:
    """The limits of a program that is run for a test; they hold for all that it starts.

    Args:
        processes: of this user, where the user is not root (root is exempt in the kernel).
    """
    lower_limit(resource.RLIMIT_AS, memory_bytes)
    lower_limit(resource.RLIMIT_CPU, int(seconds) + 1)
    lower_limit(resource.RLIMIT_FSIZE, file_bytes)
    lower_limit(resource.RLIMIT_NOFILE, 64)
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_NPROC, processes)


def limit_processes(most: int) -> None:
    """Let this user start `most` more processes; the kernel does not hold root to it."""
    lower_limit(resource.RLIMIT_NPROC, num_running() + most)


def set_niceness(value: int) -> int:
    """Set this process's niceness where the user may; below 0 only root may. The one before."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, value)
    return before


def num_running() -> int:
    """Threads that run on this machine: a user's limit counts all of theirs."""
    try:
        return int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].split("/")[1])
    except (OSError, ValueError, IndexError):
        return 1000


def no_core_file() -> None:
    """Leave no core file when this process crashes."""
    lower_limit(resource.RLIMIT_CORE, 0)


def children_of(pid: int) -> list[int]:
    """The processes that `pid` started, or adopted, and that have not been reaped."""
    found: list[int] = []
    with suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii")
            found += map(int, text.split())
    return found


def num_descendants(pid: int, most: int) -> int:
    """How many processes descend from `pid`; counting stops above `most`."""
    seen: set[int] = set()
    waiting = [pid]
    while waiting and len(seen) <= most:
        new = [child for child in children_of(waiting.pop()) if child not in seen]
        seen.update(new)
        waiting += new
    return len(seen)


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads, all at once: no fork escapes it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _mapped_bytes() -> int:
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()
