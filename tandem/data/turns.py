"""Conversations inside rows: lists of messages and Anthropic HH transcripts, to turns.

Content is kept as written, except that turns of transcripts are stripped. Two consecutive turns of
one role stay two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

from tandem.data.excerpt import describe, excerpt, names
from tandem.data.rows import RowProblem
from tandem.data.short_cache import short_cache
from tandem.data.thoughts import ENDS, FIELDS, bare, in_content
from tandem.data.tools import loads, read_calls, read_tools
from tandem.errors import DataError
from tandem.message import Message, Role

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
_LEARNED = ("weight", "train", "loss")
"""What a turn may say under: 0 or false, it is shown, not learned."""
_CALL_ROLES = {"function_call", "tool_call", "function-call", "tool-call"}
"""Roles of turns whose content is a call: the assistant's."""
_MESSAGE_LIST = re.compile(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")
"""The beginning of a list of messages that was saved as text."""
_KNOWN_ROLE = re.compile(
    rf"['\"](role|from)['\"]\s*:\s*['\"]({'|'.join(_ROLES)})['\"]", re.IGNORECASE
)
_MARKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_INLINE_MARKER = re.compile(r"(?:\A|(?<=\s))(Human|Assistant):")
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


def begins_like_turns(value: Any) -> bool:
    """Whether a value is text that begins like a list of messages."""
    return isinstance(value, str) and _MESSAGE_LIST.match(value) is not None


def listed(value: Any, field: str, *, may_be_text: bool = False) -> Any:
    """`value`, with a list of messages that is saved as text (a CSV cell, say) read from its JSON.

    Args:
        may_be_text: what begins like such a list and is not JSON is text.
    Raises:
        RowProblem: text that begins like such a list and is not JSON. JSON with more text behind it
            is text.
    """
    if not begins_like_turns(value):
        return value
    if not _KNOWN_ROLE.search(value):
        return value  # an answer that is JSON itself
    try:
        found, end = json.JSONDecoder().raw_decode(value.strip())
        return value if value.strip()[end:] else found
    except (ValueError, RecursionError):
        if may_be_text:
            return value
        found = f"messages in another notation, as Python prints them ({excerpt(value, 30)})"
        advice = "Write the column with json.dumps, or the rows as .jsonl or .parquet with lists."
        raise RowProblem(field, found, "be text, or messages in JSON", advice) from None


def first_role(value: Any) -> Role | None:
    """Who speaks first in a message or in a list of them; None if it is neither."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    if isinstance(first, Message):
        return first.role
    if not isinstance(first, Mapping):
        return None
    return _known_role(first.get("from", first.get("role")))


def _known_role(value: Any) -> Role | None:
    return _ROLES.get(value.strip().lower()) if isinstance(value, str) else None


def maybe_blank(value: Any, field: str) -> str:
    """Text that may be blank.

    Raises:
        RowProblem: as `text_of`, except for blanks.
    """
    return text_of(value, field) if not isinstance(value, str) or value.strip() else value


def turns_of(value: Any, field: str, *, or_text: bool = False) -> Turns:
    """A list of messages, as role and content or as ShareGPT's from and value.

    Blank system turns are skipped. An assistant turn with `weight` 0, `train` or `loss` false is
    not learned.

    Args:
        or_text: whether the column may have text instead, for the message.
    Raises:
        RowProblem: not a list, no messages, an unknown role, or content that is not text.
    """
    if not isinstance(value, list | tuple):
        kinds = "text or a list of messages" if or_text else "a list of messages"
        raise RowProblem(field, describe(value), f"be {kinds}")
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
    """A prompt column: a string is one user turn, a list is a conversation (or turns read before).

    A string that is a whole transcript up to "\\n\\nAssistant:" (as in Dahoas/rm-static) is read as
    that conversation.
    """
    if isinstance(value, tuple) and value and isinstance(value[0], Message):
        return value
    if not isinstance(value, str):
        return turns_of(value, field, or_text=True)
    text = text_of(value, field)
    if _TRANSCRIPT_PROMPT.match(text):
        return transcript_turns(text, field)[:-1]
    return (Message("user", text),)


def inline_turns(text: str) -> Turns:
    """The turns of a prompt such as " Human: hi Assistant:", whose turns no blank line parts; ()
    of any other text. It must begin with Human, the speakers must take turns, none saying nothing,
    and it must end with an Assistant: behind which there is nothing."""
    if not text.lstrip().startswith("Human:"):
        return ()
    _, *parts = _INLINE_MARKER.split(text)
    speakers, said = parts[::2], [part.strip() for part in parts[1::2]]
    if said.pop() or not said or not all(said):
        return ()
    if len(speakers) % 2 or speakers != ["Human", "Assistant"] * (len(speakers) // 2):
        return ()
    roles: tuple[Role, Role] = ("user", "assistant")
    return tuple(Message(roles[i % 2], content) for i, content in enumerate(said))


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
        # What a tool answers may be nothing.
        if not turn.content.strip() and not turn.tool_calls and turn.role != "tool":
            raise RowProblem(field, f"a blank {turn.role} turn {number}", "have no blank turn")
    return prompt


def turns_in(messages: str | Sequence[Message | Mapping[str, Any]]) -> list[Message]:
    """A prompt as a caller gives it: a text is one user turn; others are Message, or mappings of
    role and content with what else a turn may have.

    Raises:
        DataError: it is something else.
    """
    if isinstance(messages, str):
        return [Message("user", messages)]
    turns = []
    for number, turn in enumerate(messages if isinstance(messages, Iterable) else [messages], 1):
        if isinstance(turn, Mapping) and "role" in turn:
            calls = read_calls(turn.get("tool_calls"), "tool_calls", number)
            content = turn.get("content")
            thoughts = thoughts_of(turn) if turn["role"] == "assistant" else ""
            content = "" if (calls or thoughts) and content is None else content
            if thoughts and isinstance(content, str):
                content = in_content(thoughts, content)
            more = (_word(turn, name, "messages", number) for name in ("tool_call_id", "name"))
            turn = Message(cast(Role, turn["role"]), cast(str, content), True, calls, *more)
        if not isinstance(turn, Message) or not isinstance(turn.content, str):
            raise DataError(
                "a prompt must be a text, or turns as Message or mappings of role and content; got "
                f"{excerpt(repr(turn))}. Write e.g. prompt('Hello') or "
                "prompt([{'role': 'user', 'content': 'Hello'}])."
            )
        if not isinstance(turn.tool_call_id, str) or not isinstance(turn.name, str):
            raise DataError(
                f"tool_call_id and name of a turn must be texts; got {turn.tool_call_id!r} and "
                f"{turn.name!r}. Write them as texts."
            )
        turns.append(turn)
    return turns


def listed_tools(tools: str | Sequence[Mapping[str, Any]]) -> str:
    """Tools as JSON text, checked.

    Raises:
        RowProblem: as `read_tools`.
    """
    return _checked_tools(tools) if isinstance(tools, str) else read_tools(tools)


@short_cache(256)
def _checked_tools(tools: str) -> str:
    """Rows of a data set often have the same."""
    return read_tools(tools)


def _turn(item: Any, field: str, number: int) -> Message:
    if not isinstance(item, dict):
        raise RowProblem(field, f"{describe(item)} as turn {number}", "have only objects")
    role_key, content_key = ("from", "value") if "from" in item else ("role", "content")
    said = item.get("tool_calls") or item.get("function_call")
    if role_key not in item or (content_key not in item and not said):
        expected = "have role and content (or from and value) in every turn"
        raise RowProblem(field, f"{names(item)} in turn {number}", expected)
    role = item[role_key]
    is_call = isinstance(role, str) and role.strip().lower() in _CALL_ROLES
    role = "assistant" if is_call else _role(role, f"{field}.{role_key}", number)
    calls, content = _calls(item, field, number), item.get(content_key)
    if is_call:
        calls, content = _call_turn(content, f"{field}.{content_key}", number), ""
    if calls and role != "assistant":
        raise RowProblem(
            field, f"tool calls of {role} in turn {number}", "have the assistant's only"
        )
    thoughts = thoughts_of(item) if role == "assistant" else ""
    content = "" if (calls or thoughts) and not content else content
    text = _content(content, f"{field}.{content_key}", number)
    if thoughts:
        text = in_content(thoughts, text)
    learned = role != "assistant" or _is_learned(item, field, number)
    if role != "tool":
        return Message(role, text, learned, calls)
    answers = [_word(item, name, field, number) for name in ("tool_call_id", "name")]
    return Message(role, text, learned, "", *answers)


def _calls(item: Mapping[str, Any], field: str, number: int) -> str:
    """The calls of a turn: OpenAI's `tool_calls`, or the older `function_call`."""
    if item.get("tool_calls"):
        return read_calls(item["tool_calls"], f"{field}.tool_calls", number)
    if call := item.get("function_call"):
        return read_calls(
            [{"type": "function", "function": call}], f"{field}.function_call", number
        )
    return ""


def _call_turn(content: Any, field: str, number: int) -> str:
    """The calls of ShareGPT's turn from function_call: one as JSON, or a list of them."""
    found = content
    if isinstance(content, str):
        try:
            found = loads(content, field)
        except RowProblem:
            raise
        except (ValueError, RecursionError):
            found = None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, Mapping) for call in calls):
        raise RowProblem(
            field,
            f"{describe(content)} in turn {number}",
            "be a call in JSON, or a list of them",
            "Write a call in another notation into a turn of the assistant's.",
        )
    return read_calls(calls, field, number)


