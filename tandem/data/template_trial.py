"""The first renderings by a chat template: where an answer lies, and whether it can be learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jinja2 import TemplateError

from tandem.data.changed_json import PROBE
from tandem.data.excerpt import excerpt
from tandem.data.template_limits import deadline
from tandem.errors import ModelError
from tandem.types import Message


class _Tried(Protocol):
    """What is asked of a chat template: see `ChatTemplate`."""

    name: str
    tokenizer_name: str
    opening: tuple[Message, ...]
    terminator: str


def tried(
    render: Callable[[tuple[Message, ...], bool], str], name: str, advice: str
) -> tuple[tuple[Message, ...], str, str]:
    """Turns that a template accepts; its text before and after an assistant's words.

    Args:
        render: the text of turns, up to where the assistant begins or not; it may raise anything.
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
                prompt = render(opening, True)
                text = render((*opening, answer), False)
            break
        except Exception as error:  # a template is a program: it can divide by zero
            problem = problem or error
    else:
        assert problem is not None
        raise ModelError(
            f"{name} must render a user's and an assistant's turn; got {cause(problem)}. {advice}"
        ) from problem
    if not text.startswith(prompt):
        raise ModelError(
            f"{name} must render an answered prompt as the prompt and then the answer; got "
            f"{excerpt(prompt[-30:])} at the prompt's end and {excerpt(text[-60:])} with the "
            f"answer. {advice}"
        )
    lead, found, after = text[len(prompt) :].partition(PROBE)
    if not found:
        raise ModelError(
            f"{name} must write an assistant's words as they are; got "
            f"{excerpt(text[len(prompt) :])} for {PROBE!r}. {advice}"
        )
    return opening, lead, after


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
