"""Conversations that are no lists of messages: exchanges (a question with its answer), and texts of
which every second is the assistant's; answers that are a list of calls. They become messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.data.shapes.aliases import DIALOGS, QUESTIONS, has_answer, says_something
from tandem.data.shapes.answer_lists import json_list
from tandem.data.tools import are_calls

_KEYS = (("input", "output"), ("human", "assistant"))
"""Of a question and its answer, as Capybara and XTuner have them, and Firefly."""
_LABEL = re.compile(r"\s*(human|user|assistant|gpt|bot|system)\s*:", re.IGNORECASE)
_MESSAGE = re.compile(r"\s*\{\s*\"(role|content|from|value)\"\s*:")


def with_messages(row: dict[str, Any]) -> dict[str, Any]:
    """`row`, with the exchanges or texts in a column of a dialog as messages."""
    asks = has_answer(row) or any(says_something(row.get(name)) for name in QUESTIONS)
    names = DIALOGS[:2] if asks else DIALOGS  # `conversation` is an alias, and may be about these
    given = {name: row[name] for name in names if row.get(name) is not None}
    found = {name: _messages(value) for name, value in given.items()}
    made = {name: messages for name, messages in found.items() if messages}
    return {**row, **made} if made else row


def called(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The assistant's turn that a list of calls in `answers` is, beside tools (xLAM); [] if it is
    something else, or the row has an answer of its own."""
    if row.get("tools") is None or has_answer(row):
        return []
    calls = json_list(row.get("answers"))
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    return [turn] if are_calls(calls) else []


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages of a list of exchanges or of texts; none of anything else, nor of exchanges with
    other keys, which may say more."""
    listed = json_list(value)
    if listed is None:
        return []
    if all(isinstance(text, str) and not _MESSAGE.match(text) for text in listed):
        if listed and all(map(_LABEL.match, listed)):
            return []
        return [_said(("user", "assistant")[i % 2], text) for i, text in enumerate(listed)]
    for keys in _KEYS:
        if all(_is_exchange(item, keys) for item in listed):
            return _of_exchanges(listed, *keys)
    return []


def _is_exchange(item: Any, keys: tuple[str, str]) -> bool:
    if not isinstance(item, Mapping) or item.get(keys[0]) is None:
        return False
    return item.keys() <= {*keys, "system"}


def _of_exchanges(
    exchanges: Sequence[Mapping[str, Any]], asked: str, answered: str
) -> list[dict[str, Any]]:
    """A system text of the first comes before all; the last may be without its answer."""
    messages: list[dict[str, Any]] = []
    for number, exchange in enumerate(exchanges, 1):
        if (system := exchange.get("system")) not in (None, ""):
            messages.append(_said("system", system))
        messages.append(_said("user", exchange[asked]))
        if number < len(exchanges) or exchange.get(answered) not in (None, ""):
            messages.append(_said("assistant", exchange.get(answered)))
    return messages


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}
