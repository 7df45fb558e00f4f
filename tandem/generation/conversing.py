"""Conversations that go on within a rollout: what an answer hears back, in the same KV memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from tandem.generation.drawn import Drawn
from tandem.generation.request import Request
from tandem.types import PromptRow

End = Literal["", "over", "length", "turns", "tokens", "failed"]
"""How a conversation ended: not yet, by its environment, by an answer that the length limit cut
off, after its last answer or its last tokens, or since the environment failed."""


@dataclass(frozen=True, slots=True)
class ConversationRow(PromptRow):
    """The prompt of the last answer of a conversation that may have gone on.

    token_ids: of the whole conversation up to where that answer begins, as it was sampled and
    heard. messages: the same as turns. given: how many of them are the data's. end: how it ended.
    calls, failed_calls: of tools, that were made and that failed.
    """

    given: int = 0
    end: End = ""
    calls: int = 0
    failed_calls: int = 0

    @staticmethod
    def begun(row: PromptRow) -> ConversationRow:
        """One that has only its data's prompt."""
        given = len(row.messages)
        return ConversationRow(
            row.token_ids, row.messages, row.columns, row.source, row.tools, given
        )

    @property
    def num_answers(self) -> int:
        """Answers in it, the last one counted."""
        return 1 + sum(turn.role == "assistant" for turn in self.messages[self.given :])


class Conversing(Protocol):
    """Hears of answers that may hear something back, and says how their conversations go on."""

    @property
    def max_answers(self) -> int:
        """Most answers of one conversation."""

    @property
    def longest(self) -> int:
        """Most tokens of the prompt of an answer."""

    def answered(
        self, place: int, row: ConversationRow, token_ids: Sequence[int], text: str
    ) -> None:
        """An answer has ended with a stop, and is not its conversation's last by its number.

        Args:
            place: the conversation's, by which `going_on` names it.
            row: what it answers. token_ids: it, its stop token included. text: without.
        """

    def going_on(self, *, wait: bool) -> Sequence[tuple[int, ConversationRow]]:
        """Conversations of which it is known by now how they go on: with the prompt of their next
        answer, or with an `end` and the row as it was.

        Args:
            wait: nothing else is left to draw: wait for some. None then means that none is due.
        """


class Conversed:
    """The conversations of a rollout, a chain of requests each.

    Attributes:
        rows: of each conversation, the prompt of its last answer. chains: its requests, in order.
        num_answers: requests so far; they are numbered in the order in which they came.
    """

    keeps_answers = True

    def __init__(
        self,
        source: Conversing,
        prompts: Sequence[PromptRow],
        groups: Sequence[Sequence[Request]],
        request_of: Callable[[ConversationRow, int, int], Request],
        text_of: Callable[[Request, list[int]], str],
    ) -> None:
        """
        Args:
            prompts, groups: P prompts and the requests of each, its samples.
            request_of: the next answer's, from its prompt, the place of its conversation and a
                number of its own.
            text_of: an ended answer's text from its tokens.
        """
        self.rows = [
            ConversationRow.begun(row)
            for row, group in zip(prompts, groups, strict=True)
            for _ in group
        ]
        self.chains = [[request] for group in groups for request in group]
        self.num_answers = len(self.chains)
        self._places = {chain[0]: place for place, chain in enumerate(self.chains)}
        self._source, self._request_of, self._text_of = source, request_of, text_of

    @property
    def longest(self) -> int:
        """Most tokens of the prompt of an answer."""
        return self._source.longest

    def after(self, drawn: Sequence[Drawn]) -> list[list[Request]]:
        """What to submit after a step that drew these tokens."""
        for part in drawn:
            for request in part.requests:
                if request.ended and (place := self._places.pop(request, None)) is not None:
                    self._ended(place, request)
        return self._continued(self._source.going_on(wait=False))

    def at_end(self) -> list[list[Request]]:
        """What to submit when nothing is left to draw; nothing: all conversations are over."""
        while known := self._source.going_on(wait=True):
            if found := self._continued(known):
                return found
        return []

    def _ended(self, place: int, request: Request) -> None:
        row = self.rows[place]
        if not request.finished:
            self.rows[place] = replace(row, end="length")
        elif len(self.chains[place]) >= self._source.max_answers:
            self.rows[place] = replace(row, end="turns")
        else:
            token_ids = request.drawn[: request.length]
            self._source.answered(place, row, token_ids, self._text_of(request, token_ids))

    def _continued(self, known: Sequence[tuple[int, ConversationRow]]) -> list[list[Request]]:
        found = []
        for place, row in known:
            self.rows[place] = row
            if row.end:
                continue
            request = self._request_of(row, place, self.num_answers)
            self.num_answers += 1
            self._places[request] = place
            self.chains[place].append(request)
            found.append([request])
        return found
