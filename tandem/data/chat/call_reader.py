"""Calls of tools read back from what a model wrote, in the form in which its template writes them.

Three forms are known: one JSON value per call, or for all calls, that holds name and arguments
(Hermes, Qwen, Llama, Mistral); a name and then the arguments as JSON (DeepSeek); a name and then
each argument in tags of its own (Qwen Coder, GLM). `call_probe` finds out which one a template has.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.data.argument_types import typed
from tandem.data.chat.spaced import Spaced, behind_space
from tandem.data.excerpt import excerpt
from tandem.data.thoughts import NO_THOUGHTS, ThoughtForm

if TYPE_CHECKING:
    from tandem.data.chat.call_shape import CallShape


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object with each key once: Python would keep the last alone."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_once)


@dataclass(frozen=True, slots=True)
class Called:
    """A call: of which function, with which arguments. id: as it was written; "" if it was not."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class CallError(ValueError):
    """A call that cannot be read; the text says what is wrong with it."""


class CallReader(ABC):
    """Reads the calls in an answer.

    Attributes:
        example: a call as the template writes it. thoughts: how it takes thoughts. shape: what it
            writes around names and arguments; None if that is not known.
    """

    example = ""
    shape: CallShape | None = None
    thoughts: ThoughtForm = NO_THOUGHTS

    def __init__(self, before: str, between: str | None, after: str) -> None:
        """What the template writes before the first call, between two (None: nothing divides them)
        and after the last."""
        self._before, self._after = Spaced(before), Spaced(after)
        self._between = None if between is None else Spaced(between)

    def read(
        self, text: str, types: Mapping[str, Mapping[str, str]], *, is_cut: bool = False
    ) -> tuple[str, list[Called]]:
        """The words of an answer, and its calls in order.

        Args:
            types: of each function's arguments, as JSON Schema names them.
            is_cut: its length's limit ended it: behind whole calls one that is not is left out.
        Raises:
            CallError: a call begins and cannot be read.
        """
        if not self._before.text:
            return self._bare(text, types, is_cut)
        words: list[str] = []
        calls: list[Called] = []
        at = 0
        while (found := self._before.search(text, at)) and not self._joins(text, found[0]):
            words.append(text[at : found[0]])
            at = self._whole_calls(text, found[1], types, calls, is_cut)
        if not calls:
            return text, []
        rest = text[at:]
        rest = rest[: self._before.opens(rest)] if is_cut else rest
        words = [words[0].rstrip(), *(part.strip() for part in (*words[1:], rest))]
        return "\n".join(filter(None, words)), calls

    def words_end(self, text: str) -> int:
        """How much of a text that may go on is words, whatever follows: up to where a call begins,
        or may be beginning."""
        begin = self.speech_begins(text)
        return begin + self._words_end(text[begin:])

    def speech_begins(self, text: str) -> int:
        """Where an answer's thoughts end, in which nothing is a call; its length within one."""
        return self.thoughts.end(text)

    def _words_end(self, text: str) -> int:
        if not self._before.text:
            begin = text.lstrip()[:1]
            return len(text) if begin and begin not in "{[" else 0
        found = self._before.search(text, 0)
        return self._before.opens(text) if found is None else found[0]

    def _joins(self, text: str, start: int) -> bool:
        """Whether what was found is the end of a longer word."""
        first = self._before.text[0]
        return first.isalnum() and start > 0 and text[start - 1].isalnum()

    def _bare(
        self, text: str, types: Mapping[str, Mapping[str, str]], is_cut: bool
    ) -> tuple[str, list[Called]]:
        """Of a template that writes nothing before a call: a whole answer that calls a function of
        those that are listed, or words.

        Raises:
            CallError: it begins like such a call.
        """
        if self._named(text) not in types:
            return text, []
        calls: list[Called] = []
        end = self._whole_calls(text, 0, types, calls, is_cut)
        if rest := text[end:].strip():
            raise CallError(f"a call must be the whole answer; got {excerpt(rest)} behind it")
        return "", calls

    def _named(self, text: str) -> str:
        """The name in a call that a text begins with, whether it is whole or not."""
        return ""

    def _whole_calls(
        self,
        text: str,
        at: int,
        types: Mapping[str, Mapping[str, str]],
        calls: list[Called],
        is_cut: bool,
    ) -> int:
        """As `_calls`; of an answer that is cut, behind whole calls what is none is skipped."""
        try:
            return self._calls(text, at, types, calls)
        except CallError:
            if is_cut and calls:
                return len(text)
            raise

    @abstractmethod
    def _calls(
        self, text: str, at: int, types: Mapping[str, Mapping[str, str]], calls: list[Called]
    ) -> int:
        """Append the calls from where the first begins to `calls`, each once it is read; returns
        where what belongs to them ends."""

    def _ended(self, text: str, at: int) -> int:
        """Where the calls end, of which the last one ends at `at`: a stop may have cut what ends
        them."""
        found, rest = self._after.match(text, at), text[at:].strip()
        if found is not None or not self._after.text:
            return at if found is None else found
        if not self._after.text.startswith(rest):
            raise CallError(f"a call must end with {self._after.text!r}; got {excerpt(rest)}")
        return len(text) if rest else at


