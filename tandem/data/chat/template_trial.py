"""The first renderings by a chat template: where an answer lies, and whether it can be learned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from jinja2 import TemplateError

from tandem.data.chat.changed_json import PROBE
from tandem.data.chat.template_call import TemplateCall
from tandem.data.chat.template_limits import deadline
from tandem.data.chat.template_text import AnswerFrame, TemplateText
from tandem.data.excerpt import excerpt
from tandem.data.thoughts import ThoughtForm, thought_form
from tandem.errors import ModelError
from tandem.types import Message

_TAG = re.compile(r"<[^<>\s]{1,60}>")


class _Tried(Protocol):
    """What is asked of a chat template: see `ChatTemplate`."""

    name: str
    tokenizer_name: str
    opening: tuple[Message, ...]
    terminator: str


def tried(
    render: TemplateText, call: TemplateCall, source: str, name: str, advice: str
) -> tuple[tuple[Message, ...], AnswerFrame, str]:
    """Turns that a template accepts; how an answer follows its prompt; what follows the words.

    Args:
        render: text of turns by the template, `call`; both may raise anything.
        source: the jinja template.
        name, advice: for messages.
    Raises:
        ModelError: it cannot be used for training.
    """
    user, answer = Message("user", "hello"), Message("assistant", PROBE)
    problem: Exception | None = None
    # Some templates fail without a system turn, others with one.
    for opening in ((user,), (Message("system", "hello"), user)):
        try:
            with deadline():
                prompt = render(opening, True, "", None)
                text = render((*opening, answer), False, "", None)
            break
        except Exception as error:  # a template is a program: it can divide by zero
            problem = problem or error
    else:
        assert problem is not None
        raise ModelError(
            f"{name} must render a user's and an assistant's turn; got {cause(problem)}. {advice}"
        ) from problem
    base = prompt if text.startswith(prompt) else _common(prompt, text)
    lead, found, after = text[len(base) :].partition(PROBE)
    dialog = [turn.as_dict() for turn in opening]

    def answered(turn: Mapping[str, str]) -> str:
        return call([*dialog, {"role": "assistant", **turn}], False)

    with deadline():
        thoughts = thought_form(answered, prompt, base, lead, source)
    cue = prompt[len(base) :]
    if cue and not _is_thought(cue, thoughts):
        raise ModelError(
            f"{name} must render an answered prompt as the prompt and then the answer; got "
            f"{excerpt(prompt[-30:])} at the prompt's end and {excerpt(text[-60:])} with the "
            f"answer. {advice}"
        )
    if not found:
        raise ModelError(
            f"{name} must write an assistant's words as they are; got "
            f"{excerpt(text[len(base) :])} for {PROBE!r}. {advice}"
        )
    in_place, joined = lead, bool(cue) or thoughts.how == "joined"
    if thoughts.in_prompt and (cue or thoughts.ends not in lead):  # it would speak in a thought
        lead, joined = thoughts.between, True
    elif cue.endswith(lead):
        lead = ""
    return opening, AnswerFrame(lead, cue, in_place, joined, thoughts), after


def _common(prompt: str, text: str) -> str:
    """What both begin with, up to a whole tag."""
    pairs = enumerate(zip(prompt, text, strict=False))
    end = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(text)))
    tags = (tag for tag in _TAG.finditer(prompt) if tag.start() < end < tag.end())
    return prompt[: next((tag.start() for tag in tags), end)]


def _is_thought(cue: str, thoughts: ThoughtForm) -> bool:
    """Whether what a prompt has and an answered turn lacks is a thought, or its beginning."""
    return thoughts.in_prompt or (
        thoughts.is_over and any(word in cue.lower() for word in ("think", "thought"))
    )


def require_learnable(template: _Tried, prompt: str, beyond: str, advice: str) -> None:
    """Refuse a user's own template that loses the user's words or what ends an answer.

    Args:
        prompt: its text of the turns that it accepts. beyond: of what follows the terminator.
    Raises:
        ModelError: it does.
    """
    words = template.opening[-1].content
    if words not in prompt:
        raise ModelError(
            f"{template.name} must write the user's words as they are; got {excerpt(prompt)} for "
            f"{words!r}. {advice}"
        )
    if not template.terminator and beyond.strip():
        raise ModelError(
            f"{template.name} must end an answer with a control token, which training learns; got "
            f"{excerpt(beyond)}, which is plain text to tokenizer {template.tokenizer_name!r}. "
            "Write {{ eos_token }} there, or add the token to the tokenizer and the model."
        )


def cause(error: Exception) -> str:
    """What went wrong in a template; its own message (raise_exception) without a class."""
    known = isinstance(error, TemplateError)
    return excerpt(str(error) if known else f"{type(error).__name__}: {error}", 200)
