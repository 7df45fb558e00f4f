"""Tools: functions of the user's that a policy calls in its answers, and what it then hears.

    def multiply(a: float, b: float) -> float:
        '''Multiplies two numbers.

        Args:
            a: The first number.
            b: The second one.
        '''
        return a * b

Parameters before a `*` are the model's to fill, and the schema that it is shown names them alone.
Those behind it are the run's: a column of the data's row, `messages` (all turns so far), or an
option with a default. Whatever goes wrong with a call, the policy hears it and can try again.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

from tandem.data.argument_types import kinds_of
from tandem.errors import ConfigError
from tandem.rewards.binding import parameters_of
from tandem.rewards.calling import CallError, Outcome, awaited, guarded
from tandem.text import visible

ToolFunction = Callable[..., Any]
"""f(the model's arguments, *, what the run gives) -> anything; may be async."""
Turn = dict[str, Any]
_SHOWN = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def tool_name(function: ToolFunction) -> str:
    """The name by which a model calls a function."""
    if isinstance(function, partial):  # options are bound
        return tool_name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def check_names(functions: Sequence[ToolFunction], knob: str) -> None:
    """Check that no two tools have one name.

    Raises:
        ConfigError: two have.
    """
    counted = Counter(map(tool_name, functions))
    if twice := [name for name, number in counted.items() if number > 1]:
        raise ConfigError(
            f"{knob} must have names of their own; got {twice[0]} twice. Rename one of the "
            "functions, or remove it."
        )


def shown_parameters(function: ToolFunction) -> list[inspect.Parameter]:
    """The parameters that are the model's to fill, in order."""
    return [p for p in parameters_of(function) or [] if p.kind in _SHOWN]


def own_parameters(function: ToolFunction) -> list[inspect.Parameter]:
    """Those that the run fills."""
    return [p for p in parameters_of(function) or [] if p.kind is p.KEYWORD_ONLY]


def missing_column(functions: Sequence[ToolFunction], columns: Sequence[str]) -> str:
    """The first parameter of a tool that nothing fills, as "TOOL's parameter NAME"; or ""."""
    known = {"messages", *columns}
    return next(
        (
            f"{tool_name(function)}'s parameter {p.name}"
            for function in functions
            for p in own_parameters(function)
            if p.default is p.empty and p.name not in known
        ),
        "",
    )


class ToolBox:
    """The tools of a run.

    Attributes:
        names: theirs, in order.
    """

    def __init__(self, functions: Sequence[ToolFunction]) -> None:
        self._functions = {tool_name(function): function for function in functions}
        self.names = tuple(self._functions)

    def turns(
        self,
        calls: Sequence[Mapping[str, Any]],
        messages: Sequence[Turn],
        offered: Mapping[str, Mapping[str, Any]],
        columns: Mapping[str, Any],
    ) -> list[Turn]:
        """What a policy hears of its calls, a turn of role tool each, with `failure` (the reason)
        and `error` (the message) where one failed.

        Args:
            calls: as data has them, with an object as arguments.
            messages: all turns so far. columns: of the data's row.
            offered: the tools that the prompt lists, by name the schema of each argument; empty:
                all.
        """
        return [self._turn(call, messages, offered, columns) for call in calls]

    def _turn(
        self,
        call: Mapping[str, Any],
        messages: Sequence[Turn],
        offered: Mapping[str, Mapping[str, Any]],
        columns: Mapping[str, Any],
    ) -> Turn:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        said: list[str] = []

        def called() -> list[Outcome]:
            function = self._functions.get(name)
            if function is None or (offered and name not in offered):
                known = ", ".join(offered or self.names)
                raise CallError("result", f"there is no tool {visible(name)[:50]}, only {known}")
            given, named = _arguments(function, arguments, offered.get(name, {}))
            own: dict[str, Any] = {}
            for parameter in own_parameters(function):
                if parameter.name == "messages":
                    own["messages"] = [dict(turn) for turn in messages]
                elif parameter.name in columns:
                    own[parameter.name] = columns[parameter.name]
            said.append(_text(awaited(function(*given, **named, **own))))
            return [Outcome(None)]

        outcome = guarded(called, 1)[0]
        return _tool_turn(call, said[0] if said else "", outcome)


def unanswered(calls: Sequence[Mapping[str, Any]], outcome: Outcome) -> Outcome:
    """What a policy hears of calls whose process failed: took too long, or ended."""
    return Outcome(None, turns=[_tool_turn(call, "", outcome) for call in calls])


def unread(problem: str) -> Outcome:
    """What a policy hears of calls that cannot be read."""
    outcome = Outcome(None, "result", problem)
    return Outcome(None, turns=[_tool_turn({}, "", outcome)])


def _tool_turn(call: Mapping[str, Any], text: str, outcome: Outcome) -> Turn:
    turn: Turn = {"role": "tool", "content": text}
    if outcome.failure:
        turn["content"] = f"Error: {outcome.message}"
        turn |= {"failure": outcome.failure, "error": outcome.message}
    if call.get("id"):
        turn["tool_call_id"] = str(call["id"])
    if "function" in call:
        turn["name"] = str(call["function"]["name"])
    return turn


def _arguments(
    function: ToolFunction, arguments: Mapping[str, Any], schemas: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments by position and by name.

    Args:
        schemas: of each argument, as the prompt shows them.
    Raises:
        CallError: the function takes others.
    """
    parameters = shown_parameters(function)
    names = [p.name for p in parameters]
    listed = ", ".join(names) or "no arguments"
    if unknown := [key for key in arguments if key not in names]:
        raise CallError(
            "result", f"{tool_name(function)} takes {listed}; got {visible(unknown[0])[:50]}"
        )
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in arguments]
    if missing:
        raise CallError("result", f"{tool_name(function)} takes {listed}; {missing[0]} is missing")
    for key, value in arguments.items():
        if wrong := _unlike(value, schemas.get(key)):
            raise CallError("result", f"{key} must be {wrong}; got {_shown(value)}")
    places = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    last = max((i for i, p in enumerate(places) if p.name in arguments), default=-1)
    given = [arguments.get(p.name, p.default) for p in places[: last + 1]]
    by_place = {p.name for p in places}
    return given, {key: value for key, value in arguments.items() if key not in by_place}


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (NoneType,),
}


def _unlike(value: Any, schema: Any) -> str:
    """What a value must be to be of a JSON schema; "" if it is, as far as type and enum say."""
    if not isinstance(schema, Mapping):
        return ""
    if value is None and schema.get("nullable") is True:
        return ""
    choices = schema.get("enum")
    if isinstance(choices, list) and value not in choices:
        return f"one of {_shown(choices)[1:-1]}"
    kinds = kinds_of(schema)
    if not kinds or not all(each in _TYPES for each in kinds):
        return ""
    is_one = any(
        isinstance(value, _TYPES[each]) and (not isinstance(value, bool) or each == "boolean")
        for each in kinds
    )
    return "" if is_one else f"of type {' or '.join(kinds)}"


def _shown(value: Any) -> str:
    return visible(json.dumps(value, ensure_ascii=False))[:80]


def _text(value: Any) -> str:
    """What a function returned, as a model reads it: text as it is, else JSON where it is some.

    Raises:
        CallError: it is neither, or no valid Unicode.
    """
    if isinstance(value, str) and value.strip():
        text = value
    else:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = str(value)
        if _ADDRESS.search(text):  # which is another in every process
            kind = type(value).__name__
            raise CallError(
                "result", f"it returned a value of type {kind}, which is no text and no JSON"
            )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise CallError("result", "it returned half a surrogate pair") from None
    return text or json.dumps("")


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
