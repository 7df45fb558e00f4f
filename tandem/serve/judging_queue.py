"""Finished answers that wait to be judged together."""

from __future__ import annotations

from collections.abc import Callable
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
    else runs who might still finish, or for `WAIT_STEPS` steps."""

    def __init__(self, enough_tokens: int) -> None:
        """`enough_tokens`: of prompts and answers; nobody waits once there are as many."""
        self._enough = enough_tokens
        self._waiting: list[Waiting] = []
        self._steps = 0  # since the first of them came

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: Waiting) -> None:
        """One more."""
        self._waiting.append(waiting)

    def step(self, *, is_idle: bool) -> None:
        """Judge those who wait, if it is time.

        Args:
            is_idle: no answer runs.
        """
        self._waiting = [one for one in self._waiting if one.is_wanted()]
        if not self._waiting:
            self._steps = 0
            return
        tokens = sum(len(one.judging.answered.token_ids) for one in self._waiting)
        self._steps += 1
        if not is_idle and tokens < self._enough and self._steps <= WAIT_STEPS:
            return
        due, self._waiting, self._steps = self._waiting, [], 0
        try:
            found = judge([one.judging for one in due])
        except Exception as error:  # of memory, say: these answers fail, and the server lives on
            for one in due:
                one.fail(error)
            return
        for one, numbers in zip(due, found, strict=True):
            one.deliver(numbers)
