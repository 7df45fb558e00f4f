"""When Python looks for garbage: objects that only refer to each other."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 200_000
"""Python's own threshold is 700: it looks some 2,000 times while torch is imported or a data set is
read, at objects that nearly all stay."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Look for garbage after every 200,000 new objects, for imports and for reading rows; as seldom
    as before where that was more seldom, or never.

    A block or, as `@collected_seldom()`, a function. Not for steps: what garbage holds (tensors)
    can be large however few objects it is.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _OBJECTS:
        gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


_is_frozen = False


@contextmanager
def no_collection_of_old_objects() -> Iterator[None]:
    """Collect once, then keep the collector away from what exists now: libraries, models, rows.

    These hundreds of thousands of objects live as long as the stage, and every full collection
    would visit each of them. Objects made later are collected as usual. Blocks may be nested: an
    inner one collects what the outer one has left, and keeps nothing away, as it could not tell
    its own objects from the outer one's when it ends.
    """
    global _is_frozen
    gc.collect()
    if _is_frozen:
        yield
        return
    gc.freeze()
    _is_frozen = True
    try:
        yield
    finally:
        _is_frozen = False
        gc.unfreeze()


def leave_garbage() -> None:
    """For `atexit`: have Python end without looking for garbage in all that torch has made, which
    takes a second.

    Except where a library made with nanobind is loaded: as Python ends, it prints what is left of
    its types, as leaks. torch 2.15 loads Triton 3.9, which is one.
    """
    if any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type)):
        gc.unfreeze()
    else:
        gc.freeze()
