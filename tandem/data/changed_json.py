"""The text within tools and calls, changed: what people wrote in them, and not what templates look
up.

A template looks up keys of JSON Schema (`properties`, `description`) and may compare types. All
else is data, names of parameters too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tandem.message import Message

PROBE = "Qz7probe"
"""A neutral word, which no text is likely to have."""

_OF_NAMES = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keys whose objects have names of the user's for keys."""
_KEYWORDS = _OF_NAMES | set(
    "type function name description parameters required items enum default title return returns "
    "strict nullable format anyOf oneOf allOf not const examples example minimum maximum "
    "exclusiveMinimum exclusiveMaximum multipleOf minItems maxItems uniqueItems minLength "
    "maxLength pattern prefixItems additionalProperties minProperties maxProperties $ref $schema "
    "$id response deprecated".split()
)
_OF_CALLS = {"id", "type", "function", "name", "arguments", "index"}
_TYPES = set("string number integer boolean array object null function".split())


@dataclass(frozen=True)
class Change:
    """What becomes of text.

    text: of a text. names: of names that stand in one object, in order. identity: of a call's id.
    number: of a number.
    """

    text: Callable[[str], str]
    names: Callable[[Sequence[str]], Mapping[str, str]]
    identity: Callable[[str], str]
    number: Callable[[Any], Any] = lambda number: number


def each(change: Callable[[str], str]) -> Change:
    """The same change of every text."""
    return Change(change, lambda names: {name: change(name) for name in names}, change)


def neutral_text(text: str) -> str:
    """A neutral word for a text; an empty one stays empty, since templates may test for it."""
    return PROBE if text.strip() else text and " "


def _neutral_names(names: Sequence[str]) -> dict[str, str]:
    """Neutral names in the same alphabetical order: templates may sort."""
    ordered = sorted(names, key=lambda name: (name.lower(), name))
    return {name: f"{PROBE}{number:04}" for number, name in enumerate(ordered)}


def _neutral_identity(text: str) -> str:
    """One of the same length, on which templates may insist."""
    return (PROBE * (len(text) // len(PROBE) + 1))[: len(text)]


NEUTRAL = Change(neutral_text, _neutral_names, _neutral_identity, lambda number: 7)
"""All of it replaced, so that only the structure is left."""


def changed_tools(tools: str, change: Change) -> str:
    """Tools as JSON text, with a change of all that is data in them."""
    return _dumped([_schema(tool, change) for tool in json.loads(tools)])


def changed_turn(turn: Message, change: Change) -> Message:
    """A turn with a change of its text, its calls and its names."""
    content = change.text(turn.content)
    if not (turn.tool_calls or turn.tool_call_id or turn.name):
        return replace(turn, content=content)
    calls = json.loads(turn.tool_calls) if turn.tool_calls else ()
    return replace(
        turn,
        content=content,
        tool_calls=_dumped([_call(call, change) for call in calls]) if calls else "",
        tool_call_id=change.identity(turn.tool_call_id),
        name=change.text(turn.name),
    )


def neutral_turns(turns: Iterable[Message], *, distinct: bool) -> tuple[Message, ...]:
    """The turns with neutral words.

    Args:
        distinct: different words for different ones. A template may write tools where it finds a
            turn that equals the last of the user's.
    """
    numbers: dict[str, int] = {}
    neutral = []
    for turn in turns:
        new = _neutral_turn(turn)
        if distinct and new.content == PROBE:
            number = numbers.setdefault(turn.content, len(numbers))
            new = replace(new, content=f"{PROBE}{number}")
        neutral.append(new)
    return tuple(neutral)


def _neutral_turn(turn: Message) -> Message:
    if turn.tool_calls or turn.tool_call_id or turn.name:
        return changed_turn(turn, NEUTRAL)
    return Message(turn.role, neutral_text(turn.content))


@lru_cache(maxsize=256)
def neutral_tools(tools: str) -> str:
    """Tools of the same structure with neutral words."""
    return changed_tools(tools, NEUTRAL)


def texts_of(turn: Message) -> list[str]:
    """Every text of a turn."""
    if not (turn.tool_calls or turn.tool_call_id or turn.name):
        return [turn.content]
    found: list[str] = []
    changed_turn(turn, _gathering(found))
    return found


def tool_texts(tools: str) -> list[str]:
    """Every text of tools."""
    found: list[str] = []
    if tools:
        changed_tools(tools, _gathering(found))
    return found


def _gathering(found: list[str]) -> Change:
    def seen(text: str) -> str:
        found.append(text)
        return text

    return each(seen)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _schema(value: Any, change: Change, names: Mapping[str, str] | None = None) -> Any:
    """A part of a JSON schema, or data in one.

    Args:
        names: what became of the names of the properties beside it.
    """
    if isinstance(value, dict):
        others = change.names([key for key in value if key not in _KEYWORDS])
        own = value.get("properties")
        own_names = change.names(list(own)) if isinstance(own, dict) else {}
        return {
            others.get(key, key): _of_key(key, item, change, own_names)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_schema(item, change, names) for item in value]
    if isinstance(value, str):
        return names[value] if names and value in names else change.text(value)
    return value if isinstance(value, bool) or value is None else change.number(value)


def _of_key(key: str, value: Any, change: Change, names: Mapping[str, str]) -> Any:
    if key in _OF_NAMES and isinstance(value, dict):
        inner = names if key == "properties" else change.names(list(value))
        return {inner[name]: _schema(item, change) for name, item in value.items()}
    if key == "type":
        kinds = value if isinstance(value, list) else [value]
        if all(isinstance(kind, str) and kind.lower() in _TYPES for kind in kinds):
            return value
    return _schema(value, change, names if key == "required" else None)


def _call(call: dict[str, Any], change: Change) -> Any:
    others = change.names([key for key in call if key not in _OF_CALLS])
    made = {}
    for key, value in call.items():
        if key == "function" and isinstance(value, dict):
            made[key] = _call(value, change)
        elif key == "id" and isinstance(value, str):
            made[key] = change.identity(value)
        elif key == "type" and value == "function":
            made[key] = value
        else:
            made[others.get(key, key)] = _data(value, change)
    return made


def _data(value: Any, change: Change) -> Any:
    if isinstance(value, dict):
        names = change.names(list(value))
        return {names[key]: _data(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_data(item, change) for item in value]
    if isinstance(value, str):
        return change.text(value)
    return value if isinstance(value, bool) or value is None else change.number(value)
