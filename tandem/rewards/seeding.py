"""Random numbers of users' functions, which follow from the answers that they are called on."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def seeded(completions: Sequence[str]) -> Iterator[None]:
    """Within: Python's and NumPy's random numbers follow from these answers, as in a worker;
    afterwards they go on as before."""
    numpy = sys.modules.get("numpy")
    state = random.getstate()
    other = numpy.random.get_state() if numpy else None
    seed_by(completions)
    try:
        yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(other)


def seed_by(completions: Sequence[str]) -> None:
    """The same random numbers for the same answers, whichever process scores them."""
    seed = zlib.crc32("\0".join(completions).encode("utf-8", "replace"))
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
