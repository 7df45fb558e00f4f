"""A cache of what is made of texts, which long ones pass by: it lives as long as a server, to which
anyone may send megabytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

from tandem.message import Message

T = TypeVar("T")
MOST_LETTERS = 1 << 17
"""In the arguments of a call whose result is kept."""


def short_cache(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """As `lru_cache`, of calls with few letters in their arguments."""

    def cached(function: Callable[..., T]) -> Callable[..., T]:
        kept = lru_cache(maxsize)(function)

        @wraps(function)
        def called(*args: Any) -> T:
            return kept(*args) if _letters(args) <= MOST_LETTERS else function(*args)

        return called

    return cached


def _letters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, tuple):
        return sum(map(_letters, value))
    if isinstance(value, Message):
        return sum(map(len, (value.content, value.tool_calls, value.tool_call_id, value.name,
                             value.thoughts)))  # fmt: skip
    return 0
