"""Keeping freed memory: on a CPU, half of a training step can go into asking for it again."""

from __future__ import annotations

import ctypes
import sys

import torch

from tandem.ops import native

# glibc's malloc.h. Above the first size a block is mapped anew each time it is asked for, and
# given back when freed; above the second, free memory at the heap's end is given back.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def keep_freed_memory() -> bool:
    """Keep large freed tensors' memory for the next ones; returns whether that is so.

    A step of a model with a large vocabulary frees and asks for the same hundreds of megabytes
    again and again, and every page of them then faults once more. With the C++ operations torch's
    CPU allocator is exchanged for one that keeps large blocks together (`csrc/memory.cpp`) until
    `give_back_memory`; without them, or beside a GPU, glibc is told to keep its own. On other
    systems nothing changes. What exists already stays where it is.
    """
    if (
        not torch.cuda.is_available()
        and native.available()
        and torch.ops.tandem.keep_freed_memory()
    ):
        return True
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 2**30)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def give_back_memory() -> None:
    """Hand what is kept and unused to the system: for between two modes of work."""
    if not torch.cuda.is_available() and native.available():
        torch.ops.tandem.give_back_memory()
