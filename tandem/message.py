"""A turn of a conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation: who speaks, and the text.

    learned: whether SFT may learn it, if the assistant speaks; otherwise it is only shown.
    tool_calls: the tools that the assistant calls, a list as JSON text, as the data has it; "" for
        none. Beside calls `content` may be empty.
    tool_call_id, name: which call a tool's turn answers, and which tool does; "" where it is not
        said.
    thoughts: what the assistant thought before it spoke. Rows that are read have it at the
        beginning of `content`, within <think> and </think>, which means the same.

    Example: Message("assistant", "", tool_calls='[{"type": "function", "function": {"name": "add",
    "arguments": {"a": 2, "b": 2}}}]'), which Message("tool", "4", name="add") may answer.
    """

    role: Role
    content: str
    learned: bool = True
    tool_calls: str = ""
    tool_call_id: str = ""
    name: str = ""
    thoughts: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The turn as data has it: role and content, then whatever else it says."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            turn["tool_calls"] = json.loads(self.tool_calls)
        if self.tool_call_id:
            turn["tool_call_id"] = self.tool_call_id
        if self.name:
            turn["name"] = self.name
        if self.thoughts:
            turn["reasoning_content"] = self.thoughts
        return turn


Answer = str | Message
"""What the assistant says last: text, or its turn where that calls tools."""


def answer_turn(answer: Answer) -> Message:
    """An answer as the assistant's turn."""
    return Message("assistant", answer) if isinstance(answer, str) else answer


def answer_text(answer: Answer) -> str:
    """All that an answer says, as one text: its words, then its calls as JSON."""
    return answer if isinstance(answer, str) else answer.content + answer.tool_calls
