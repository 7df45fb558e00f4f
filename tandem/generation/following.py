"""Prompts that follow while others are being answered, in the same KV memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.generation.drawn import Drawn
from tandem.generation.request import Request
from tandem.types import PromptRow, Rollout


class Following(Protocol):
    """Hears of each prompt whose answers have all ended, and names prompts to answer next."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that may follow."""

    def ended(self, place: int, answers: Rollout) -> None:
        """All answers to one prompt have ended.

        Args:
            place: the prompt's, counted from 0 over given and following prompts.
            answers: they alone, without log-probs (0).
        """

    def following(self, *, wait: bool) -> Sequence[PromptRow]:
        """Prompts to answer next.

        Args:
            wait: nothing else is left to draw: decide now. No prompt then ends the rollout.
        """


class Followed:
    """The prompts and requests of a rollout that others may follow.

    Attributes:
        prompts, groups: all so far, and the requests of each.
    """

    keeps_answers = False

    def __init__(
        self,
        source: Following,
        prompts: Sequence[PromptRow],
        groups: Sequence[list[Request]],
        requests_of: Callable[[PromptRow, int], list[Request]],
        answers_of: Callable[[PromptRow, list[Request], list[list[int]]], Rollout],
    ) -> None:
        """
        Args:
            requests_of: the requests of a prompt at that place.
            answers_of: a prompt's answers from its ended requests and their tokens.
        """
        self.prompts, self.groups = list(prompts), list(groups)
        self._source, self._requests_of, self._answers_of = source, requests_of, answers_of
        self._token_ids: dict[Request, list[int]] = {}
        self._open = dict.fromkeys(range(len(self.prompts)))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that may follow."""
        return self._source.longest

    @property
    def num_answers(self) -> int:
        """Requests so far."""
        return sum(map(len, self.groups))

    def after(self, drawn: Sequence[Drawn]) -> list[list[Request]]:
        """What to submit after a step that drew these tokens."""
        for part in drawn:
            for request, token in zip(part.requests, part.token_ids, strict=True):
                self._token_ids.setdefault(request, []).append(token)
        for place in [p for p in self._open if all(r.ended for r in self.groups[p])]:
            del self._open[place]
            group = self.groups[place]
            token_ids = [self._token_ids.pop(request) for request in group]
            self._source.ended(place, self._answers_of(self.prompts[place], group, token_ids))
        return self._added(self._source.following(wait=False))

    def at_end(self) -> list[list[Request]]:
        """What to submit when nothing is left to draw; nothing: the rollout is over."""
        return self._added(self._source.following(wait=True))

    def _added(self, prompts: Sequence[PromptRow]) -> list[list[Request]]:
        for prompt in prompts:
            place = len(self.prompts)
            self._open[place] = None
            self.prompts.append(prompt)
            self.groups.append(self._requests_of(prompt, place))
        return self.groups[len(self.groups) - len(prompts) :]
