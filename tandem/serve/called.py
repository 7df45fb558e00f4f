"""Answers that call tools, as OpenAI's clients get them: words as they come, then the calls."""

from __future__ import annotations

import json
from typing import Any

from tandem.data.call_reader import CallReader
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
    """A whole answer as a message."""
    message = {"role": "assistant", "content": choice.text, "refusal": None}
    if calls := calls_of(choice):
        assert choice.turn is not None
        return message | {"content": choice.turn.content or None, "tool_calls": calls}
    return message


class Words:
    """What a stream sends of answers that may call tools: nothing of a call before it has ended."""

    def __init__(self, reader: CallReader | None) -> None:
        self._reader = reader
        self._sent: dict[int, str] = {}

    def new(self, choice: Choice, text: str) -> str:
        """The words to send now.

        Args:
            text: that is new.
        """
        if self._reader is None or not choice.prompt.tools:
            return text
        sent = self._sent.get(choice.index, "")
        if not choice.finish:  # the space before a call is none of the words
            new = choice.text[len(sent) : self._reader.words_end(choice.text)].rstrip()
        elif calls_of(choice):
            assert choice.turn is not None
            new = choice.turn.content.removeprefix(sent)
        else:
            new = choice.text[len(sent) :]
        self._sent[choice.index] = sent + new
        return new