_BESIDE = ("id", "type", "index", "tool_call_id")
"""What a call's object may have beside name and arguments."""


class JsonReader(CallReader):
    """Calls as JSON values, or as one list of them."""

    def __init__(
        self, before: str, between: str | None, after: str, path: Sequence[str], keys: Keys
    ) -> None:
        """path: keys that lead from the value to what holds name and arguments."""
        super().__init__(before, between, after)
        self._path, self._keys = path, keys
        key = re.escape(json.dumps(keys.name))
        self._name_in = re.compile(rf'\s*\[?\s*{{[^{{}}]*{key}\s*:\s*"([^"]*)"')

    def _calls(
        self, text: str, at: int, types: Mapping[str, Mapping[str, str]], calls: list[Called]
    ) -> int:
        while True:
            try:
                value, at = json_at(text, at)
            except CallError:
                calls += map(self._call, _items_before_cut(text, at))
                raise
            calls += map(self._call, value if isinstance(value, list) else [value])
            following = self._between.match(text, at) if self._between else None
            if following is None:
                return self._ended(text, at)
            at = following

    def _named(self, text: str) -> str:
        found = self._name_in.match(text)
        return found[1] if found else ""

    def _call(self, value: Any) -> Called:
        inner = value
        for key in self._path:
            inner = inner.get(key) if isinstance(inner, dict) else None
        name = inner.get(self._keys.name) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or not isinstance(name, str) or not name:
            shown = excerpt(json.dumps(value, ensure_ascii=False))
            raise CallError(f"a call must be an object with {self._keys.name!r}; got {shown}")
        ours, known = self._keys.arguments, value.get("id")
        given = [key for key in (ours, "arguments", "parameters") if key in inner]
        others = [key for key in inner if key not in (self._keys.name, *given[:1], *_BESIDE)]
        if others:  # without them it would be another call
            raise CallError(f"a call's arguments must be in {ours!r}; got {excerpt(others[0])}")
        arguments = _object(inner[given[0]] if given else None, ours)
        return Called(name, arguments, known if isinstance(known, str) else "")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a call's object."""

    name: str
    arguments: str


