"""Conversations inside rows: lists of messages and Anthropic HH transcripts, to turns.

Content is kept as written, except that turns of transcripts are stripped. Two consecutive turns of
one role stay two.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

from tandem.data.excerpt import describe, excerpt, names
from tandem.data.rows import RowProblem
from tandem.types import Message, Role

Turns = tuple[Message, ...]

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_MARKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_TRANSCRIPT_PROMPT = re.compile(r"\A\s*Human:.*\n\nAssistant:\s*\Z", re.DOTALL)


def text_of(value: Any, field: str) -> str:
    """A column's text, checked.

    Raises:
        RowProblem: not text, blank, or with half of a surrogate pair, which tokenizers refuse.
    """
    if not isinstance(value, str):
        raise RowProblem(field, describe(value), "be text")
    _check_encodable(value, field)
    if not value.strip():
        raise RowProblem(field, excerpt(value), "not be blank")
    return value


def turns_of(value: Any, field: str) -> Turns:
    """A list of messages, as role and content or as ShareGPT's from and value.

    Blank system turns are skipped.

    Raises:
        RowProblem: not a list, no messages, an unknown role, or content that is not text.
    """
    if not isinstance(value, list | tuple):
        raise RowProblem(field, describe(value), "be a list of messages")
    turns = tuple(_turn(item, field, number) for number, item in enumerate(value, 1))
    turns = tuple(t for t in turns if t.role != "system" or t.content.strip())
    if not turns:
        raise RowProblem(field, describe(value), "hold at least one message")
    return turns


def transcript_turns(text: str, field: str) -> Turns:
    """The turns of an HH transcript: "\\n\\nHuman: ...\\n\\nAssistant: ...".

    Raises:
        RowProblem: it does not begin with a Human turn.
    """
    markers = list(_MARKER.finditer(text))
    if not markers or markers[0].start() > 0 or markers[0][1] != "Human":
        raise RowProblem(field, excerpt(text), "begin with a Human: turn")
    ends = [marker.start() for marker in markers[1:]] + [len(text)]
    return tuple(
        Message("user" if marker[1] == "Human" else "assistant", text[marker.end() : end].strip())
        for marker, end in zip(markers, ends, strict=True)
    )


def is_transcript(text: str) -> bool:
    """Whether a string looks like an HH transcript."""
    return _MARKER.search(text) is not None


def prompt_turns(value: Any, field: str) -> Turns:
    """A prompt column: a string is one user turn, a list is a conversation.

    A string that is a whole transcript up to "\\n\\nAssistant:" (as in Dahoas/rm-static) is read as
    that conversation.
    """
    if not isinstance(value, str):
        return turns_of(value, field)
    text = text_of(value, field)
    if _TRANSCRIPT_PROMPT.match(text):
        return transcript_turns(text, field)[:-1]
    return (Message("user", text),)


def check_prompt(prompt: Turns, field: str) -> Turns:
    """`prompt`, if an assistant can answer it.

    Raises:
        RowProblem: the first turn after system turns is not the user's, the last is neither the
            user's nor a tool's, or a turn is blank.
    """
    spoken = [turn for turn in prompt if turn.role != "system"]
    if not spoken or spoken[0].role != "user":
        found = f"{spoken[0].role} first" if spoken else "no user turn"
        raise RowProblem(field, found, "begin with a user turn (after any system turn)")
    if prompt[-1].role not in ("user", "tool"):
        raise RowProblem(field, f"{prompt[-1].role} last", "end with a user turn before the answer")
    for number, turn in enumerate(prompt, 1):
        _check_encodable(turn.content, field)
        if not turn.content.strip():
            raise RowProblem(field, f"a blank {turn.role} turn {number}", "have no blank turn")
    return prompt


def _turn(item: Any, field: str, number: int) -> Message:
    if not isinstance(item, dict):
        raise RowProblem(field, f"{describe(item)} as turn {number}", "have only objects")
    role_key, content_key = ("from", "value") if "from" in item else ("role", "content")
    if role_key not in item or content_key not in item:
        expected = "have role and content (or from and value) in every turn"
        raise RowProblem(field, f"{names(item)} in turn {number}", expected)
    if item.get("tool_calls") or item.get("function_call"):
        raise RowProblem(
            field,
            f"tool calls in turn {number}",
            "have none",
            "Write the call into the content, as the model is to write it.",
        )
    return Message(
        _role(item[role_key], f"{field}.{role_key}", number),
        _content(item[content_key], f"{field}.{content_key}", number),
    )


def _role(value: Any, field: str, number: int) -> Role:
    known = _ROLES.get(value.strip().lower()) if isinstance(value, str) else None
    if known is not None:
        return known
    near = get_close_matches(str(value).lower(), _ROLES, 1, cutoff=0.5)
    raise RowProblem(
        field,
        f"{describe(value)} in turn {number}",
        f"be one of {', '.join(_ROLES)}",
        f"The nearest role is {near[0]}." if near else "",
    )


def _content(value: Any, field: str, number: int) -> str:
    if isinstance(value, str):
        _check_encodable(value, field)
        return value
    if isinstance(value, list) and value:
        parts = [_part(part) for part in value]
        if all(part is not None for part in parts):
            return _content("".join(part for part in parts if part is not None), field, number)
    raise RowProblem(field, f"{describe(value)} in turn {number}", "be text, or text parts only")


def _part(part: Any) -> str | None:
    """The text of one content part; None for an image, a call or anything else."""
    if isinstance(part, dict):
        # In Parquet every part has the keys of all parts, so look at type and text only.
        part = part.get("text") if part.get("type", "text") == "text" else None
    return part if isinstance(part, str) else None


def _check_encodable(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"half a surrogate pair at character {error.start + 1}"
        raise RowProblem(field, found, "be valid Unicode") from None
