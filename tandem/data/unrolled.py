"""Every learned answer of a conversation, each behind the prompt that would ask for it.

Some templates write an answer otherwise once the conversation goes on: Qwen3's leave out its
thoughts. What was shown then is not what the model said, and cannot be learned there. So such a
conversation becomes several rows, one for each answer that is learned, up to that answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.errors import RewrittenError
from tandem.message import Answer, Message, answer_turn
from tandem.types import Source, TokenRow

if TYPE_CHECKING:
    from tandem.data.render import Renderer


def unrolled(
    renderer: Renderer, messages: Sequence[Message], answer: Answer, source: Source, tools: str
) -> tuple[TokenRow, ...]:
    """The conversation as one row, whose mask holds on every learned answer; or, if the template
    rewrites one of them later, as a row for each, whose mask holds on its last answer.

    Raises:
        DataError, ModelError: as `Renderer.conversation`.
    """
    try:
        return (renderer.conversation(messages, answer, source, False, tools),)
    except RewrittenError:
        turns = [*messages, answer_turn(answer)]
        last = len(turns) - 1
        answers = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
        return tuple(
            renderer.conversation(turns[:i], turns[i], source, True, tools)
            for i in answers
            if turns[i].learned or i == last
        )
