"""Finished answers that wait to be judged together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.serve.judging import Judging, judge

WAIT_STEPS = 8
"""Most decoding steps that an answer waits for others to be judged with. The text has been sent by
then, and an answer has tens of steps or hundreds."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An answer to be judged.

    is_wanted: whether anybody still waits for it. deliver: takes the numbers. fail: takes the error
    of a judge that could not compute.
    """

    judging: Judging
    is_wanted: Callable[[], bool]
    deliver: Callable[[dict[str, Any]], None]
    fail: Callable[[Exception], None]


class JudgingQueue:
    """Answers wait until as many tokens have come as make a forward worth its cost, until nobody
    else runs who might still finish, or for `WAIT_STEPS` steps. Beside running answers a step
    judges at most a quarter of those tokens, or one answer, so that no text stands still for all.
    """

    def __init__(self, enough_tokens: int) -> None:
        """`enough_tokens`: of prompts and answers; nobody waits once there are as many."""
        self._enough = enough_tokens
        self._waiting: list[Waiting] = []
        self._due: list[Waiting] = []  # whose wait is over
        self._steps = 0  # since the first of the waiting came

    def __len__(self) -> int:
        return len(self._waiting) + len(self._due)

    def add(self, waiting: Waiting) -> None:
        """One more."""
        self._waiting.append(waiting)

    def step(self, *, is_idle: bool) -> None:
        """Judge some of those who wait, if it is time.

        Args:
            is_idle: no answer runs.
        """
        self._waiting = [one for one in self._waiting if one.is_wanted()]
        self._due = [one for one in self._due if one.is_wanted()]
        self._steps = self._steps + 1 if self._waiting else 0
        tokens = sum(map(_tokens, self._waiting))
        if is_idle or tokens >= self._enough or self._steps > WAIT_STEPS:
            self._due += self._waiting
            self._waiting, self._steps = [], 0
        now, room = 0, self._enough if is_idle else self._enough // 4
        for one in self._due:
            room -= _tokens(one)
            if now and room < 0:
                break
            now += 1
        judged, self._due = self._due[:now], self._due[now:]
        _judge(judged)


def _tokens(one: Waiting) -> int:
    return len(one.judging.answered.token_ids)


def _judge(waiting: Sequence[Waiting]) -> None:
    """Judge answers together; where that fails (for memory, say), each alone, so that only those
    fail that cannot be judged. The server lives on."""
    if not waiting:
        return
    try:
        found = judge([one.judging for one in waiting])
    except Exception as error:
        if len(waiting) == 1:
            waiting[0].fail(error)
            return
        for one in waiting:
            _judge([one])
        return
    for one, numbers in zip(waiting, found, strict=True):
        one.deliver(numbers)
