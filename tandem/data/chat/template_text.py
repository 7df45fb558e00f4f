"""Turns to text by a chat template, as it takes calls and thoughts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from tandem.data.chat.call_form import CallForm
from tandem.data.chat.changed_json import as_compared, has_compared
from tandem.data.chat.template_call import TemplateCall
from tandem.data.short_cache import short_cache
from tandem.data.thoughts import NO_THOUGHTS, ThoughtForm
from tandem.message import Message

_FRAME = 100_000
"""Characters that a template may write of its own for a conversation, and for each of its turns."""
_INDENTED = 20
"""Characters that it may write for each of tools and calls: JSON may be indented."""


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """How an answer follows its prompt.

    lead: template text between the prompt and the words of an answer without thoughts.
    cue: what prompts end with and answered turns of the template may lack: <think>, say.
    in_place: what those have instead of cue and lead.
    joined: whether Tandem writes prompt, lead and answer one after another where the template
        writes an answered turn that does not begin with its prompt, so that a model learns an
        answer behind the very prompt which asks for it.
    thoughts: how it takes thoughts.
    """

    lead: str = ""
    cue: str = ""
    in_place: str = ""
    joined: bool = False
    thoughts: ThoughtForm = NO_THOUGHTS


class TemplateText:
    """The text of turns.

    Attributes:
        frame: how answers follow their prompts; none is joined until it is set.
    """

    def __init__(self, call: TemplateCall) -> None:
        self._template = call
        self.frame = AnswerFrame()
        # Both answers of a pair, and all uses of a held-out row, share their prompt.
        self._rendered = short_cache(64)(self._called)

    def __call__(
        self, messages: tuple[Message, ...], prompt: bool, tools: str, form: CallForm | None
    ) -> str:
        """The text of turns, with `prompt` up to where the assistant begins.

        Args:
            tools: JSON text; "" for none. form: of the calls, if there are some.
        Raises:
            Exception: anything that a template may raise.
        """
        last = messages[-1] if messages else None
        if prompt or not self.frame.joined or last is None or last.role != "assistant":
            return self._rendered(messages, prompt, tools, form)
        return self._joined(messages, tools, form)

    def _joined(self, messages: tuple[Message, ...], tools: str, form: CallForm | None) -> str:
        """The prompt of the last answer, and behind it the answer."""
        frame, last = self.frame, messages[-1]
        own = frame.lead
        if last.thoughts and frame.thoughts.how == "joined":
            own = frame.thoughts.before + last.thoughts + frame.thoughts.between
            messages = (*messages[:-1], replace(last, thoughts=""))
        before = self._rendered(messages[:-1], True, tools, form)
        text = self._rendered(messages, False, tools, form)
        base = before.removesuffix(frame.cue)
        shows_cue = bool(frame.cue) and text.startswith(before)
        shows_thoughts = bool(last.thoughts) and frame.thoughts.how != "joined"
        if shows_cue or shows_thoughts or not text.startswith(base):
            return text
        return before + own + text[len(base) :].removeprefix(frame.in_place)

    def _called(
        self, messages: tuple[Message, ...], prompt: bool, tools: str, form: CallForm | None
    ) -> str:
        dialog = [self._given(message, form) for message in messages]
        listed = json.loads(tools) if tools else None
        if has_compared(tools):
            listed = as_compared(listed)
        if any(has_compared(m.tool_calls) for m in messages if m.tool_calls):
            dialog = as_compared(dialog)
        text = self._template(dialog, prompt, listed)
        written = len(tools) + sum(len(m.tool_calls) for m in messages)
        said = sum(len(m.content) + len(m.thoughts) for m in messages)
        room = _FRAME + 2 * said + _FRAME * len(messages)
        if len(text) > room + _INDENTED * written:
            raise ValueError(f"{len(text)} characters, more than {room + _INDENTED * written}")
        return text

    def _given(self, message: Message, form: CallForm | None) -> dict[str, Any]:
        thoughts = message.thoughts
        if thoughts:
            message = replace(message, thoughts="")
        turn = form.turn(message) if form and message.tool_calls else message.as_dict()
        return self.frame.thoughts.given(turn, thoughts) if thoughts else turn
