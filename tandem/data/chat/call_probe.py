"""Which form a chat template writes calls of tools in, found from what it writes of made-up ones.

A form counts as found only if it reads back what the template writes of a battery of calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tandem.data.chat.call_reader import (
    DECODER,
    Called,
    CallError,
    CallReader,
    Ends,
    JsonReader,
    Keys,
    Marks,
    NamedReader,
    TaggedReader,
)
from tandem.data.chat.call_shape import json_shape, tagged_shape
from tandem.data.chat.changed_json import PROBE

Write = Callable[[Sequence[Called]], str]
"""What a template writes of an assistant's turn with these calls alone, without its end; "" where
it takes no such calls."""
_NAME = f"{PROBE}name"
_KEY = f"{PROBE}key"
_VALUE = f"{PROBE}value"


def reader_of(write: Write) -> CallReader | None:
    """How to read the calls that a template writes; None if its form is none of those known."""
    for make in (_json_reader, _named_reader, _tagged_reader):
        reader = make(write)
        if reader is not None and _reads_back(reader, write):
            reader.shape = reader.shape or json_shape(write, *_made_up(0, 1))
            reader.example = write([Called("add", {"a": 2, "b": 3}, call_id(0))]).strip()
            return reader
    return None


def call_id(number: int) -> str:
    """An id for a call that has none: Mistral's templates ask for nine letters and digits."""
    return f"call{number:05d}"


def _made_up(*numbers: int, count: int = 1) -> list[Called]:
    """Calls of these numbers with `count` arguments each."""
    return [
        Called(
            f"{_NAME}{n}", {f"{_KEY}{n}{i}": f"{_VALUE}{n}{i}" for i in range(count)}, call_id(n)
        )
        for n in numbers
    ]


def _json_reader(write: Write) -> CallReader | None:
    one, two = write(_made_up(0)), write(_made_up(0, 1))
    first, second = _made_up(0, 1)
    if (found := _value_of(one, first)) is None:
        return None
    start, end, form, is_list = found
    between = None
    if not is_list and (a := _value_of(two, first)) and (b := _value_of(two, second)):
        between = two[a[1] : b[0]]
    return JsonReader(one[:start], between, one[end:], *form)


_JsonForm = tuple[tuple[str, ...], Keys]
"""Keys that lead to what holds a call's name and arguments, and theirs."""


def _value_of(text: str, call: Called) -> tuple[int, int, _JsonForm, bool] | None:
    """Where the JSON value of a call begins and ends, where it has what, and whether it is a list
    of the one; None if there is none."""
    for start in (at for at, letter in enumerate(text) if letter in "[{"):
        try:
            value, end = DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        is_list = isinstance(value, list) and len(value) == 1
        if form := _form(value[0] if is_list else value, call):
            return start, end, form, is_list
    return None


def _form(value: Any, call: Called) -> _JsonForm | None:
    """Where a value has a call's name and arguments; None if it has not."""
    if not isinstance(value, dict):
        return None
    given = (call.arguments, json.dumps(call.arguments))
    names = [key for key, item in value.items() if item == call.name]
    arguments = [key for key, item in value.items() if item in given]
    if names and arguments:
        return (), Keys(names[0], arguments[0])
    for key, item in value.items():
        if inner := _form(item, call):
            return (key, *inner[0]), inner[1]
    return None


def _named_reader(write: Write) -> CallReader | None:
    one, two = write(_made_up(0)), write(_made_up(0, 1))
    first, second = _made_up(0, 1)
    if (found := _behind(one, first)) is None:
        return None
    start, end = found
    name = one.find(first.name)
    between = None
    if (a := _behind(two, first)) and second.name in two:
        between = two[a[1] : two.find(second.name)]
    inside = one[name + len(first.name) : start]
    return NamedReader(one[:name], inside, between, one[end:])


def _behind(text: str, call: Called) -> tuple[int, int] | None:
    """Where a call's arguments begin and end as JSON behind its name; None if they do not."""
    name = text.find(call.name)
    start = text.find("{", name + len(call.name))
    try:
        value, end = DECODER.raw_decode(text, start) if name >= 0 and start >= 0 else (None, 0)
    except (ValueError, RecursionError):
        return None
    return (start, end) if value == call.arguments else None


def _tagged_reader(write: Write) -> CallReader | None:
    words = [f"{part}{n}{i}" for n in (0, 1) for i in (0, 1) for part in (_KEY, _VALUE)]
    words[4:4] = [f"{_NAME}1"]
    cut = _divided(write(_made_up(0, 1, count=2)), [f"{_NAME}0", *words])
    empty = _divided(write(_made_up(0, 1, count=0)), [f"{_NAME}0", f"{_NAME}1"])
    if cut is None or empty is None:
        return None
    before, first, inside, following, inside_again, between, *second = cut
    if inside != inside_again or second[:-1] != [first, inside, following, inside]:
        return None
    if not all(text.strip() for text in (before, first, inside, following)):
        return None
    ends = Ends(between, second[-1], empty[1], empty[2])
    reader = TaggedReader(before, ends, Marks(first, inside, following))
    none, after = (empty[1], empty[2]), second[-1]
    reader.shape = tagged_shape(before, (first, inside, following), (between, after), none)
    return reader


def _divided(text: str, words: Sequence[str]) -> list[str] | None:
    """What stands before, between and after words that a text has once each, in order."""
    parts = []
    for word in words:
        part, found, text = text.partition(word)
        if not found:
            return None
        parts.append(part)
    return [*parts, text]


def _reads_back(reader: CallReader, write: Write) -> bool:
    """Whether it reads what the template writes of calls of every kind."""
    rich = {"text": 'a "b"\nc', "number": 2.5, "whole": 3, "flag": True, "none": None,
            "list": [1, "x"], "object": {"a": {"b": []}}}  # fmt: skip
    types = {f"{_NAME}{n}": {"text": "string", "word": "string"} for n in (0, 1)}
    one = Called(f"{_NAME}0", {"word": "  12\n  x"}, call_id(0))
    two = Called(f"{_NAME}1", {}, call_id(1))
    battery = [[one], [Called(f"{_NAME}0", rich, call_id(0))], [two], [one, two], [two, one]]
    for calls in battery:
        text = write(calls)
        if len(calls) == 2 and not all(call.name in text for call in calls):
            continue  # some templates take one call at a time
        try:
            found = reader.read(text, types)[1]
        except CallError:
            return False
        if [(c.name, c.arguments) for c in found] != [(c.name, c.arguments) for c in calls]:
            return False
    return True
