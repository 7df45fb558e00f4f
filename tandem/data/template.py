"""Conversations as text: a tokenizer's chat template, and where the assistant's words lie in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tandem.data.control import ControlTokens
from tandem.data.default_template import DEFAULT_TEMPLATE
from tandem.data.excerpt import excerpt
from tandem.data.own_template import OwnTemplate
from tandem.data.template_call import TemplateCall
from tandem.data.template_limits import deadline, require_bounded
from tandem.errors import DataError, ModelError
from tandem.types import Message

_PROBE = "Qz7probe"
_FRAME = 100_000
"""Characters that a template may write of its own for a conversation, and for each of its turns."""
_EXACT_ANSWERS = 32
"""Up to this many earlier answers, each is located by rendering everything before it."""
_CHECKS = 8
"""How many answers of a longer conversation are located that way, to check the others."""
_MOST_TURNS = 512
"""Most turns whose answers are all located that way if the checks fail; time is quadratic."""


@dataclass(frozen=True, slots=True)
class Part:
    """A span of a rendered conversation.

    answer: the assistant wrote it, and its terminator follows (it is not in `text`).
    before: the end of the text before it, long enough for any control string.
    """

    text: str
    answer: bool
    before: str


@dataclass(frozen=True, slots=True)
class _Placed:
    """An earlier answer in the text of a whole conversation: text[start:end]."""

    start: int
    end: int


class ChatTemplate:
    """The only way from a conversation to text.

    Args:
        tokenizer: its chat template is used; without one, a documented default.
        control: its control tokens.
        prefix: the text of the tokenizer's BOS, for the default template.
        own: the user's own, if the tokenizer was given one; messages name it.
    Attributes:
        source: the jinja template.
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
        self._advice = "Give the tokenizer another chat_template, or a run --chat-template FILE."
        self.source: str
        if own is not None:
            self.source = own.filled(prefix)
            self._name, self._advice = own.name, own.advice
        elif tokenizer.chat_template:
            self.source = tokenizer.get_chat_template()
            self._name = f"chat template of tokenizer {tokenizer.name_or_path!r}"
        else:
            self.source = DEFAULT_TEMPLATE.replace("PREFIX", json.dumps(prefix))
            self._name = "default chat template"
        self._control = control
        self._own_controls: Callable[[tuple[Message, ...], bool], list[int]]
        self._own_controls = lru_cache(maxsize=256)(self._own_controls_of)
        # Both answers of a pair, and all uses of a held-out row, share their prompt.
        self._call = lru_cache(maxsize=64)(self._called)
        require_bounded(self.source, self._name, self._advice)
        self._template = TemplateCall(tokenizer, self.source)
        self.opening, self.lead, after = self._probe()
        found = control.find(after)
        self.terminator = after[found[0].start : found[0].end] if found else ""
        self.trail = after[: found[0].start] if found else ""
        self._beyond = after[found[0].end :] if found else after
        if own is not None:
            self._require_learnable()

    def prompt(self, messages: Sequence[Message], where: str) -> str:
        """The text up to where the assistant begins.

        Raises:
            DataError: the template refuses these turns.
        """
        return self._render(tuple(messages), True, where)

    def hides(self, messages: Sequence[Message], role: str) -> bool:
        """Whether nothing is written of the turns of a role, in upper or lower case.

        Raises:
            DataError: the template refuses these turns.
        """
        probed = [Message(role, _PROBE) if m.role == role else m for m in messages]
        return _PROBE.casefold() not in self.prompt(probed, "probe").casefold()

    def text(
        self, messages: Sequence[Message], mark: str, where: str, *, answered: bool = False
    ) -> tuple[tuple[Message, ...], str]:
        """The text of a conversation, in which every control string is the template's own.

        A template is a program: by deleting or rewriting text it can form a control string from
        what a person wrote. So the control strings of the text are compared with those of the same
        turns with neutral words. A turn that adds others is spelled out, with the mark after every
        character, so that nothing in it can match.

        Args:
            messages: turns with marks inside every control string (ControlTokens.cut).
            mark: the character that tokenizing drops.
            answered: `messages` end with the assistant's answer, and only that may be spelled out;
                otherwise the text goes up to where the assistant begins.
        Returns:
            the turns as they were rendered, and their text.
        Raises:
            DataError: the template refuses these turns, or makes control tokens of them however
                they are written.
        """
        turns = tuple(messages)
        text = self._render(turns, not answered, where)
        neutral = tuple(map(_neutral, turns))
        if self._control.written(text) == self._own_controls(neutral, answered):
            return turns, text
        if len(turns) <= _MOST_TURNS:
            first = len(turns) - 1 if answered else 0
            turns = tuple(
                Message(m.role, mark.join(m.content))
                if i >= first and self._steers((*neutral[:i], m, *neutral[i + 1 :]), answered)
                else m
                for i, m in enumerate(turns)
            )
            text = self._render(turns, not answered, where)
            if self._control.written(text) == self._own_controls(neutral, answered):
                return turns, text
        raise DataError(
            f"{where}: turns must not become control tokens in the {self._name}; got "
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
        """
        end = self._answer_end(text, prompt)
        if end is None:
            raise ModelError(
                f"{self._name} must render an answered prompt as the prompt, the answer and "
                f"{excerpt(self.trail + self.terminator + self._beyond)}; got something else for "
                f"{where} after {excerpt(prompt[-30:])}. {self._advice}"
            )
        return self._part(text, len(prompt), end, True)

    def parts(
        self, messages: Sequence[Message], text: str, where: str, every_answer: bool
    ) -> list[Part]:
        """The prompt's text, cut where earlier answers begin and end.

        Some templates rewrite earlier turns (they drop the reasoning). Such a turn is not what the
        assistant wrote and becomes part of the prompt, unless `every_answer`.

        Args:
            text: the text of these turns, up to where the assistant begins.
        Raises:
            DataError: the template refuses these turns.
            ModelError: `every_answer`, and the template rewrites an earlier turn.
        """
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if answers[:1] == [0]:
            raise DataError(
                f"{where}: a conversation must begin with a system or a user turn; got an "
                "assistant turn. Put the turn that it answers before it."
            )
        parts: list[Part] = []
        cursor = 0
        for i, placed in zip(answers, self._places(messages, answers, text, where), strict=True):
            if placed is None:
                if every_answer:
                    raise ModelError(
                        f"{self._name} must render earlier turns as it did at first; got a "
                        f"rewrite of turn {i + 1} in {where}. Train on the last turn alone. "
                        f"{self._advice}"
                    )
                continue
            parts.append(self._part(text, cursor, placed.start, False))
            parts.append(self._part(text, placed.start, placed.end, True))
            cursor = placed.end + len(self.terminator)
            if not self.terminator and text.startswith(self._tokenizer.eos_token, placed.end):
                cursor += len(self._tokenizer.eos_token)
        return [*parts, self._part(text, cursor, len(text), False)]

    def _places(
        self, messages: Sequence[Message], answers: Sequence[int], text: str, where: str
    ) -> list[_Placed | None]:
        """The positions of the answers in a conversation's text; None for a rewritten one.

        An answer begins where the text of all turns before it ends. Rendering those for every
        answer takes quadratic time, so in a long conversation only some are located that way. The
        others follow from windows of two answers and from the text itself.

        Raises:
            DataError: a long conversation whose windows disagree with those few.
        """
        if len(answers) > _EXACT_ANSWERS:
            places = self._places_by_windows(messages, answers, text, where)
            every = len(answers) // _CHECKS
            if places and all(
                places[k] == self._place(messages, answers[k], text, where)
                for k in range(len(answers) - 1, 0, -every)
            ):
                return places
            if len(messages) > _MOST_TURNS:
                raise DataError(
                    f"{where}: a conversation must have at most {_MOST_TURNS} turns with a "
                    f"{self._name} whose turns depend on distant turns; got {len(messages)}. "
                    "Split the conversation."
                )
        return [self._place(messages, i, text, where) for i in answers]

    def _place(self, messages: Sequence[Message], i: int, text: str, where: str) -> _Placed | None:
        """The position of answer i in `text`, found by rendering all turns before it."""
        prompt = self.prompt(messages[:i], where)
        then = self._render(tuple(messages[: i + 1]), False, where)
        end = self._answer_end(then, prompt)
        if end is None or not text.startswith(then[:end] + self.terminator):
            return None
        return _Placed(len(prompt), end)

    def _places_by_windows(
        self, messages: Sequence[Message], answers: Sequence[int], text: str, where: str
    ) -> list[_Placed | None]:
        """As `_places`, from renderings of two answers at a time; [] if they do not fit."""
        num_system = next((i for i, m in enumerate(messages) if m.role != "system"), 0)
        system = messages[:num_system]
        places = [self._place(messages, i, text, where) for i in answers[:2]]
        for first, before, this in zip(answers, answers[1:], answers[2:], strict=False):
            window = [*system, *messages[first + 1 : this + 1]]
            try:
                whole = self.prompt(window[:-1], where)
                then = self._render(tuple(window), False, where)
                last = self._place(window, len(system) + before - first - 1, whole, where)
            except DataError:  # the template refuses this excerpt
                return []
            end, known = self._answer_end(then, whole), places[-1]
            if end is None or last is None or known is None:
                return []
            start = known.end + len(whole) - last.end
            expected = whole[last.end :] + then[len(whole) : end] + self.terminator
            if not text.startswith(expected, known.end):
                return []
            places.append(_Placed(start, start + end - len(whole)))
        return places

    def _answer_end(self, text: str, prompt: str) -> int | None:
        """Where the final answer ends in `text`; None if it does not follow `prompt`."""
        after = self.trail + self.terminator + self._beyond
        room = len(text) - len(prompt) - len(after)
        if room < 0 or not text.startswith(prompt) or not text.endswith(after):
            return None
        return len(prompt) + room + len(self.trail)

    def _part(self, text: str, start: int, end: int, answer: bool) -> Part:
        before = text[max(0, start - self._control.longest) : start]
        return Part(text[start:end], answer, before)

    def _own_controls_of(self, neutral: tuple[Message, ...], answered: bool) -> list[int]:
        """The control tokens that the template writes for turns with neutral words."""
        return self._control.written(self._call(neutral, not answered))

    def _steers(self, turns: tuple[Message, ...], answered: bool) -> bool:
        """Whether the one turn with its own words adds control tokens."""
        neutral = tuple(map(_neutral, turns))
        text = self._call(turns, not answered)
        return self._control.written(text) != self._own_controls(neutral, answered)

    def _foreign(self, text: str, neutral: tuple[Message, ...], answered: bool) -> str:
        """The first control string of `text` that is not the template's own."""
        own = self._own_controls(neutral, answered)
        found = self._control.find(text)
        pairs = enumerate(found)
        other = next((m for i, m in pairs if own[i : i + 1] != [m.token_id]), None)
        return text[other.start : other.end] if other else f"{len(found)} instead of {len(own)}"

    def _probe(self) -> tuple[tuple[Message, ...], str, str]:
        """Turns that the template accepts; its text before and after an assistant's words."""
        user, answer = Message("user", "hello"), Message("assistant", _PROBE)
        problem: Exception | None = None
        # Some templates fail without a system turn, others with one.
        for opening in ((user,), (Message("system", "hello"), user)):
            try:
                with deadline():
                    prompt = self._call(opening, True)
                    text = self._call((*opening, answer), False)
                break
            except Exception as error:  # a template is a program: it can divide by zero
                problem = problem or error
        else:
            assert problem is not None
            raise ModelError(
                f"{self._name} must render a user's and an assistant's turn; got "
                f"{_cause(problem)}. {self._advice}"
            ) from problem
        if not text.startswith(prompt):
            raise ModelError(
                f"{self._name} must render an answered prompt as the prompt and then the answer; "
                f"got {excerpt(prompt[-30:])} at the prompt's end and "
                f"{excerpt(text[-60:])} with the answer. {self._advice}"
            )
        lead, found, after = text[len(prompt) :].partition(_PROBE)
        if not found:
            raise ModelError(
                f"{self._name} must write an assistant's words as they are; got "
                f"{excerpt(text[len(prompt) :])} for {_PROBE!r}. {self._advice}"
            )
        return opening, lead, after

    def _require_learnable(self) -> None:
        """Refuse a user's own template that loses the user's words or what ends an answer."""
        words = self.opening[-1].content
        if words not in (prompt := self._call(self.opening, True)):
            raise ModelError(
                f"{self._name} must write the user's words as they are; got {excerpt(prompt)} for "
                f"{words!r}. {self._advice}"
            )
        if not self.terminator and self._beyond.strip():
            raise ModelError(
                f"{self._name} must end an answer with a control token, which training learns; got "
                f"{excerpt(self._beyond)}, which is plain text to tokenizer "
                f"{self._tokenizer.name_or_path!r}. Write {{{{ eos_token }}}} there, or add the "
                "token to the tokenizer and the model."
            )

    def _render(self, messages: tuple[Message, ...], prompt: bool, where: str) -> str:
        try:
            return self._call(messages, prompt)
        except Exception as error:  # as in `_probe`
            raise DataError(
                f"{where}: turns must suit the {self._name}; got {_cause(error)} from "
                f"it for {_roles(messages)}. Reorder or remove turns."
            ) from error

    def _called(self, messages: tuple[Message, ...], prompt: bool) -> str:
        dialog = [{"role": m.role, "content": m.content} for m in messages]
        text = self._template(dialog, prompt)
        room = _FRAME + 2 * sum(len(m.content) for m in messages) + _FRAME * len(messages)
        if len(text) > room:
            raise ValueError(f"{len(text)} characters, more than {room}")
        return text


def _neutral(message: Message) -> Message:
    """The turn with neutral words; an empty turn stays empty, since templates may test for it."""
    content = message.content
    return Message(message.role, _PROBE if content.strip() else content and " ")


def _cause(error: Exception) -> str:
    """What went wrong in a template; its own message (raise_exception) without a class."""
    known = isinstance(error, TemplateError)
    return excerpt(str(error) if known else f"{type(error).__name__}: {error}", 200)


def _roles(messages: Sequence[Message], limit: int = 20) -> str:
    more = " ..." if len(messages) > limit else ""
    return " ".join(m.role for m in messages[:limit]) + more
