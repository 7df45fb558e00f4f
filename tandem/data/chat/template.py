"""Conversations as text: a tokenizer's chat template, and where the assistant's words lie in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from tandem.data.chat.answer_places import MOST_TURNS, places
from tandem.data.chat.call_form import PROBE_TOOLS, Calls
from tandem.data.chat.changed_json import (
    COMPARED,
    NEUTRAL,
    PROBE,
    Change,
    changed_tools,
    changed_turn,
    each,
    neutral_tools,
    neutral_turns,
)
from tandem.data.chat.default_template import DEFAULT_TEMPLATE
from tandem.data.chat.own_template import OwnTemplate
from tandem.data.chat.template_call import TemplateCall
from tandem.data.chat.template_limits import require_bounded
from tandem.data.chat.template_text import TemplateText
from tandem.data.chat.template_trial import cause, require_learnable, tried
from tandem.data.control import ControlTokens, unescaped
from tandem.data.excerpt import excerpt
from tandem.data.short_cache import short_cache
from tandem.errors import DataError, ModelError, RewrittenError
from tandem.types import Message


@dataclass(frozen=True, slots=True)
class Part:
    """A span of a rendered conversation.

    answer: the assistant wrote it, and its terminator follows (it is not in `text`).
    before: the end of the text before it, long enough for any control string.
    learned: as the turn's, if it is an answer.
    """

    text: str
    answer: bool
    before: str
    learned: bool = True


class ChatTemplate:
    """The only way from a conversation to text.

    Args:
        tokenizer: its chat template is used; without one, a documented default.
        control: its control tokens.
        prefix: the text of the tokenizer's BOS, for the default template.
        own: the user's own, if the tokenizer was given one; messages name it.
    Attributes:
        name: what messages call it.
        source: the jinja template.
        calls: how calls of tools must be given.
        thoughts: how what the assistant thinks before it speaks must be given.
        opening: turns that it accepts: a user's, after a system turn if it requires one.
        lead: template text between the generation prompt and the assistant's words.
        trail: template text between those words and the terminator.
        terminator: the control string that ends an assistant's turn; "" if the template writes none
            (then EOS is used).
    Raises:
        ModelError: the template cannot be used for training.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        control: ControlTokens,
        prefix: str,
        own: OwnTemplate | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.tokenizer_name = str(tokenizer.name_or_path)
        self._advice = "Give the tokenizer another chat_template, or a run --chat-template FILE."
        self.source: str
        if own is not None:
            self.source = own.filled(prefix)
            self.name, self._advice = own.name, own.advice
        elif tokenizer.chat_template:
            self.source = tokenizer.get_chat_template()
            self.name = f"chat template of tokenizer {tokenizer.name_or_path!r}"
        else:
            self.source = DEFAULT_TEMPLATE.replace("PREFIX", json.dumps(prefix))
            self.name = "default chat template"
        self._control = control
        self._tools = self._mark = ""
        self._controls: Callable[[tuple[Message, ...], bool, str], list[int]]
        self._controls = short_cache(256)(self._controls_of)
        self._given = short_cache(64)(self._with_tools)
        require_bounded(self.source, self.name, self._advice)
        call = TemplateCall(tokenizer, self.source)
        self._rendered = TemplateText(call)
        self.calls = Calls(self._rendered, self.name)
        self.opening, frame, after = tried(
            self._rendered, call, self.source, self.name, self._advice
        )
        self._rendered.frame, self.lead, self.thoughts = frame, frame.lead, frame.thoughts
        found = control.find(after)
        self.terminator = after[found[0].start : found[0].end] if found else ""
        stops = self.terminator if self.terminator in self.thoughts.between else ""
        is_named = self.thoughts.begins in self.source
        self.thoughts = replace(self.thoughts, stops=stops, is_named=is_named)
        self.calls.opening = self.opening
        self.calls.lead, self.calls.terminator = self.lead, self.terminator
        self.calls.thoughts = self.thoughts
        self.trail = after[: found[0].start] if found else ""
        self._beyond = after[found[0].end :] if found else after
        if own is not None:
            require_learnable(self, self._call(self.opening, True), self._beyond, self._advice)

    def given(self, tools: str, mark: str) -> ChatTemplate:
        """The same for conversations with tools.

        Args:
            tools: a list as JSON text, with marks inside every control string; "" for none.
            mark: as for `text`; "" if nothing but the words of turns may have it.
        """
        return self._given(tools, mark) if tools or mark else self

    def hides_tools(self, messages: Sequence[Message]) -> bool:
        """Whether nothing is written of tools.

        Raises:
            DataError: the template refuses these turns.
        """
        shown = self.given(PROBE_TOOLS, "").prompt(messages, "probe")
        return PROBE.casefold() not in shown.casefold()

    def prompt(self, messages: Sequence[Message], where: str) -> str:
        """The text up to where the assistant begins.

        Raises:
            DataError: the template refuses these turns.
        """
        return self.render(tuple(messages), True, where)

    def hides(self, messages: Sequence[Message], role: str) -> bool:
        """Whether nothing is written of the turns of a role, in upper or lower case.

        Raises:
            DataError: the template refuses these turns.
        """
        probed = [replace(m, content=PROBE) if m.role == role else m for m in messages]
        return PROBE.casefold() not in self.prompt(probed, "probe").casefold()

    def text(
        self, messages: Sequence[Message], mark: str, where: str, *, answered: bool = False
    ) -> tuple[tuple[Message, ...], str]:
        """The text of a conversation, in which every control string is the template's own.

        A template is a program: by deleting or rewriting text it can form a control string from
        what a person wrote. So the control strings of the text are compared with those of the same
        turns with neutral words. A turn that adds others is spelled out, with the mark after every
        character, so that nothing in it can match. What a template writes for the name of a
        function or a tool's type is its own.

        Args:
            messages: turns with marks inside every control string (ControlTokens.cut).
            mark: the character that tokenizing drops.
            answered: `messages` end with the assistant's answer, and only that may be spelled out;
                otherwise the text goes up to where the assistant begins.
        Returns:
            the turns as they were rendered, and their text.
        Raises:
            DataError: the template refuses these turns, makes control tokens of them however they
                are written, or cannot write tools and calls with marks in them.
        """
        turns = tuple(messages)
        text = self.render(turns, not answered, where)
        for change in (NEUTRAL, COMPARED):
            neutral = neutral_turns(turns, distinct=bool(self._tools), change=change)
            if self._control.written(text) == self._own_controls(neutral, answered, change):
                self._require_as_written(turns, text, mark, answered, where)
                return turns, text
        if len(turns) <= MOST_TURNS:
            first = len(turns) - 1 if answered else 0
            spelled = each(mark.join)
            turns = tuple(
                changed_turn(m, spelled)
                if i >= first and self._steers((*neutral[:i], m, *neutral[i + 1 :]), answered)
                else m
                for i, m in enumerate(turns)
            )
            text = self.render(turns, not answered, where)
            if self._control.written(text) == self._own_controls(neutral, answered, COMPARED):
                self._require_as_written(turns, text, mark, answered, where)
                return turns, text
        raise DataError(
            f"{where}: turns must not become control tokens in the {self.name}; got "
            f"{excerpt(self._foreign(text, neutral, answered))} formed from their text. Remove "
            "this row, or use a chat_template that writes contents as they are."
        )

    def answer(self, messages: Sequence[Message], text: str, prompt: str, where: str) -> Part:
        """What the assistant wrote as the last of `messages`, without the terminator.

        Args:
            text: the text of these turns.
            prompt: the text of the turns before the last.
        Raises:
            ModelError: the template does not put the answer right after the prompt.
            DataError: the same, in a conversation with tools or calls.
        """
        end = self.answer_end(text, prompt, messages[-1])
        if end is None and messages[-1].tool_calls:
            raise DataError(
                f"{where}: an answer with tool calls must follow the prompt and end as others do, "
                f"with {excerpt(self.terminator + self._beyond)}; the {self.name} writes "
                f"{excerpt(text[-60:])}. Write the call into the content, or use another "
                "chat_template."
            )
        if end is None:
            raise self._error_of(messages)(
                f"{self.name} must render an answered prompt as the prompt, the answer and "
                f"{excerpt(self.trail + self.terminator + self._beyond)}; got something else for "
                f"{where} after {excerpt(prompt[-30:])}. {self._advice}"
            )
        return self._part(text, len(prompt), end, True)

    def parts(
        self, messages: Sequence[Message], text: str, where: str, every_answer: bool
    ) -> list[Part]:
        """The prompt's text, cut where earlier answers begin and end.

        Some templates rewrite earlier turns (they drop the reasoning). Such a turn is not what the
        assistant wrote and becomes part of the prompt, unless `every_answer`, if it is `learned`.

        Args:
            text: the text of these turns, up to where the assistant begins.
        Raises:
            DataError: the template refuses these turns.
            RewrittenError: `every_answer`, and the template rewrites an earlier turn that is
                learned.
        """
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if answers[:1] == [0]:
            raise DataError(
                f"{where}: a conversation must begin with a system or a user turn; got an "
                "assistant turn. Put the turn that it answers before it."
            )
        parts: list[Part] = []
        cursor = 0
        for i, placed in zip(answers, places(self, messages, answers, text, where), strict=True):
            if placed is None:
                if every_answer and messages[i].learned:
                    raise RewrittenError(
                        f"{where}: earlier turns must be rendered as they were at first, to be "
                        f"learned; the {self.name} rewrites turn {i + 1}. Give the turn weight 0, "
                        "to show it and not learn it, in a row that ends with a later answer."
                    )
                continue
            parts.append(self._part(text, cursor, placed.start, False))
            answer = self._part(text, placed.start, placed.end, True)
            parts.append(replace(answer, learned=messages[i].learned))
            cursor = placed.end + len(self.terminator)
            if not self.terminator and text.startswith(self._tokenizer.eos_token, placed.end):
                cursor += len(self._tokenizer.eos_token)
        return [*parts, self._part(text, cursor, len(text), False)]

    def answer_end(self, text: str, prompt: str, answer: Message) -> int | None:
        """Where the final answer ends in `text`; None if it does not follow `prompt`."""
        trail = "" if answer.tool_calls else self.trail  # what stands behind words
        after = trail + self.terminator + self._beyond
        room = len(text) - len(prompt) - len(after)
        if room < 0 or not text.startswith(prompt) or not text.endswith(after):
            return None
        return len(prompt) + room + len(trail)

    def _error_of(self, messages: Sequence[Message]) -> type[DataError | ModelError]:
        """Whose fault it is: most templates take tools, calls and thoughts in another way, or not,
        so that other rows can be used."""
        has_more = any(m.tool_calls or m.thoughts or m.role == "tool" for m in messages)
        return DataError if self._tools or has_more else ModelError

    def _part(self, text: str, start: int, end: int, answer: bool) -> Part:
        before = text[max(0, start - self._control.longest) : start]
        return Part(text[start:end], answer, before)

    def _with_tools(self, tools: str, mark: str) -> ChatTemplate:
        """As `given`. Tools of which the template makes control tokens are spelled out, as turns
        are."""
        template = copy(self)
        template._tools, template._mark = tools, mark
        if mark and tools:
            with suppress(Exception):  # the turns that the template takes say more
                text = template._call(self.opening, True)
                if not any(
                    self._control.written(text)
                    == self._controls(self.opening, False, neutral_tools(tools, change))
                    for change in (NEUTRAL, COMPARED)
                ):
                    template._tools = changed_tools(tools, each(mark.join))
        return template

    def _require_as_written(
        self, turns: tuple[Message, ...], text: str, mark: str, answered: bool, where: str
    ) -> None:
        """Refuse marks in tools and calls by which the template writes something else.

        Raises:
            DataError: without the marks it is not what the template writes for tools and calls that
                have none.
        """
        names = ("tool_calls", "tool_call_id", "name")
        said = [self._tools, *(getattr(turn, name) for turn in turns for name in names)]
        if not any(mark in each for each in said):
            return
        template = copy(self)
        template._tools = self._tools.replace(mark, "")
        plain = tuple(
            replace(turn, **{name: getattr(turn, name).replace(mark, "") for name in names})
            for turn in turns
        )
        expected = template.render(plain, not answered, where).replace(mark, "")
        found = text.replace(mark, "")
        if found != expected:
            pairs = enumerate(zip(found, expected, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))
            raise DataError(
                f"{where}: tools and calls must be written as they are, to keep their text from "
                f"becoming control tokens; the {self.name} does something else with it at "
                f"{excerpt(expected[max(0, at - 20) : at + 20])}. Remove control strings from the "
                "row, or use a chat_template that writes tools and calls with tojson."
            )

    def _call(self, messages: tuple[Message, ...], prompt: bool) -> str:
        has_calls = any(m.tool_calls for m in messages)
        form = self.calls.form(bool(self._tools)) if has_calls else None
        text = self._rendered(messages, prompt, self._tools, form)
        return unescaped(text, self._mark) if self._mark else text

    def _own_controls(
        self, neutral: tuple[Message, ...], answered: bool, change: Change
    ) -> list[int]:
        """The control tokens that the template writes for turns with neutral words."""
        tools = self._tools and neutral_tools(self._tools, change)
        return self._controls(neutral, answered, tools)

    def _controls_of(self, neutral: tuple[Message, ...], answered: bool, tools: str) -> list[int]:
        template = self if tools == self._tools else self.given(tools, "")
        return self._control.written(template._call(neutral, not answered))

    def _steers(self, turns: tuple[Message, ...], answered: bool) -> bool:
        """Whether the one turn with its own words adds control tokens."""
        neutral = neutral_turns(turns, distinct=bool(self._tools), change=COMPARED)
        text = self._call(turns, not answered)
        return self._control.written(text) != self._own_controls(neutral, answered, COMPARED)

    def _foreign(self, text: str, neutral: tuple[Message, ...], answered: bool) -> str:
        """The first control string of `text` that is not the template's own."""
        own = self._own_controls(neutral, answered, COMPARED)
        found = self._control.find(text)
        pairs = enumerate(found)
        other = next((m for i, m in pairs if own[i : i + 1] != [m.token_id]), None)
        return text[other.start : other.end] if other else f"{len(found)} instead of {len(own)}"

    def render(self, messages: tuple[Message, ...], prompt: bool, where: str) -> str:
        """The text of turns, with `prompt` up to where the assistant begins.

        Raises:
            DataError: the template refuses these turns.
        """
        try:
            return self._call(messages, prompt)
        except Exception as error:  # as in `_probe`
            raise DataError(
                f"{where}: turns must suit the {self.name}; got {cause(error)} from "
                f"it for {_roles(messages)}. Reorder or remove turns."
            ) from error


def _roles(messages: Sequence[Message], limit: int = 20) -> str:
    more = " ..." if len(messages) > limit else ""
    return " ".join(m.role for m in messages[:limit]) + more
