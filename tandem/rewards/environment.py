"""Environments: functions of the user's that say what a conversation's last answer hears back.

    def environment(messages, answer, **columns):
        return None if messages[-1]["content"] == answer else "Try again."

It is called once per answer, with all turns so far as role and content dicts, the policy's last
one at the end, and the columns of the data's row. It returns the next turn: a text (the user's), a
dict of role and content or several of them in a list (a tool's); or None, and the conversation is
over. What it knows of a conversation is what it is given: nothing has to be kept between calls, in
whichever process they are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.config.scoring import ScoringConfig
from tandem.named_functions import named_function
from tandem.processor import num_cores
from tandem.rewards.binding import parameters_of
from tandem.rewards.calling import Call, Outcome
from tandem.rewards.columns import columns_of
from tandem.rewards.hearing import NAMED, EnvironmentCall, EnvironmentFunction
from tandem.rewards.pool import PoolLimits, WorkerPool, cannot_fork
from tandem.text import visible

_MOST_WORKERS = 16
_LINES_PRINTED = 3


@dataclass(frozen=True, slots=True)
class Said:
    """What an environment is asked about: all turns so far as role and content, the policy's last;
    the columns of the data's row, and where that came from."""

    messages: list[dict[str, str]]
    row: Mapping[str, Any]
    source: str


class Environment:
    """A run's environment, ready to answer.

    A function that is named runs in worker processes that import it, one that is given itself in
    processes forked from this one, with the limits that `scoring` sets for reward functions; one
    with the attribute `in_process` runs here.

    Attributes:
        label: its name in messages.
    """

    def __init__(
        self,
        function: EnvironmentFunction | str,
        config: ScoringConfig | None = None,
        *,
        columns: Iterable[str] = (),
        knob: str = "environment",
    ) -> None:
        """
        Args:
            function: itself, or its name as `file.py:function?option=value`.
            columns: those of all rows that are to come, so that a row without one gives None.
            knob: its name in errors.
        Raises:
            ConfigError: a name leads nowhere.
        """
        self.config = config or ScoringConfig()
        found = named_function(function, knob) if isinstance(function, str) else function
        self.label = function if isinstance(function, str) else _name(function)
        self._function, self._call = found, EnvironmentCall(found)
        self._columns = sorted(set(columns))
        self._printed: list[str] = []
        is_here = getattr(found, "in_process", False)
        self._pool = None
        if not (is_here or (not isinstance(function, str) and cannot_fork())):
            limits = PoolLimits(
                seconds=self.config.deadline_seconds,
                workers=self.config.workers or min(_MOST_WORKERS, num_cores()),
                memory_bytes=int(self.config.memory_gb * 2**30),
            )
            target = function if isinstance(function, str) else self._call
            self._pool = WorkerPool(target, limits, self._printed.append, what="environment")

    @property
    def waits_in_thread(self) -> bool:
        """Whether it answers in processes of its own, so that a thread can wait for it."""
        return self._pool is not None

    def problem(self, columns: Iterable[str]) -> str:
        """What keeps the function from being called with these columns, or ""."""
        parameters = parameters_of(self._function)
        known = {"messages", *columns}
        missing = [
            p.name
            for i, p in enumerate(parameters or [])
            if i and p.default is p.empty and p.kind in NAMED and p.name not in known
        ]
        if not missing:
            return ""
        listed = ", ".join(sorted(set(columns))) or "none"
        return (
            f"environment {self.label} must take messages and the data's columns ({listed}); its "
            f"parameter {missing[0]} is none of them. Give it a default, or change its name"
        )

    def replies(self, said: Sequence[Said]) -> list[Outcome]:
        """What each of these conversations hears."""
        rows = [one.row for one in said]
        columns = columns_of(rows, self.config.answer_column, self._columns)
        answers = [one.messages[-1]["content"] for one in said]
        call = Call(
            [""] * len(said), answers, {**columns, "messages": [one.messages for one in said]}
        )
        if self._pool is None:
            return self._call.outcomes(call)
        return [outcome for found in self._pool.run(call.each()) for outcome in found]

    def close(self) -> None:
        """End the worker processes; they start again when they are needed."""
        if self._pool is not None:
            self._pool.close()

    def told(self, failures: Sequence[tuple[str, Outcome]], num_asked: int) -> list[str]:
        """Lines on what it printed and failed on since the last time.

        Args:
            failures: where each row came from that it failed on, and how. num_asked: of so many.
        """
        lines = [line for text in self._printed for line in text.splitlines() if line.strip()]
        self._printed.clear()
        told = [f"environment {self.label} printed: {visible(line)[:200]}"
                for line in lines[:_LINES_PRINTED]]  # fmt: skip
        if len(lines) > _LINES_PRINTED:
            told.append(
                f"environment {self.label} printed {len(lines) - _LINES_PRINTED} more lines"
            )
        if failures:
            kinds = Counter(outcome.failure for _, outcome in failures)
            reasons = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
            source, first = failures[0]
            told.append(
                f"environment {self.label} failed on {len(failures)} of {num_asked} answers "
                f"({reasons}), where their conversations end; the first: {source}: {first.message}"
            )
        return told


def _name(function: EnvironmentFunction) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
