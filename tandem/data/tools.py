"""Tools that a row lists, and the assistant's calls of them, as JSON.

Both are kept as JSON text, which is immutable, and are given to a chat template parsed. Other turns
have neither.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tandem.data.excerpt import describe, excerpt
from tandem.data.rows import RowProblem
from tandem.data.short_cache import short_cache
from tandem.message import Answer, Message
from tandem.text import visible

_DEEPEST = 64
_KEYS_OF_CALL = {"name", "arguments", "id", "type", "index"}
_KEYS_OF_CALLS = ("tool_calls", "function_call")
_SCHEMAS = 'be a list of JSON schemas, as [{"type": "function", "function": {"name": ...}}]'
_CALLS = 'be a list of calls, as [{"function": {"name": "add", "arguments": {"a": 2}}}]'
_NO_TOOLS = "column {} is not rendered: it is no list of JSON schemas"


def read_tools(value: Any, field: str = "tools") -> str:
    """The tools that a value lists, as JSON text; "" for none.

    A function alone ({"name", "description", "parameters"}) is put into {"type": "function",
    "function": ...}, which is what chat templates read.

    Args:
        value: a list of JSON schemas or of their JSON texts, one schema, or the JSON text of these.
    Raises:
        RowProblem: it is something else.
    """
    found = _listed(_parsed(value, field, _SCHEMAS), field)
    if found is None or found == []:
        return ""
    if not isinstance(found, list | tuple) or not all(isinstance(t, Mapping) for t in found):
        raise RowProblem(field, describe(found), _SCHEMAS)
    text = _text([_wrapped(tool) for tool in found], field)
    for tool in found:
        if not _is_schema(tool):
            raise RowProblem(field, f"{describe(tool)} in it", _SCHEMAS)
    return text


def tools_or_note(value: Any, *, is_mapped: bool) -> tuple[str, str]:
    """The tools in a column of that name, and a note if it holds something else.

    Args:
        is_mapped: the user said that the column holds tools.
    Raises:
        RowProblem: it is to hold tools, or begins like a list of them, and cannot be read.
    """
    said = value.strip() if isinstance(value, str) else value
    if is_mapped or said in (None, "", "[]", "null", []) or _begins_like_tools(value):
        return read_tools(value), ""
    return "", _NO_TOOLS.format("tools")


def _begins_like_tools(value: Any) -> bool:
    """Whether any object of a list, or one alone, is a schema; and so of text that is JSON."""
    if isinstance(value, str):
        begin = value.lstrip()
        if begin[:1] not in ("[", "{"):
            return False
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return begin[:2].rstrip() in ("[", "[{")
        if isinstance(value, str):
            return False
    found = value if isinstance(value, list | tuple) else [value]
    return any(
        _begins_like_tools(tool) if isinstance(tool, str) else _is_schema(tool) for tool in found
    )


def read_calls(value: Any, field: str, turn: int) -> str:
    """The calls of an assistant's turn, as JSON text, with nothing changed; "" for none.

    Args:
        value: OpenAI's list ({"id", "type", "function": {"name", "arguments"}}, the arguments an
            object or its JSON text), or functions alone, or its JSON text. Where a function has no
            `arguments`, an object under `parameters` is them, as Llama 3 writes calls.
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
        if "arguments" not in (_in_full(call) or ()) and (other := _unknown(call)):
            rule = "have a call's arguments in its function, under arguments"
            raise RowProblem(field, f"{excerpt(other)} in turn {turn}", rule)
        _arguments(_in_full(call) or {}, f"{field}.arguments", turn)
    return _text(found, field)


@short_cache(256)
def checked_calls(calls: str) -> str:
    """Calls that are JSON text, checked.

    Raises:
        RowProblem: as `read_calls`.
    """
    return read_calls(calls, "tool_calls", 1)


def bare(answer: Answer) -> Answer:
    """What two answers that say the same have in common: the words without white space around them,
    and which functions are called with which arguments."""
    if isinstance(answer, str):
        return answer.strip()
    functions = [_in_full(call) or {} for call in json.loads(answer.tool_calls or "[]")]
    said = [[function["name"], _arguments(function, "", 0)] for function in functions]
    calls = json.dumps(said, sort_keys=True) if said else ""
    return Message("assistant", answer.content.strip(), tool_calls=calls)


def for_template(calls: str, *, as_text: bool) -> str:
    """Calls as a chat template is given them, as JSON text: each with its `function`.

    Args:
        calls: of a turn, as `read_calls` read them.
        as_text: the arguments as JSON text, and not as objects.
    """
    given = []
    for call in json.loads(calls):
        function = dict(_in_full(call) or {})
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
    return {name: _as_written(name, value, tools) for name, value in row.items()}


def _as_written(name: str, value: Any, tools: str) -> Any:
    if name == tools or (name == "answers" and are_calls(value)):
        return _given(value)
    found = _with_given_calls(value)
    if name == "input" and isinstance(found, dict) and "tools" in found:  # OpenAI's pairs
        return {**found, "tools": _given(found["tools"])}
    return found


def are_calls(value: Any) -> bool:
    """Whether a list has functions with their arguments only, as xLAM's `answers` does."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(c, Mapping) and c.keys() == {"name", "arguments"} for c in value)


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


def _is_schema(tool: Any) -> bool:
    """Whether an object says which tool it is, or of which kind."""
    if not isinstance(tool, Mapping):
        return False
    said = [tool.get(key) for key in ("function", "name", "type")]
    return any(isinstance(each, str | Mapping) and each for each in said)


def _listed(value: Any, field: str) -> Any:
    """One schema as a list of one; texts in a list parsed."""
    if isinstance(value, Mapping) and _is_schema(value):
        return [value]
    if isinstance(value, list | tuple):
        return [
            _parsed(tool, field, _SCHEMAS)
            if isinstance(tool, str) and tool.lstrip().startswith("{")
            else tool
            for tool in value
        ]
    return value


def _in_full(call: Any) -> Mapping[str, Any] | None:
    """What a call calls, its arguments under `arguments`."""
    function = _function(call)
    if function is None or function.get("arguments") not in (None, ""):
        return function
    named = function.get("parameters")
    if not isinstance(named, Mapping):
        return function
    others = {key: value for key, value in function.items() if key != "parameters"}
    return {**others, "arguments": named}


def _unknown(call: Mapping[str, Any]) -> str:
    """A key of a call under which its arguments may be; "" for none."""
    function = _function(call) or {}
    beside = ("arguments", "parameters") if function is not call else ()
    found = [key for key in function if key not in _KEYS_OF_CALL]
    found += [key for key in beside if key in call]
    given = {**call, **function}
    return next((key for key in found if given[key] is not None), "")


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
        found = loads(value, field) if isinstance(value, str) else value
    except RowProblem:
        raise
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
        return loads(value, field)
    except RowProblem:
        raise
    except (ValueError, RecursionError):
        advice = "Write it with json.dumps."
        raise RowProblem(field, f"no JSON ({excerpt(value)})", expected, advice) from None


def loads(text: str, field: str) -> Any:
    """The value of JSON text.

    Raises:
        RowProblem: an object has a key twice, of which Python keeps the last alone.
        ValueError, RecursionError: it is no JSON, or too deep.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise RowProblem(field, f"{excerpt(twice)} twice", "name each key once")
        return found

    return json.loads(text, object_pairs_hook=once)


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
