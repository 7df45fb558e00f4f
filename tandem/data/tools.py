"""Tools that a row lists, and the assistant's calls of them, as JSON.

Both are kept as JSON text, which is immutable, and are given to a chat template parsed. Other turns
have neither.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tandem.data.excerpt import describe, excerpt
from tandem.data.rows import RowProblem
from tandem.text import visible

_DEEPEST = 64
_KEYS_OF_CALLS = ("tool_calls", "function_call")
_SCHEMAS = 'be a list of JSON schemas, as [{"type": "function", "function": {"name": ...}}]'
_CALLS = 'be a list of calls, as [{"function": {"name": "add", "arguments": {"a": 2}}}]'
_NO_TOOLS = "column {} is not rendered: it is no list of JSON schemas"


def read_tools(value: Any, field: str = "tools") -> str:
    """The tools that a value lists, as JSON text; "" for none.

    A function alone ({"name", "description", "parameters"}) is put into {"type": "function",
    "function": ...}, which is what chat templates read.

    Args:
        value: a list of JSON schemas, or its JSON text.
    Raises:
        RowProblem: it is something else.
    """
    found = _parsed(value, field, _SCHEMAS)
    if found is None or found == []:
        return ""
    if not isinstance(found, list | tuple) or not all(isinstance(t, Mapping) for t in found):
        raise RowProblem(field, describe(found), _SCHEMAS)
    return _text([_wrapped(tool) for tool in found], field)


def tools_or_note(value: Any, *, is_mapped: bool) -> tuple[str, str]:
    """The tools in a column of that name, and a note if it holds something else.

    Args:
        is_mapped: the user said that the column holds tools.
    Raises:
        RowProblem: it is to hold tools, or begins like a list of them, and cannot be read.
    """
    is_list = isinstance(value, list | tuple)
    like_tools = (isinstance(value, str) and value.lstrip()[:2].rstrip() in ("[", "[{")) or (
        is_list and any(isinstance(tool, Mapping) for tool in value)
    )
    if is_mapped or like_tools or value is None or value == "" or value == []:
        return read_tools(value), ""
    return "", _NO_TOOLS.format("tools")


def read_calls(value: Any, field: str, turn: int) -> str:
    """The calls of an assistant's turn, as JSON text, with nothing changed; "" for none.

    Args:
        value: OpenAI's list ({"id", "type", "function": {"name", "arguments"}}, the arguments an
            object or its JSON text), or functions alone, or its JSON text.
        turn: the turn's number, for errors.
    Raises:
        RowProblem: it is something else.
    """
    found = _parsed(value, field, _CALLS)
    if found is None or found == []:
        return ""
    if not isinstance(found, list | tuple):
        raise RowProblem(field, f"{describe(found)} in turn {turn}", _CALLS)
    for call in found:
        function = _function(call)
        name = function.get("name") if function is not None else None
        if function is None or not isinstance(name, str) or not name.strip():
            raise RowProblem(field, f"{describe(call)} in turn {turn}", _CALLS)
        _arguments(function, f"{field}.arguments", turn)
    return _text(found, field)


def for_template(calls: str, *, as_text: bool) -> str:
    """Calls as a chat template is given them, as JSON text: each with its `function`.

    Args:
        calls: of a turn, as `read_calls` read them.
        as_text: the arguments as JSON text, and not as objects.
    """
    given = []
    for call in json.loads(calls):
        function = dict(_function(call) or {})
        arguments = function.get("arguments")
        if not as_text:
            arguments = _arguments(function, "arguments", 0)
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        function["arguments"] = arguments
        wrapper = call if "function" in call else {"type": "function"}
        given.append({**wrapper, "function": function})
    return json.dumps(given, ensure_ascii=False)


def without_nulls(row: Mapping[str, Any], tools: str = "tools") -> dict[str, Any]:
    """A row of an Arrow table with the tools and calls that were written to it, wherever a turn
    with calls is in it.

    All structs of a column have the keys of all, null where they were not given.

    Args:
        tools: the column that lists the tools.
    """
    return {
        name: _given(value) if name == tools else _with_given_calls(value)
        for name, value in row.items()
    }


def _with_given_calls(value: Any) -> Any:
    if isinstance(value, list):
        first = next((item for item in value if item is not None), None)  # all are of its type
        return [_with_given_calls(i) for i in value] if isinstance(first, list | dict) else value
    if not isinstance(value, dict):
        return value
    return {
        key: _given(item) if key in _KEYS_OF_CALLS else _with_given_calls(item)
        for key, item in value.items()
    }


def _given(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return [_given(item) for item in value] if isinstance(value, list) else value


def _function(call: Any) -> Mapping[str, Any] | None:
    """What a call calls, whether OpenAI's or a function alone."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else None


def _wrapped(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool as chat templates read it."""
    kind = tool.get("type", "function")
    if "function" in tool or kind != "function" or not isinstance(tool.get("name"), str):
        return tool
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def _arguments(function: Mapping[str, Any], field: str, turn: int) -> Mapping[str, Any]:
    """A call's arguments, parsed; none are an empty object."""
    value = function.get("arguments")
    if value is None or value == "":
        return {}
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        raise RowProblem(
            field, f"{describe(value)} in turn {turn}", "be a JSON object, or its text"
        )
    _check(found, field)
    return found


def _parsed(value: Any, field: str, expected: str) -> Any:
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        advice = "Write it with json.dumps."
        raise RowProblem(field, f"no JSON ({excerpt(value)})", expected, advice) from None


def _text(value: Any, field: str) -> str:
    _check(value, field)
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowProblem(field, "half a surrogate pair", "be valid Unicode") from None
    return text


def _check(value: Any, field: str) -> None:
    """
    Raises:
        RowProblem: values that JSON does not have, or too many of them within each other.
    """
    for item, depth in _walk(value):
        if depth > _DEEPEST:
            raise RowProblem(field, f"more than {_DEEPEST} levels", "be nested less deeply")
        keys = [key for key in item if type(key) is not str] if isinstance(item, Mapping) else []
        wrong = keys[0] if keys else item
        known = isinstance(item, Mapping | list | tuple | str | bool | int | float | None)
        if keys or not known or (isinstance(item, float) and not math.isfinite(item)):
            found = visible(f"{type(wrong).__name__} {wrong!r}")[:60]
            raise RowProblem(field, found, "hold only what JSON has")


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Every value within a value, and how deep it is."""
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        yield item, depth
        if depth <= _DEEPEST and isinstance(item, Mapping | list | tuple):
            inner = item.values() if isinstance(item, Mapping) else item
            stack += [(each, depth + 1) for each in inner]
