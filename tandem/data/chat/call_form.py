"""In which form a chat template takes calls of tools, and whether it writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.data.chat.call_probe import reader_of
from tandem.data.chat.call_reader import Called, CallReader
from tandem.data.chat.changed_json import PROBE
from tandem.data.chat.template_limits import deadline
from tandem.data.thoughts import NO_THOUGHTS, ThoughtForm
from tandem.data.tools import checked_calls, for_template
from tandem.errors import DataError
from tandem.message import Message

_MOST_PROBED = 4
"""Calls of a probe's turn."""
_FUNCTION = {
    "name": PROBE,
    "description": PROBE,
    "parameters": {
        "type": "object",
        "properties": {PROBE: {"type": "string", "description": PROBE}},
        "required": [PROBE],
    },
}
PROBE_TOOLS = json.dumps([{"type": "function", "function": _FUNCTION}])
"""Tools to try a template with."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a turn with calls is given to a template.

    as_text: the arguments as JSON text, and not as objects.
    no_words: what stands for content where there are only calls; `content` is left out if it is a
        list.
    """

    as_text: bool
    no_words: str | list[str] | None

    def turn(self, message: Message) -> dict[str, Any]:
        """A turn with calls that are in this form already."""
        turn = message.as_dict()
        if not message.content.strip():
            turn["content"] = self.no_words
            if isinstance(self.no_words, list):
                del turn["content"]
        return turn


LEFT_OUT: list[str] = []
FORMS = tuple(
    CallForm(as_text, words) for as_text in (False, True) for words in (LEFT_OUT, "", None)
)
"""The preferred one first: what Hugging Face's documentation asks for."""


_Render = Callable[[tuple[Message, ...], bool, str, CallForm | None], str]


def probe_turn(number: int, words: str, form: CallForm) -> Message:
    """A turn with `number` calls, each with a name and an argument of its own."""
    calls = [
        Called(f"{PROBE}name{i}", {f"{PROBE}key{i}": f"{PROBE}value{i}"}, f"{PROBE}{i}")
        for i in range(number)
    ]
    given = for_template(json_of(calls), as_text=form.as_text)
    return Message("assistant", words, tool_calls=given)


def json_of(calls: Sequence[Called]) -> str:
    """Calls as a turn has them."""
    return json.dumps(
        [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ],
        ensure_ascii=False,
    )


def _missing(text: str, number: int, words: str) -> str:
    """What a template's text lacks of a probe's turn: "calls" or "words"; "" if it has all."""
    folded = text.casefold()
    parts = [f"{PROBE}{part}{i}" for i in range(number) for part in ("name", "key", "value")]
    if any(part.casefold() not in folded for part in parts):
        return "calls"
    return "words" if words.casefold() not in folded else ""


