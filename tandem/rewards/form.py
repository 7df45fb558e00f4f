"""In which form a reward function gets conversations: texts, or TRL's lists of messages.

A function with the attribute `conversational`, or named with `?conversational=on`, gets what TRL
gives on conversational data: of each prompt its turns, of each completion one assistant turn, or
with an environment all turns since.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Mapping, Sequence
from traceback import walk_tb
from typing import Any

CONVERSATIONAL = "conversational"
"""The attribute, and the option behind a function's name, that asks for messages."""
TEXTS_ARE_GIVEN = "prompts and completions are texts here, not lists of messages"
"""What is said to a function that expects messages and gets texts."""
MESSAGES_ARE_GIVEN = "prompts and completions are lists of messages here, not texts"
"""The same the other way round."""
_READS_CONTENT = re.compile(r"""\]\s*(?:\[\s*|\.get\(\s*)(["'])content\1""")


def is_conversational(function: object) -> bool:
    """Whether a function asks for messages in place of texts."""
    return bool(getattr(function, CONVERSATIONAL, False))


def as_turns(completions: Sequence[str]) -> list[list[dict[str, str]]]:
    """Each of these answers as one assistant turn."""
    return [[{"role": "assistant", "content": text}] for text in completions]


def as_messages(
    messages: Sequence[Sequence[Mapping[str, str]]],
    new_messages: Sequence[Sequence[Mapping[str, str]]],
) -> dict[str, list[list[dict[str, str]]]]:
    """Prompts and completions in TRL's conversational form, in dicts of their own.

    Args:
        messages: all turns before each answer. new_messages: those since the data's prompt, and the
            answer.
    """
    pairs = list(zip(messages, new_messages, strict=True))
    return {
        "prompts": [
            [dict(turn) for turn in turns[: len(turns) - len(new) + 1]] for turns, new in pairs
        ],
        "completions": [[dict(turn) for turn in new] for _, new in pairs],
    }


def form_advice(error: BaseException, function: object) -> str:
    """What to tell a function that fails since it takes a text for a list of messages, or a list
    for a text; "" for other errors."""
    said = str(error)
    if is_conversational(function):
        is_of_form = isinstance(error, TypeError | AttributeError) and (
            "'list'" in said or "expected string" in said
        )
        remedy = 'remove conversational from it, or read completion[0]["content"]'
        return f" ({MESSAGES_ARE_GIVEN}: {remedy})" if is_of_form else ""
    if not isinstance(error, TypeError | AttributeError | IndexError) or "str" not in said:
        return ""
    lines = (
        linecache.getline(frame.f_code.co_filename, number)
        for frame, number in walk_tb(error.__traceback__)
    )
    if not any("content" in line or "role" in line for line in lines):
        return ""
    return f" ({TEXTS_ARE_GIVEN}: {_remedy(function)})"


def reads_messages(function: object) -> str:
    """What to tell a function that gets texts and whose code reads `completion[0]["content"]`, in
    case it catches the error that this is; "" for one that does not, or looks what it gets."""
    try:
        source = inspect.getsource(inspect.unwrap(function))  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError):
        return ""
    looks = "isinstance(" in source or re.search(r"\bmessages\b", source)
    if is_conversational(function) or looks or not _READS_CONTENT.search(source):
        return ""
    return f'it reads messages (["content"]), but {TEXTS_ARE_GIVEN}: {_remedy(function)}'


def _remedy(function: Any) -> str:
    name = getattr(function, "__name__", "f")
    return (
        f"name it with ?{CONVERSATIONAL}=on, as in file.py:{name}?{CONVERSATIONAL}=on, or set "
        f"{name}.{CONVERSATIONAL} = True"
    )
