"""What a model said, as the assistant's turn: its words, and the calls of tools in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from tandem.data.argument_types import argument_types
from tandem.data.chat.call_form import json_of
from tandem.data.chat.call_probe import call_id
from tandem.data.chat.call_reader import CallError, CallReader
from tandem.data.rows import RowProblem
from tandem.data.tools import read_calls
from tandem.errors import DataError
from tandem.message import Answer, Message, answer_text, answer_turn
from tandem.types import Source, TokenRow

if TYPE_CHECKING:
    from tandem.data.render import Renderer


@dataclass(frozen=True, slots=True)
class Spoken:
    """An answer as a turn. problem: what is wrong with calls in it that could not be read, which
    stay text; "" for nothing."""

    turn: Message
    problem: str = ""


def spoken(
    reader: CallReader | None,
    text: str,
    tools: str,
    messages: Sequence[Message] = (),
    *,
    is_cut: bool = False,
) -> Spoken:
    """An answer's text as the assistant's turn.

    Args:
        reader: of calls as the model's template writes them; None reads none.
        tools: that its prompt lists, as JSON text; without any nothing is a call.
        messages: the turns before it: calls without an id get the next number for one.
        is_cut: its length's limit ended it: behind whole calls one that is not is left out.
    """
    words = Message("assistant", text)
    if reader is None or not tools:
        return Spoken(words)
    begin = reader.speech_begins(text)
    try:
        content, calls = reader.read(text[begin:], argument_types(tools), is_cut=is_cut)
        content = text[:begin] + content
        earlier = [c for turn in messages if turn.tool_calls for c in json.loads(turn.tool_calls)]
        taken = {call.get("id") for call in earlier}
        free = (each for each in map(call_id, count(len(earlier))) if each not in taken)
        named = [call if call.id else replace(call, id=next(free)) for call in calls]
        listed = read_calls(json_of(named), "tool_calls", 1)
    except CallError as error:
        return Spoken(words, str(error))
    except RowProblem as problem:
        return Spoken(words, f"{problem.field} must {problem.expected}; got {problem.found}")
    return Spoken(Message("assistant", content, tool_calls=listed) if calls else words)


def as_judged(
    renderer: Renderer,
    messages: Sequence[Message],
    answer: Answer,
    source: Source,
    tools: str,
    *,
    is_finished: bool = True,
) -> TokenRow:
    """A conversation as a reward model with a template of its own reads it, the mask on the answer:
    with calls of tools as that template writes them, or as JSON where it writes none.

    Args:
        is_finished: an answer that was cut off gets no terminator.
    Raises:
        DataError: the template or the tokenizer refuses a turn.
    """
    turns = [*messages, answer_turn(answer)]
    try:
        row = renderer.conversation(turns[:-1], turns[-1], source, True, tools)
    except DataError:
        if not any(turn.tool_calls for turn in turns):
            raise
        plain = [
            replace(turn, content=answer_text(turn), tool_calls="") if turn.tool_calls else turn
            for turn in turns
        ]
        row = renderer.conversation(plain[:-1], plain[-1].content, source, True, tools)
    if is_finished:
        return row
    return TokenRow(row.token_ids[:-1], row.response_mask[:-1], row.source)
