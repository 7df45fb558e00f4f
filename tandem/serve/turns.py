"""Turns, tools and predicted answers in the bodies of requests, as OpenAI's clients write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from tandem.data import tools
from tandem.data.rows import RowProblem
from tandem.data.thoughts import FIELDS, in_content
from tandem.data.turns import thoughts_of
from tandem.serve import fields
from tandem.serve.api_errors import ApiError
from tandem.types import Message, Role

PARTS = ("text", "input_text", "refusal")


def read_messages(value: Any) -> list[Message]:
    """Turns as OpenAI's clients write them; `developer` is `system`.

    Raises:
        ApiError: they are not a list of at least one turn with role and text.
    """
    if not isinstance(value, list) or not value:
        advice = 'Send e.g. "messages": [{"role": "user", "content": "Hi"}].'
        raise fields.wrong("messages", "be a list of at least one turn", value, advice)
    return [_message(turn, f"messages[{i}]") for i, turn in enumerate(value)]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise ApiError(f"{where} must be an object; got {fields.shown(turn)}.", "messages")
    role = turn.get("role")
    role = "system" if role == "developer" else role
    if not isinstance(role, str) or role not in get_args(Role):
        known = ", ".join((*get_args(Role), "developer"))
        raise ApiError(
            f"{where}.role must be one of {known}; got {fields.shown(role)}.", "messages"
        )
    if turn.get("function_call") or turn.get("audio"):
        raise ApiError(
            f"{where} must be text or tool_calls; function_call and audio are not supported.",
            "messages",
        )
    calls, thoughts = _calls(turn, where), _thoughts(turn, where)
    content = turn.get("content")
    if (calls or thoughts) and content is None:
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise ApiError(f"{where}.content must be a text; got {fields.shown(content)}.", "messages")
    if thoughts:
        content = in_content(thoughts, content)
    if role != "tool":
        return Message(cast(Role, role), content, tool_calls=calls)
    words = [turn.get(key) or "" for key in ("tool_call_id", "name")]
    for word in words:
        if not isinstance(word, str):
            raise ApiError(
                f"{where}: tool_call_id and name must be texts; got {fields.shown(word)}.",
                "messages",
            )
    return Message("tool", content, True, "", *words)


def _calls(turn: Mapping[str, Any], where: str) -> str:
    """The calls of a turn, as JSON text."""
    if not turn.get("tool_calls"):
        return ""
    if turn["role"] != "assistant":
        raise ApiError(f"{where} must have no tool_calls: only the assistant's may.", "messages")
    try:
        return tools.read_calls(turn["tool_calls"], "tool_calls", 1)
    except RowProblem as problem:
        raise ApiError(
            f"{where}.{problem.field} must {problem.expected}; got "
            f"{problem.found.removesuffix(' in turn 1')}.",
            "messages",
        ) from None


def _thoughts(turn: Mapping[str, Any], where: str) -> str:
    """The thoughts of a turn, under a key of their own; "" without."""
    given = [key for key in FIELDS if turn.get(key)]
    for key in given:
        if turn["role"] != "assistant":
            raise ApiError(f"{where} must have no {key}: only the assistant's may.", "messages")
        if not isinstance(turn[key], str):
            raise ApiError(
                f"{where}.{key} must be a text; got {fields.shown(turn[key])}.", "messages"
            )
    try:
        return thoughts_of(turn)
    except RowProblem as problem:
        raise ApiError(
            f"{where}.{given[0]} must {problem.expected}; got {problem.found}.", "messages"
        ) from None


def read_tools(body: Mapping[str, Any]) -> str:
    """The tools that a request lists, as JSON text; "" for none.

    Raises:
        ApiError: they are not a list of JSON schemas.
    """
    try:
        if isinstance(body.get("tools"), str) and body["tools"]:
            raise RowProblem("tools", fields.shown(body["tools"]), "be a list of JSON schemas")
        return tools.read_tools(body.get("tools"))
    except RowProblem as problem:
        raise ApiError(f"tools must {problem.expected}; got {problem.found}.", "tools") from None


def read_prediction(value: Any) -> str:
    """OpenAI's predicted output: what the answer is likely to say; "" without.

    Raises:
        ApiError: it is no text.
    """
    if value is None:
        return ""
    content = value.get("content") if isinstance(value, dict) else None
    if isinstance(content, list):
        content = "".join(_part(part, "prediction", "prediction") for part in content)
    if not isinstance(content, str) or value.get("type") != "content":
        rule = 'be an object of type content, as {"type": "content", "content": "a text"}'
        raise fields.wrong("prediction", rule, value)
    return content


def _part(part: Any, where: str, name: str = "messages") -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    written = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if kind not in PARTS or not isinstance(written, str):
        raise ApiError(
            f"{where}.content must hold text parts only; got {fields.shown(part)}. Images, audio "
            "and files are not supported.",
            name,
        )
    return written
