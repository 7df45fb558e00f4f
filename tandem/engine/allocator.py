"""Keep freed memory: on a CPU, allocating it again can take half of a training step."""

from __future__ import annotations

import ctypes
import sys

import torch

from tandem.generation.blocks import available_bytes, kept_bytes
from tandem.ops import native

# glibc's malloc.h. Blocks above the first size are mapped on every allocation and unmapped when
# freed; above the second, free memory at the heap's end is returned to the system.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def keep_freed_memory() -> bool:
    """Keep the memory of large freed tensors for later ones; returns whether that works here.

    A step of a model with a large vocabulary frees and allocates the same hundreds of megabytes
    over and over, and every page faults each time. The C++ operations replace torch's CPU allocator
    by one that keeps large blocks (`csrc/memory.cpp`) until `give_back_memory`; without them, or
    with a GPU, glibc keeps its own. Other systems are left alone.
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
    """Return kept, unused memory to the system."""
    if not torch.cuda.is_available() and native.available():
        torch.ops.tandem.give_back_memory()


def give_back_if_scarce(ranks: int = 1) -> None:
    """The same where it could be missed, between training and generation: where `ranks` processes
    that keep as much keep more than half of what is available to all.

    Each phase takes what the other has freed. New pages, cleared by the system, would cost up to a
    third of a training phase, and the peak is the same. But KV memory, half of what is free at
    most, may fit into nothing that is kept: then it leaves a quarter of what is available.
    """
    kept = kept_bytes(torch.device("cpu"))
    if 2 * ranks * kept > available_bytes():
        give_back_memory()