class Calls:
    """How calls must be given to one template.

    Args:
        render: the text of turns, up to where the assistant begins or not, with tools (JSON text)
            and calls in a form; it may raise anything.
        name: the template's, for messages.
    Attributes:
        opening: turns that the template takes. lead, terminator: what stands before and behind an
            answer's words (see `ChatTemplate`). thoughts: how it takes thoughts. All are set before
            anything is asked.
    """

    opening: tuple[Message, ...] = ()
    lead = terminator = ""
    thoughts: ThoughtForm = NO_THOUGHTS

    def __init__(self, render: _Render, name: str) -> None:
        self._render = render
        self._name = name
        self._forms: dict[bool, CallForm | None] = {}
        self._losses: dict[tuple[bool, bool, int], str] = {}
        self._readers: list[CallReader | None] = []

    def in_form(self, messages: Sequence[Message], has_tools: bool, where: str) -> list[Message]:
        """The turns with calls as the template takes them.

        Raises:
            DataError: as `checked_form`, or calls that are no list of calls.
        """
        if not any(m.tool_calls for m in messages):
            return list(messages)
        for calls in filter(None, (m.tool_calls for m in messages)):
            checked_calls(calls)
        as_text = self.checked_form(messages, has_tools, where).as_text
        return [
            replace(m, tool_calls=for_template(m.tool_calls, as_text=as_text))
            if m.tool_calls
            else m
            for m in messages
        ]

    def checked_form(self, messages: Sequence[Message], has_tools: bool, where: str) -> CallForm:
        """The form of the calls in `messages`.

        Raises:
            DataError: the template leaves calls out, or the words beside them.
        """
        form = self.form(has_tools)
        for turn in messages:
            if not turn.tool_calls:
                continue
            words, number = bool(turn.content.strip()), len(json.loads(turn.tool_calls))
            lost = self._lost(has_tools, words, number, form) if form else "calls"
            if lost == "words":
                raise DataError(
                    f"{where}: a turn with tool calls must have no words with the {self._name}, "
                    "which leaves them out; got both. Remove one of them, or use another "
                    "chat_template."
                )
            if lost:
                left = "some of them out" if form and number > 1 else "them out"
                raise DataError(
                    f"{where}: turns must have no tool calls with the {self._name}, which leaves "
                    f"{left}; got {number}. Write the call into the content, as the model is to "
                    "write it, or use a chat_template that writes calls."
                )
        return form or FORMS[0]

    def form(self, has_tools: bool) -> CallForm | None:
        """The first form in which the template writes a call; None if it writes none."""
        if has_tools not in self._forms:
            with deadline():
                found = [form for form in FORMS if self._works(has_tools, form)]
            self._forms[has_tools] = found[0] if found else None
        return self._forms[has_tools]

    def reader(self) -> CallReader | None:
        """How to read calls in what a model wrote, with tools in its prompt; None if the template
        writes none, or in a form that is not known."""
        if not self._readers:
            with deadline():
                form = self.form(True)
                reader = reader_of(self._write) if form else None
                if reader is not None:
                    reader.thoughts = self.thoughts
                self._readers = [reader]
        return self._readers[0]

    def _write(self, calls: Sequence[Called]) -> str:
        """What the template writes of calls, without the end of the turn; "" if it refuses."""
        form = self.form(True) or FORMS[0]
        given = for_template(json_of(calls), as_text=form.as_text)
        turn = Message("assistant", "", tool_calls=given)
        try:
            prompt = self._render(self.opening, True, PROBE_TOOLS, form)
            text = self._render((*self.opening, turn), False, PROBE_TOOLS, form)
        except TimeoutError:
            raise
        except Exception:  # a template is a program, and some take one call at a time
            return ""
        if not text.startswith(prompt):  # where the turn begins is not known
            return ""
        text = text[len(prompt) :].removeprefix(self.lead).rstrip().removesuffix(self.terminator)
        # An answer would have ended before a call that what ends it stands in.
        return "" if self.terminator and self.terminator in text else text

    def _works(self, has_tools: bool, form: CallForm) -> bool:
        try:
            text = self._written(has_tools, probe_turn(1, "", form), form)
        except TimeoutError:
            raise
        except Exception:  # a template is a program: it can divide by zero
            return False
        return not _missing(text, 1, "") and "None" not in text

    def _lost(self, has_tools: bool, has_words: bool, number: int, form: CallForm) -> str:
        """What the template leaves out of a turn with `number` calls: see `_missing`."""
        number = min(number, _MOST_PROBED)
        key = (has_tools, has_words, number)
        if key not in self._losses:
            words = f"{PROBE}words" if has_words else ""
            try:
                text = self._written(has_tools, probe_turn(number, words, form), form)
                self._losses[key] = _missing(text, number, words)
            except TimeoutError:
                raise
            except Exception:  # what it takes, the turns themselves show
                self._losses[key] = ""
        return self._losses[key]

    def _written(self, has_tools: bool, turn: Message, form: CallForm) -> str:
        """What the template writes of an assistant's turn."""
        tools = PROBE_TOOLS if has_tools else ""
        prompt = self._render(self.opening, True, tools, form)
        return self._render((*self.opening, turn), False, tools, form).removeprefix(prompt)
