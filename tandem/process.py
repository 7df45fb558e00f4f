"""This process: its memory, and the limits that the system holds it to.

Linux tells a process's memory in a file, macOS a command; macOS takes no limit on memory.
"""

from __future__ import annotations

import os
import resource
import subprocess
from contextlib import suppress
from pathlib import Path

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


def lower_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Lower one of `resource`'s limits, never past what is allowed; `hard` is `soft` if None.

    A system that does not take the limit leaves the process without it.
    """
    allowed = resource.getrlimit(kind)[1]
    wanted = [soft, soft if hard is None else hard]
    if allowed != resource.RLIM_INFINITY:
        wanted = [min(limit, allowed) for limit in wanted]
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (wanted[0], wanted[1]))
