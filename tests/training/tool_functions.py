"""Tools that tests name by file."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second one.
    """
    return a + b


def look_up(word: str, *, prices: dict[str, float], messages: Any, unit: str = "EUR") -> Any:
    """Looks a price up.

    Args:
        word: What is bought.
    """
    assert messages[-1]["role"] == "assistant"
    print("looked up", word)
    return {"price": prices[word], "unit": unit, "turn": len(messages)}


async def later(word: str) -> str:
    """Says a word, later.

    Args:
        word: The word.
    """
    await asyncio.sleep(0)
    return word


def slow(seconds: float) -> None:
    """Sleeps.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)


def ends() -> None:
    """Ends its process."""
    os._exit(3)


def forks() -> str:
    """Returns in two processes."""
    return "mine" if os.fork() else "the other's"


def undescribed(a, b):  # type: ignore[no-untyped-def]
    return a


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    """Says something.

    Args:
        a: Something.
    """
    return int(a)


def num_calls(completions: list[str], new_messages: Any, **columns: object) -> list[float]:
    """Calls that a conversation made."""
    return [float(sum(len(turn.get("tool_calls", ())) for turn in turns)) for turns in new_messages]


num_calls.checks_answer = False  # type: ignore[attr-defined]
