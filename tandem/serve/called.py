"""Answers as OpenAI's clients get them: thoughts and words as they come, then calls of tools."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tandem.data.chat.call_reader import CallReader
from tandem.serve.answering import Choice


def calls_of(choice: Choice) -> list[dict[str, Any]]:
    """The calls in an answer that has ended, their arguments as JSON text."""
    if choice.turn is None or not choice.turn.tool_calls:
        return []
    found = []
    for call in json.loads(choice.turn.tool_calls):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        function = {"name": call["function"]["name"], "arguments": arguments}
        found.append({"id": call["id"], "type": "function", "function": function})
    return found


def finish_of(choice: Choice) -> str | None:
    """Why an answer has ended; None before."""
    if choice.finish == "stop" and choice.turn is not None and choice.turn.tool_calls:
        return "tool_calls"
    return choice.finish or None


def message_of(choice: Choice) -> dict[str, Any]:
    """A whole answer that has ended, as a message."""
    calls, said = calls_of(choice), _said(choice, None)
    content = said.words or None if calls else said.words
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if said.thoughts:
        message["reasoning_content"] = said.thoughts
    return message | ({"tool_calls": calls} if calls else {})


class Said(NamedTuple):
    """What an answer says, or what is new of it, but for calls of tools."""

    thoughts: str = ""
    words: str = ""


def _said(choice: Choice, reader: CallReader | None) -> Said:
    """What an answer says as far as it has come.

    Args:
        reader: of calls that one which has not ended may begin; None without any.
    """
    text = choice.text
    if not choice.finish:
        if reader is not None:  # the space before a call is none of the words
            text = text[: reader.words_end(text)].rstrip()
    elif calls_of(choice):
        assert choice.turn is not None
        text = choice.turn.content
    return Said(*choice.prompt.thoughts.so_far(text, is_over=bool(choice.finish)))


class Words:
    """What a stream sends of answers: no part of a tag around thoughts, nothing of a call before it
    has ended."""

    def __init__(self, reader: CallReader | None) -> None:
        """reader: of calls in answers to prompts with tools."""
        self._reader = reader
        self._sent: dict[int, Said] = {}

    def new(self, choice: Choice) -> Said:
        """What to send now that `choice` has more text, or has ended."""
        sent = self._sent.get(choice.index, Said())
        reader = self._reader if choice.prompt.tools else None
        now = self._sent[choice.index] = _said(choice, reader)
        return Said(now.thoughts[len(sent.thoughts) :], now.words[len(sent.words) :])
