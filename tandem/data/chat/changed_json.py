"""The text within tools and calls, changed: what people wrote in them, and not what templates look
up.

A template looks up keys of JSON Schema (`properties`, `description`) and may compare types. All
else is data, names of parameters too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.data.short_cache import short_cache
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
    number: of a number. kind: of a function's name and of a tool's type; None: as of a text.
    """

    text: Callable[[str], str]
    names: Callable[[Sequence[str]], Mapping[str, str]]
    identity: Callable[[str], str]
    number: Callable[[Any], Any] = lambda number: number
    kind: Callable[[str], str] | None = None

    def of(self, key: str, value: str) -> str:
        """What becomes of the text under a key of a tool or of a call."""
        return self.kind(value) if self.kind and key in ("name", "type") else self.text(value)


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


_EQUALS = "\0"
_IDENTIFIER = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _neutral_kind(text: str) -> str:
    """A neutral word that, in `as_compared`, equals an identifier."""
    return f"{PROBE}{_EQUALS}{text}" if _IDENTIFIER.fullmatch(text) else neutral_text(text)


COMPARED = replace(NEUTRAL, kind=_neutral_kind)
"""The same, but functions' names and tools' types may be compared: a template may write control
tokens for the function python."""


class _Compared(str):
    """A text that is written as one word and equals another."""

    equals: str

    def __eq__(self, other: object) -> bool:
        return self.equals == other

    def __ne__(self, other: object) -> bool:
        return self.equals != other

    def __hash__(self) -> int:
        return hash(self.equals)


def as_compared(value: Any) -> Any:
    """Parsed JSON with neutral words for names that equal what they stand for."""
    if isinstance(value, dict):
        return {key: as_compared(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_compared(item) for item in value]
    if not isinstance(value, str) or not value.startswith(PROBE + _EQUALS):
        return value
    word = _Compared(PROBE)
    word.equals = value.removeprefix(PROBE + _EQUALS)
    return word


def has_compared(text: str) -> bool:
    """Whether JSON text has such words."""
    return json.dumps(PROBE + _EQUALS)[1:-1] in text


def changed_tools(tools: str, change: Change) -> str:
    """Tools as JSON text, with a change of all that is data in them."""
    return _dumped([_schema(tool, change) for tool in json.loads(tools)])


def changed_turn(turn: Message, change: Change) -> Message:
    """A turn with a change of its text, its calls and its names."""
    content, thoughts = change.text(turn.content), change.text(turn.thoughts)
    if not (turn.tool_calls or turn.tool_call_id or turn.name):
        return replace(turn, content=content, thoughts=thoughts)
    calls = json.loads(turn.tool_calls) if turn.tool_calls else ()
    return replace(
        turn,
        content=content,
        thoughts=thoughts,
        tool_calls=_dumped([_call(call, change) for call in calls]) if calls else "",
        tool_call_id=change.identity(turn.tool_call_id),
        name=change.text(turn.name),
    )


def neutral_turns(
    turns: Iterable[Message], *, distinct: bool, change: Change = NEUTRAL
) -> tuple[Message, ...]:
    """The turns with neutral words.

    Args:
        change: NEUTRAL or COMPARED.
        distinct: different words for different ones. A template may write tools where it finds a
            turn that equals the last of the user's.
    """
    numbers: dict[str, int] = {}
    neutral = []
    for turn in turns:
        new = _neutral_turn(turn, change)
        if distinct and new.content == PROBE:
            number = numbers.setdefault(turn.content, len(numbers))
            new = replace(new, content=f"{PROBE}{number}")
        neutral.append(new)
    return tuple(neutral)


def _neutral_turn(turn: Message, change: Change) -> Message:
    if turn.tool_calls or turn.tool_call_id or turn.name:
        return changed_turn(turn, change)
    thoughts = neutral_text(turn.thoughts)
    return Message(turn.role, neutral_text(turn.content), thoughts=thoughts)


@short_cache(256)
def neutral_tools(tools: str, change: Change = NEUTRAL) -> str:
    """Tools of the same structure with neutral words."""
    return changed_tools(tools, change)


def texts_of(turn: Message) -> list[str]:
    """Every text of a turn."""
    if not (turn.tool_calls or turn.tool_call_id or turn.name):
        return [turn.content, turn.thoughts] if turn.thoughts else [turn.content]
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


def _schema(
    value: Any, change: Change, names: Mapping[str, str] | None = None, key: str = ""
) -> Any:
    """A part of a JSON schema, or data in one.

    Args:
        names: what became of the names of the properties beside it.
        key: under which it is.
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
        return names[value] if names and value in names else change.of(key, value)
    return value if isinstance(value, bool) or value is None else change.number(value)


def _of_key(key: str, value: Any, change: Change, names: Mapping[str, str]) -> Any:
    if key in _OF_NAMES and isinstance(value, dict):
        inner = names if key == "properties" else change.names(list(value))
        return {inner[name]: _schema(item, change) for name, item in value.items()}
    if key == "type":
        kinds = value if isinstance(value, list) else [value]
        if all(isinstance(kind, str) and kind.lower() in _TYPES for kind in kinds):
            return value
    return _schema(value, change, names if key == "required" else None, key)


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
        elif key in ("name", "type") and isinstance(value, str):
            made[key] = change.of(key, value)
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
