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

import queue
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.config.scoring import ScoringConfig
from tandem.named_functions import named_function
from tandem.rewards.binding import parameters_of
from tandem.rewards.calling import Call, Outcome
from tandem.rewards.columns import columns_of
from tandem.rewards.feed import Feed
from tandem.rewards.hearing import NAMED, EnvironmentCall, EnvironmentFunction
from tandem.rewards.pool import (
    PoolLimits,
    WorkerPool,
    cannot_fork,
    lines_printed,
    told_printed,
)
from tandem.rewards.seeding import seeded

_LOOK_SECONDS = 0.2


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
        self._why = ""
        self._pool = None
        if not isinstance(function, str) and (why := cannot_fork()):
            self._why = f" ({why})"
        if not self._why and not getattr(found, "in_process", False):
            target = function if isinstance(function, str) else self._call
            self._pool = WorkerPool(
                target, PoolLimits.of(self.config), self._printed.append, what="environment"
            )

    def describe(self) -> str:
        """Its name, and where it runs if that is not as usual."""
        if self._pool is not None:
            return self.label
        return f"{self.label}, in the training process, without deadline and limits{self._why}"

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
        calls = [self._call_of(one) for one in said]
        if self._pool is None:
            return [self._here(call) for call in calls]
        return [outcome for found in self._pool.run(calls) for outcome in found]

    def _call_of(self, said: Said) -> Call:
        columns = columns_of([said.row], self.config.answer_column, self._columns)
        answer = said.messages[-1]["content"]
        return Call([""], [answer], {**columns, "messages": [said.messages]})

    def _here(self, call: Call) -> Outcome:
        with seeded(call.completions):
            return self._call.outcomes(call)[0]

    def close(self) -> None:
        """End the worker processes; they start again when they are needed."""
        if self._pool is not None:
            self._pool.close()

    def printed(self) -> list[str]:
        """The lines that it has printed since the last time, a little of each call's."""
        return lines_printed(self._printed)

    def told(
        self, lines: Sequence[str], failures: Sequence[tuple[str, Outcome]], num_asked: int
    ) -> list[str]:
        """What to tell the user of a rollout.

        Args:
            lines: that it printed. failures: where each row came from that it failed on, and how.
            num_asked: answers that it was asked about.
        """
        told = told_printed(f"environment {self.label}", lines)
        if failures:
            kinds = Counter(outcome.failure for _, outcome in failures)
            reasons = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
            source, first = failures[0]
            told.append(
                f"environment {self.label} failed on {len(failures)} of {num_asked} answers "
                f"({reasons}), where their conversations end; the first: {source}: {first.message}"
            )
        return told


class Replies:
    """What an environment says to one answer after another, as it comes. A context manager; leaving
    it ends what still answers."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._feed: Feed | None = None
        self._thread: threading.Thread | None = None
        self._came: queue.SimpleQueue[tuple[int, Outcome] | BaseException] = queue.SimpleQueue()
        self._num_asked = self._num_awaited = 0

    def __enter__(self) -> Replies:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._feed is None or self._thread is None:
            return
        self._feed.close()
        if error is not None:
            self._environment.close()  # else Ctrl-C would wait for deadlines
        self._thread.join()
        self._feed.end()

    def ask(self, said: Said) -> int:
        """Ask about an answer; the number that `came` names it by."""
        environment, number = self._environment, self._num_asked
        call = environment._call_of(said)
        self._num_asked += 1
        self._num_awaited += 1
        if environment._pool is None:
            self._came.put((number, environment._here(call)))
            return number
        if self._feed is None:
            self._feed = Feed()
            self._thread = threading.Thread(
                target=self._serve, args=(environment._pool, self._feed), name="environment"
            )
            self._thread.start()
        return self._feed.put(call)

    def came(self, *, wait: bool) -> list[tuple[int, Outcome]]:
        """What it has said since the last time, by the numbers of what it was asked.

        Args:
            wait: for something, if anything is still to come.
        Raises:
            ConfigError: its processes cannot import the function.
        """
        found: list[tuple[int, Outcome]] = []
        while self._num_awaited:
            try:
                if found or not wait:
                    item = self._came.get_nowait()
                else:  # a wait without end would miss a Ctrl-C that comes just before it begins
                    item = self._came.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if found or not wait:
                    break
                continue
            if isinstance(item, BaseException):
                raise item
            self._num_awaited -= 1
            found.append(item)
        return found

    def _serve(self, pool: WorkerPool, feed: Feed) -> None:
        try:
            pool.serve(feed, lambda number, outcomes: self._came.put((number, outcomes[0])))
        except BaseException as error:  # is raised where what came is asked for
            self._came.put(error)


def _name(function: EnvironmentFunction) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
