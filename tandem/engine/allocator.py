"""Keeping freed memory: on a CPU, half of a training step can go into asking for it again."""

from __future__ import annotations

import ctypes
import sys

# glibc's malloc.h. Above the first size a block is mapped anew each time it is asked for, and
# given back when freed; above the second, free memory at the heap's end is given back.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def keep_freed_memory() -> bool:
    """Have glibc keep large freed blocks instead of unmapping them; returns whether it does.

    A step of a model with a large vocabulary frees and asks for the same hundreds of megabytes
    again and again, and every page of them then faults once more. On other C libraries nothing
    changes. Memory in use does not grow; memory held between peaks is not given back.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 2**30)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
