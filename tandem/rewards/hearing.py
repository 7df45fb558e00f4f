"""One call of an environment's function, and the turns in what it returned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.data.argument_types import argument_schemas
from tandem.rewards.binding import parameters_of
from tandem.rewards.calling import Call, CallError, Judge, Outcome, awaited, guarded
from tandem.rewards.tool_use import ToolBox, ToolFunction
from tandem.text import visible

EnvironmentFunction = Callable[..., Any]
"""f(messages, **columns) -> the next turn or turns, or None; may be async."""
ROLES = ("system", "user", "tool")
"""Who may speak between two answers."""
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class EnvironmentCall(Judge):
    """Calls what answers the policy on one conversation after another: tools where its last answer
    calls some, else an environment's function."""

    def __init__(
        self, function: EnvironmentFunction | None, tools: Sequence[ToolFunction] = ()
    ) -> None:
        """function: None ends conversations whose last answer calls nothing."""
        self._function = function
        self._names, self._takes_all = _parameters(function) if function else (set[str](), False)
        self._tools = ToolBox(tools)

    def outcomes(self, call: Call) -> list[Outcome]:
        """What each conversation of the call's column `messages` hears. The column `tools` has the
        schemas in its prompt."""
        return [self._outcome(call, place) for place in range(len(call))]

    def _outcome(self, call: Call, place: int) -> Outcome:
        columns = {name: values[place] for name, values in call.columns.items()}
        messages = [dict(turn) for turn in columns.pop("messages")]
        calls = messages[-1].get("tool_calls")
        if self._tools.names and calls:
            offered = argument_schemas(columns.pop("tools", None) or [])
            return Outcome(None, turns=self._tools.turns(calls, messages, offered, columns))
        function = self._function
        if function is None:
            return Outcome(None)
        if not self._takes_all:
            columns = {name: value for name, value in columns.items() if name in self._names}

        def called() -> list[Outcome]:
            return [Outcome(None, turns=turns_of(awaited(function(messages, **columns))))]

        return guarded(called, 1)[0]


def turns_of(returned: Any) -> list[dict[str, str]] | None:
    """The turns in what an environment returned; None if its conversation is over.

    Raises:
        CallError: it returned something else.
    """
    if returned is None:
        return None
    if isinstance(returned, str):
        returned = {"role": "user", "content": returned}
    turns = [returned] if isinstance(returned, Mapping) else returned
    if not isinstance(turns, list | tuple):
        raise _wrong(f"got {type(returned).__name__}")
    found = []
    for turn in turns:
        role, content = (
            (turn.get("role", "user"), turn.get("content"))
            if isinstance(turn, Mapping)
            else ("user", turn)
        )
        if role not in ROLES:
            raise _wrong(f"got the role {visible(repr(role))[:50]}")
        if not isinstance(content, str) or not content.strip():
            raise _wrong(f"got {visible(repr(content))[:50]} as content")
        more = {}
        if role == "tool" and isinstance(turn, Mapping):
            known = ((name, turn.get(name)) for name in ("tool_call_id", "name"))
            more = {name: value for name, value in known if isinstance(value, str)}
        found.append({"role": role, "content": content, **more})
    return found or None


def _wrong(found: str) -> CallError:
    return CallError(
        "result",
        f"must return a text, turns of role ({', '.join(ROLES)}) and content, or None; {found}",
    )


def _parameters(function: EnvironmentFunction) -> tuple[set[str], bool]:
    """The names that a function takes beside its first parameter, and whether it takes any."""
    parameters = parameters_of(function)
    if parameters is None:  # something without a signature, which the first call will tell of
        return set(), True
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {p.name for p in parameters[1:] if p.kind in NAMED}, takes_all
