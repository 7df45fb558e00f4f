"""What a chat template writes of calls around names and arguments, cut from calls that were made
up: what a grammar of calls is made of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tandem.data.chat.call_reader import DECODER, Called

ID = "\ue000"
"""Stands for a call's id."""
_ID_LETTERS = re.compile(r"call\d{5}")


@dataclass(frozen=True, slots=True)
class JsonShape:
    """Calls whose arguments are one JSON object behind the name.

    head: up to the first name. inside: from a name to the arguments. tail: behind the last ones.
    link: from arguments to the next name; None where only one call can be written.
    """

    head: str
    inside: str
    tail: str
    link: str | None


@dataclass(frozen=True, slots=True)
class TaggedShape:
    """Calls whose arguments have names and values of their own.

    head: up to the first name. first: from there to the first argument's name. inside: from an
    argument's name to its value. ends: of a value, whatever follows. more: from there to the next
    argument's name. link, tail: from there to the next call's name, or to the end. link_empty,
    tail_empty: the same behind the name of a function without arguments.
    """

    head: str
    first: str
    inside: str
    ends: str
    more: str
    link: str
    tail: str
    link_empty: str
    tail_empty: str


CallShape = JsonShape | TaggedShape


def json_shape(
    write: Callable[[Sequence[Called]], str], first: Called, second: Called
) -> JsonShape | None:
    """That of a template that writes JSON behind names; None if it writes something else.

    Args:
        first, second: different calls that were made up.
    """
    one = _cut(write([first]), [first])
    if one is None:
        return None
    head, inside, tail = one
    two = _cut(write([first, second]), [first, second])
    link = two[2] if two and two == [head, inside, two[2], inside, tail] else None
    return JsonShape(head, inside, tail, link)


def _cut(text: str, calls: Sequence[Called]) -> list[str] | None:
    """What stands before, between and after the names and arguments of calls; None if they do not
    stand there in this order."""
    parts, at = [], 0
    for call in calls:
        name = text.find(call.name, at)
        behind = name + len(call.name)
        span = _arguments(text, behind, call) if name >= 0 else None
        if span is None:
            return None
        parts += [text[at:name], text[behind : span[0]]]
        at = span[1]
    return [_ID_LETTERS.sub(ID, part) for part in (*parts, text[at:])]


def _arguments(text: str, at: int, call: Called) -> tuple[int, int] | None:
    """Where a call's arguments begin and end, as an object or as its text in quotes."""
    for start in (i for i in range(at, len(text)) if text[i] in '{"'):
        try:
            value, end = DECODER.raw_decode(text, start)
            if isinstance(value, str):
                value = json.loads(value)
        except (ValueError, RecursionError):
            continue
        if value == call.arguments:
            return start, end
    return None


def tagged_shape(
    head: str, marks: tuple[str, str, str], ends: tuple[str, str], of_none: tuple[str, str]
) -> TaggedShape | None:
    """That of a template with tags; None if nothing tells where a value ends.

    Args:
        marks: from a call's name to its first argument's, from an argument's name to its value,
            and from a value to the next argument's name.
        ends: from the last value to another call's name, or to the end. of_none: from a name to
            them, without arguments.
    """
    first, inside, more = marks
    common = _beginning([more, *ends])
    if not common.strip():
        return None
    more, link, tail = (text.removeprefix(common) for text in (more, *ends))
    return TaggedShape(head, first, inside, common, more, link, tail, *of_none)


def _beginning(texts: Sequence[str]) -> str:
    """What all texts begin with, without a part of a tag."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    common = "".join(letters[0] for letters in alike)
    tag = common.rfind("<")
    return common if tag <= common.rfind(">") else common[:tag]