class NamedReader(CallReader):
    """Calls as a name and JSON behind it."""

    def __init__(self, before: str, inside: str, between: str | None, after: str) -> None:
        """inside: what stands between name and JSON."""
        super().__init__(before, between, after)
        self._inside = Spaced(inside)

    def _calls(
        self, text: str, at: int, types: Mapping[str, Mapping[str, str]], calls: list[Called]
    ) -> int:
        while True:
            if self._inside.text:
                found = self._inside.search(text, at)
            else:
                brace = text.find("{", at)
                found = None if brace < 0 else (brace, brace)
            if found is None:
                raise CallError(
                    f"after a call's name must come {self._inside.text or '{'!r}; got "
                    f"{excerpt(text[at:])}"
                )
            name = _name(text[at : found[0]])
            value, at = json_at(text, found[1])
            calls.append(Called(name, _object(value, "arguments")))
            following = self._between.match(text, at) if self._between else None
            if following is None:
                return self._ended(text, at)
            at = following


class TaggedReader(CallReader):
    """Calls as a name, and each argument's name and value in tags."""

    def __init__(self, before: str, ends: Ends, marks: Marks) -> None:
        super().__init__(before, None, "")
        self._first = Spaced(marks.first)
        self._inside = Spaced(marks.inside, before_value=True)
        ends_of_value = (marks.next, ends.between, ends.after)
        self._ends = [Spaced(each, behind_value=True) for each in ends_of_value]
        self._of_none = [Spaced(ends.between_empty), Spaced(ends.after_empty)]

    def _calls(
        self, text: str, at: int, types: Mapping[str, Mapping[str, str]], calls: list[Called]
    ) -> int:
        while True:
            heads = [self._first, *self._of_none]
            which, start, end = _earliest(text, at, heads, "a call's name")
            name = _name(text[at:start])
            arguments: dict[str, Any] = {}
            is_last = which == 2
            while which == 0:
                _, start, value_at = _earliest(text, end, [self._inside], "an argument's name")
                key = _name(text[end:start])
                which, start, end = _earliest(text, value_at, self._ends, f"the argument {key}")
                written = text[value_at:start]
                arguments[key] = typed(written, types.get(name, {}).get(key, ""))
                is_last = which == 2
            calls.append(Called(name, arguments))
            at = end
            if is_last:
                return at


@dataclass(frozen=True, slots=True)
class Ends:
    """What follows a call's last argument, if another call comes and if none does; the same of a
    call without arguments."""

    between: str
    after: str
    between_empty: str
    after_empty: str


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands between a call's name and its first argument's, between an argument's name and
    its value, and between a value and the next argument's name."""

    first: str
    inside: str
    next: str


def json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value from here on, and where it ends."""
    at = behind_space(text, at)
    try:
        return DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        raise CallError(f"a call must be JSON; got {excerpt(text[at:])}") from None


def _items_before_cut(text: str, at: int) -> list[Any]:
    """The whole values of a list that does not end."""
    found: list[Any] = []
    at = behind_space(text, at)
    while text.startswith("," if found else "[", at):
        try:
            value, at = json_at(text, at + 1)
        except CallError:
            break
        found.append(value)
        at = behind_space(text, at)
    return found


def _object(value: Any, key: str) -> dict[str, Any]:
    """A call's arguments; none are an empty object."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            value = [value]
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CallError(f"{key} must be a JSON object; got {excerpt(json.dumps(value))}")
    return value


def _name(text: str) -> str:
    """The name that a text is.

    Raises:
        CallError: it is none.
    """
    name = text.strip()
    if not name or any(letter.isspace() for letter in name):
        raise CallError(f"a name must be one word; got {excerpt(text)}")
    return name


def _earliest(text: str, at: int, literals: Sequence[Spaced], what: str) -> tuple[int, int, int]:
    """Which literal comes first, the longest of those at one place, and where it begins and ends.

    Raises:
        CallError: none comes.
    """
    found = [
        (span[0], -span[1], which)
        for which, literal in enumerate(literals)
        if (span := literal.search(text, at))
    ]
    if not found:
        expected = " or ".join(repr(literal.text) for literal in literals if literal.text)
        raise CallError(f"{what} must be followed by {expected}; got {excerpt(text[at:])}")
    start, end, which = min(found)
    return which, start, -end
