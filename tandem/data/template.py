"""Conversations as text: a tokenizer's chat template, and where the assistant's words lie in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tandem.data.control import ControlTokens
from tandem.data.excerpt import excerpt
from tandem.errors import DataError, ModelError
from tandem.types import Message

# For tokenizers that bring no chat template: "Human: hi\n\nAssistant: yo" + EOS, turns apart by a
# blank line, a system text first. PREFIX becomes what the tokenizer puts before a text (its BOS).
# `generation` marks what the assistant writes for trainers that ask Hugging Face for a mask of it.
_DEFAULT_TEMPLATE = """\
{{- PREFIX }}
{%- for message in messages %}
    {%- if not loop.first %}{{- '\\n\\n' }}{%- endif %}
    {%- if message.role in ['system', 'developer'] %}{{- message.content }}
    {%- elif message.role == 'assistant' %}{{- 'Assistant: ' -}}
        {% generation %}{{- message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- {'user': 'Human: ', 'tool': 'Tool: '}[message.role] + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '\\n\\nAssistant:' }}{%- endif %}
"""
_PROBE = "Qz7probe"
_FRAME = 100_000
"""Characters that a template may write of its own for a conversation, and for each of its turns."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a rendered conversation.

    answer: the assistant wrote it, and its terminator comes next (`text` leaves that out).
    before: the text that precedes it.
    """

    text: str
    answer: bool
    before: str


class ChatTemplate:
    """The one way from a conversation to text.

    Args:
        tokenizer: brings the chat template; without one, a documented default is taken.
        control: its control tokens.
        prefix: what the tokenizer puts before a text, for the default template.
    Attributes:
        source: the jinja template.
        lead: template text between the generation prompt and the assistant's words.
        trail: template text between those words and the terminator.
        terminator: the control string that ends an assistant's turn; "" where the template writes
            none (EOS is then put there).
    Raises:
        ModelError: the template cannot be used for training.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, control: ControlTokens, prefix: str
    ) -> None:
        self._tokenizer = tokenizer
        if tokenizer.chat_template:
            self.source: str = tokenizer.get_chat_template()
            self._name = f"chat template of tokenizer {tokenizer.name_or_path!r}"
        else:
            self.source = _DEFAULT_TEMPLATE.replace("PREFIX", json.dumps(prefix))
            self._name = "default chat template"
        self.lead, after = self._probe()
        found = control.find(after)
        self.terminator = after[found[0].start : found[0].end] if found else ""
        self.trail = after[: found[0].start] if found else ""
        self._beyond = after[found[0].end :] if found else after

    def prompt(self, messages: Sequence[Message], where: str) -> str:
        """The text up to where the assistant begins.

        Raises:
            DataError: the template does not accept these turns.
        """
        return self._render(tuple(messages), True, where)

    def answer(self, messages: Sequence[Message], prompt: str, where: str) -> Part:
        """What the assistant wrote as the last of `messages`, the terminator left out.

        Args:
            prompt: the text of the turns before it.
        Raises:
            DataError: the template does not accept these turns.
            ModelError: the template does not put the answer right after the prompt.
        """
        part = self._last_answer(messages, prompt, where)
        if part is None:
            raise ModelError(
                f"{self._name} must render an answered prompt as the prompt, the answer and "
                f"{excerpt(self.trail + self.terminator + self._beyond)}; got something else for "
                f"{where} after {excerpt(prompt[-30:])}. Give the tokenizer another chat_template."
            )
        return part

    def parts(self, messages: Sequence[Message], where: str, every_answer: bool) -> list[Part]:
        """The prompt's text, cut where earlier answers begin and end.

        Some templates write an earlier turn again in another way (they drop its reasoning). Such
        a turn is not what the assistant wrote then and comes as plain prompt, unless
        `every_answer`.
        Raises:
            DataError: the template does not accept these turns.
            ModelError: `every_answer`, and the template rewrites an earlier turn.
        """
        whole = self.prompt(messages, where)
        parts: list[Part] = []
        cursor = 0
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            if i == 0:
                raise DataError(
                    f"{where}: a conversation must begin with a system or a user turn; got an "
                    "assistant's. Put the turn that it answers before it."
                )
            prompt = self.prompt(messages[:i], where)
            part = self._last_answer(messages[: i + 1], prompt, where)
            if part is None or not whole.startswith(prompt + part.text + self.terminator):
                if every_answer:
                    raise ModelError(
                        f"{self._name} must leave earlier turns as it first rendered them; got a "
                        f"rewrite of turn {i + 1} in {where}. Train on the last turn alone or "
                        "give the tokenizer another chat_template."
                    )
                continue
            end = len(prompt) + len(part.text)
            parts += [Part(whole[cursor : len(prompt)], False, whole[:cursor]), part]
            cursor = end + len(self.terminator)
            if not self.terminator and whole.startswith(self._tokenizer.eos_token, end):
                cursor += len(self._tokenizer.eos_token)
        return [*parts, Part(whole[cursor:], False, whole[:cursor])]

    def _last_answer(self, messages: Sequence[Message], prompt: str, where: str) -> Part | None:
        text = self._render(tuple(messages), False, where)
        after = self.trail + self.terminator + self._beyond
        room = len(text) - len(prompt) - len(after)
        if room < 0 or not text.startswith(prompt) or not text.endswith(after):
            return None
        end = len(prompt) + room + len(self.trail)
        return Part(text[len(prompt) : end], True, prompt)

    def _probe(self) -> tuple[str, str]:
        """Template text before and after an assistant's words."""
        user, answer = Message("user", "hello"), Message("assistant", _PROBE)
        problem: Exception | None = None
        # Some templates fail without a system turn, others with one.
        for opening in ((user,), (Message("system", "hello"), user)):
            try:
                prompt = self._call(opening, True)
                text = self._call((*opening, answer), False)
                break
            except Exception as error:  # a template is a program: it can divide by zero
                problem = problem or error
        else:
            assert problem is not None
            raise ModelError(
                f"{self._name} must render a user's and an assistant's turn; got "
                f"{_cause(problem)}. Give the tokenizer another chat_template."
            ) from problem
        if not text.startswith(prompt):
            raise ModelError(
                f"{self._name} must render an answered prompt as the prompt and then the answer; "
                f"got {excerpt(prompt[-30:])} at the prompt's end and "
                f"{excerpt(text[-60:])} with the answer. Give the tokenizer another chat_template."
            )
        lead, found, after = text[len(prompt) :].partition(_PROBE)
        if not found:
            raise ModelError(
                f"{self._name} must write an assistant's words as they are; got "
                f"{excerpt(text[len(prompt) :])} for {_PROBE!r}. "
                "Give the tokenizer another chat_template."
            )
        return lead, after

    def _render(self, messages: tuple[Message, ...], prompt: bool, where: str) -> str:
        try:
            return self._call(messages, prompt)
        except Exception as error:  # as in `_probe`
            raise DataError(
                f"{where}: turns must suit the {self._name}; got {_cause(error)} from "
                f"it for {_roles(messages)}. Reorder or leave out turns."
            ) from error

    def _call(self, messages: tuple[Message, ...], prompt: bool) -> str:
        dialog = [{"role": m.role, "content": m.content} for m in messages]
        text = str(
            self._tokenizer.apply_chat_template(
                dialog,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        )
        room = _FRAME + 2 * sum(len(m.content) for m in messages) + _FRAME * len(messages)
        if len(text) > room:
            raise ValueError(f"{len(text)} characters where {room} are plenty")
        return text


def _cause(error: Exception) -> str:
    """What went wrong in a template; a message of its own (raise_exception) without a class."""
    known = isinstance(error, TemplateError)
    return excerpt(str(error) if known else f"{type(error).__name__}: {error}", 200)


def _roles(messages: Sequence[Message], limit: int = 20) -> str:
    more = " ..." if len(messages) > limit else ""
    return " ".join(m.role for m in messages[:limit]) + more
