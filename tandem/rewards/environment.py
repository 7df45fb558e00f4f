"""Environments: functions of the user's that say what a conversation's last answer hears back.

    def environment(messages, answer, **columns):
        return None if messages[-1]["content"] == answer else "Try again."

It is called once per answer, with all turns so far as role and content dicts, the policy's last
one at the end, and the columns of the data's row. It returns the next turn: a text (the user's), a
dict of role and content or several of them in a list (a tool's); or None, and the conversation is
over. What it knows of a conversation is what it is given: nothing has to be kept between calls, in
whichever process they are made. Answers that call a run's tools hear those instead
(`tandem.rewards.tool_use`).
"""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
)
from tandem.rewards.seeding import seeded
from tandem.rewards.tool_use import (
    ToolFunction,
    check_names,
    missing_column,
    tool_name,
    unanswered,
    unread,
)

_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Said:
    """What an environment is asked about.

    messages: all turns so far as data has them, the policy's last. row: the columns of the data's.
    source: where that came from. tools: that its prompt lists, as JSON text. problem: what is wrong
    with calls in the last turn that could not be read.
    """

    messages: list[dict[str, Any]]
    row: Mapping[str, Any]
    source: str
    tools: str = ""
    problem: str = ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of tools in the last turn."""
        return self.messages[-1].get("tool_calls") or []


class Environment:
    """What answers a run's policy, ready: an environment's function, tools, or both.

    Functions that are named run in worker processes that import them; where one is given itself, in
    processes forked from this one, with the limits that `scoring` sets for reward functions. Where
    one has the attribute `in_process`, all run here.

    Attributes:
        label: what it is, in messages. tools: names of the functions that the policy may call.
    """

    def __init__(
        self,
        function: EnvironmentFunction | str | None,
        config: ScoringConfig | None = None,
        *,
        tools: Sequence[ToolFunction | str] = (),
        columns: Iterable[str] = (),
        section: str = "",
    ) -> None:
        """
        Args:
            function: itself, or its name as `file.py:function?option=value`; None: with tools alone
                a conversation is over at the first answer that calls none.
            tools: functions, or their names.
            columns: those of all rows that are to come, so that a row without one gives None.
            section: where the names are from, for errors.
        Raises:
            ConfigError: a name leads nowhere, or two tools have one name.
        """
        self.config = config or ScoringConfig()
        before = f"{section}." if section else ""
        self._function = _named(function, f"{before}environment") if function else None
        self._tools = [_named(tool, f"{before}tools") for tool in tools]
        self.tools = tuple(map(tool_name, self._tools))
        check_names(self._tools, f"{before}tools")
        self.label = _label(function, self.tools)
        self._call = EnvironmentCall(self._function, self._tools)
        self._columns = sorted(set(columns))
        self._printed: list[str] = []
        self._why = ""
        self._pool = None
        given = [function or "", *tools]
        names = [one for one in given if isinstance(one, str)]
        if len(names) < len(given) and (why := cannot_fork()):
            self._why = f" ({why})"
        here = any(getattr(one, "in_process", False) for one in (self._function, *self._tools))
        if not self._why and not here:
            target = tuple(names) if len(names) == len(given) else self._call
            self._pool = WorkerPool(
                target, PoolLimits.of(self.config), self._printed.append, what="environment"
            )

    def describe(self) -> str:
        """What it is, and where it runs if that is not as usual."""
        if self._pool is not None:
            return self.label
        return f"{self.label}, in the training process, without deadline and limits{self._why}"

    def problem(self, columns: Iterable[str]) -> str:
        """What keeps the functions from being called with these columns, or ""."""
        given = sorted(set(columns))
        parameters = parameters_of(self._function) if self._function else []
        known = {"messages", "tools", *given}
        missing = [
            p.name
            for i, p in enumerate(parameters or [])
            if i and p.default is p.empty and p.kind in NAMED and p.name not in known
        ]
        found = f"its parameter {missing[0]}" if missing else missing_column(self._tools, given)
        if not found:
            return ""
        return (
            f"{self.label} must take messages and the data's columns ({', '.join(given) or 'none'})"
            f"; {found} is none of them. Give it a default, or change its name"
        )

    def replies(self, said: Sequence[Said]) -> list[Outcome]:
        """What each of these conversations hears."""
        calls = [self._call_of(one) for one in said]
        if self._pool is None:
            outcomes = [self._here(call) for call in calls]
        else:
            outcomes = [outcome for found in self._pool.run(calls) for outcome in found]
        return list(map(self._answered, said, outcomes))

    def heard(self, said: Said) -> Outcome:
        """What one conversation hears, of calls that cannot be read, too."""
        if said.problem and self.tools:
            return unread(said.problem)
        return self.replies([said])[0]

    def _call_of(self, said: Said) -> Call:
        columns = columns_of([said.row], self.config.answer_column, self._columns)
        if said.tools:
            columns["tools"] = [json.loads(said.tools)]
        answer = said.messages[-1]["content"] + (json.dumps(said.calls) if said.calls else "")
        return Call([""], [answer], {**columns, "messages": [said.messages]})

    def _answered(self, said: Said, outcome: Outcome) -> Outcome:
        """What is heard where this came of an answer: calls of tools that failed are answered."""
        if outcome.failure and self.tools and said.calls:
            return unanswered(said.calls, outcome)
        return outcome

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


@dataclass
class Tally:
    """What became of answers that an environment was asked about.

    num_asked: answers. num_calls: calls of tools in them. ends, calls: by the places of their
    conversations, those answers and calls that it failed on: where the row came from, the kind of
    failure, and its message. no_room: those to which it said more than leaves room for an answer:
    where the row came from, and how much.
    """

    num_asked: int = 0
    num_calls: int = 0
    ends: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    calls: dict[int, list[tuple[str, str, str]]] = field(default_factory=dict)
    no_room: dict[int, tuple[str, str]] = field(default_factory=dict)

    def told(self, label: str, others: Sequence[Tally] = ()) -> list[str]:
        """What to tell the user of it, and of those of the other ranks.

        Args:
            label: the environment's.
        """
        ranks, told = (self, *others), []
        asked = sum(rank.num_asked for rank in ranks)
        if full := [rank.no_room[place] for rank in ranks for place in sorted(rank.no_room)]:
            told.append(
                f"no answer had room behind what {label} said to {len(full)} of {asked} answers, "
                f"where their conversations end; the first: {full[0][0]}: {full[0][1]}"
            )
        calls = [f for rank in ranks for place in sorted(rank.calls) for f in rank.calls[place]]
        if calls:
            told.append(
                f"{label} failed on {len(calls)} of {sum(rank.num_calls for rank in ranks)} calls "
                f"({_kinds(calls)}), which the policy hears; {_first(calls)}"
            )
        ends = [rank.ends[place] for rank in ranks for place in sorted(rank.ends)]
        if ends:
            told.append(
                f"{label} failed on {len(ends)} of {asked} answers ({_kinds(ends)}), where their "
                f"conversations end; {_first(ends)}"
            )
        return told


def _kinds(failures: Sequence[tuple[str, str, str]]) -> str:
    """How often each kind occurs, as "exception 2, timeout 1"."""
    counted = Counter(kind for _, kind, _ in failures)
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counted.items()))


def _first(failures: Sequence[tuple[str, str, str]]) -> str:
    source, _, message = failures[0]
    return f"the first: {source}: {message}"


class Replies:
    """What an environment says to one answer after another, as it comes. A context manager; leaving
    it ends what still answers.

    Attributes:
        environment: whose.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._feed: Feed | None = None
        self._thread: threading.Thread | None = None
        self._came: queue.SimpleQueue[tuple[int, Outcome] | BaseException] = queue.SimpleQueue()
        self._num_asked = 0
        self._said: dict[int, Said] = {}

    def __enter__(self) -> Replies:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._feed is None or self._thread is None:
            return
        self._feed.close()
        if error is not None:
            self.environment.close()  # else Ctrl-C would wait for deadlines
        self._thread.join()
        self._feed.end()

    def ask(self, said: Said) -> int:
        """Ask about an answer; the number that `came` names it by."""
        environment, number = self.environment, self._num_asked
        self._num_asked += 1
        self._said[number] = said
        if said.problem and environment.tools:
            self._came.put((number, unread(said.problem)))
            return number
        call = environment._call_of(said)
        if environment._pool is None:
            self._came.put((number, environment._here(call)))
            return number
        if self._feed is None:
            self._feed = Feed()
            self._thread = threading.Thread(
                target=self._serve, args=(environment._pool, self._feed), name="environment"
            )
            self._thread.start()
        self._feed.put(call, number)
        return number

    def came(self, *, wait: bool) -> list[tuple[int, Outcome]]:
        """What it has said since the last time, by the numbers of what it was asked.

        Args:
            wait: for something, if anything is still to come.
        Raises:
            ConfigError: its processes cannot import the function.
        """
        found: list[tuple[int, Outcome]] = []
        while self._said:
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
            number, outcome = item
            found.append((number, self.environment._answered(self._said.pop(number), outcome)))
        return found

    def _serve(self, pool: WorkerPool, feed: Feed) -> None:
        try:
            pool.serve(feed, lambda number, outcomes: self._came.put((number, outcomes[0])))
        except BaseException as error:  # is raised where what came is asked for
            self._came.put(error)


def _named(function: EnvironmentFunction | str, knob: str) -> EnvironmentFunction:
    return named_function(function, knob) if isinstance(function, str) else function


def _label(function: EnvironmentFunction | str | None, tools: Sequence[str]) -> str:
    parts = []
    if function:
        parts = [f"environment {function if isinstance(function, str) else tool_name(function)}"]
    if tools:
        parts.append(f"{'tool' if len(tools) == 1 else 'tools'} {', '.join(tools)}")
    return " and ".join(parts)