def _word(item: Mapping[str, Any], name: str, field: str, number: int) -> str:
    value = item.get(name)
    if value is None:
        return ""
    if name == "tool_call_id" and type(value) is int:
        value = str(value)
    if not isinstance(value, str):
        raise RowProblem(f"{field}.{name}", f"{describe(value)} in turn {number}", "be text")
    _check_encodable(value, f"{field}.{name}")
    return value


def _is_learned(item: Mapping[str, Any], field: str, number: int) -> bool:
    """What OpenAI's `weight`, axolotl's `train` and ms-swift's `loss` say of an assistant turn."""
    marks = [(name, item[name]) for name in _LEARNED if item.get(name) is not None]
    # A loss may also be a measured one.
    marks = [(n, m) for n, m in marks if n != "loss" or not isinstance(m, float) or m in (0, 1)]
    for name, mark in marks:
        if not isinstance(mark, bool | int | float) or mark not in (0, 1):
            found = f"{describe(mark)} in turn {number}"
            raise RowProblem(f"{field}.{name}", found, "be 0 or 1, or false or true")
    return all(mark for _, mark in marks)


def _role(value: Any, field: str, number: int) -> Role:
    if known := _known_role(value):
        return known
    near = get_close_matches(str(value).lower(), _ROLES, 1, cutoff=0.5)
    advice = f"The nearest role is {near[0]}." if near else ""
    raise RowProblem(
        field,
        f"{describe(value)} in turn {number}",
        f"be one of {', '.join(_ROLES)}",
        advice,
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


def thoughts_of(item: Mapping[str, Any]) -> str:
    """Thoughts that a turn has under a key of their own; "" without.

    Raises:
        RowProblem: they hold what ends thoughts, or half of a surrogate pair.
    """
    found = (value for name in FIELDS if isinstance(value := item.get(name), str) and value.strip())
    thoughts = next(found, "")
    _check_encodable(thoughts, "thoughts")
    if ENDS in bare(thoughts):
        raise RowProblem("thoughts", excerpt(bare(thoughts)), f"have no {ENDS} within")
    return thoughts


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
