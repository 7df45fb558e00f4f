"""Environments that runs in tests load by name."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Turns = Sequence[Mapping[str, str]]


def num_answers(messages: Turns) -> int:
    return sum(turn["role"] == "assistant" for turn in messages)


def thrice(messages: Turns, **columns: Any) -> str | None:
    """Says how long the answer was; over after the third."""
    if num_answers(messages) == 3:
        return None
    return f"{len(messages[-1]['content'])} letters."


def on_and_on(messages: Turns, **columns: Any) -> str:
    return "go on"


def breaks(messages: Turns, **columns: Any) -> str:
    """Fails at the second answer."""
    if num_answers(messages) == 2:
        raise ValueError("a broken tool")
    return "go on"


def of_a_tool(messages: Turns, **columns: Any) -> list[dict[str, str]]:
    return [{"role": "tool", "content": "42"}]


async def later(messages: Turns, answer: str, *, word: str = "on") -> str | None:
    return None if answer in messages[-1]["content"] else f"{word} to {answer}"


def slow(messages: Turns, **columns: Any) -> str:
    time.sleep(60)
    return "late"


def talking(messages: Turns, **columns: Any) -> None:
    print("one\ntwo\nthree\nfour\nfive")


def wants(messages: Turns, price: float, **columns: Any) -> None:
    return None


def halves(messages: Turns, answer: str, **columns: Any) -> str | None:
    """Fails on the rows whose answer is bad."""
    if answer == "bad":
        raise ValueError("a broken tool")
    return "go on"


def meeting(messages: Turns, place: str, waits: bool, **columns: Any) -> str | None:
    """One conversation waits until another has come to its second answer."""
    met = Path(place)
    if waits:
        until = time.monotonic() + 60
        while not met.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return None
    if num_answers(messages) == 2:
        met.write_text("here", encoding="utf-8")
        return None
    return "go on"


def drawn(messages: Turns, **columns: Any) -> str:
    return str(random.random())


def halved(messages: Turns, **columns: Any) -> str:
    return "half a pair: \ud800"
