"""DAPO's dynamic sampling: further prompts in place of those whose answers all score alike.

Each group without a signal is replaced by the next prompt of the step's own order, until enough
groups have one. Which prompts a step answers therefore follows from their order alone, and not
from ranks, times or which answer ends first. Where it is possible (`Refill`) the next prompt joins
the running generation as soon as a group's scores are known; else (several ranks, a reward that
needs all answers at once) the missing prompts are answered in further rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Self

import torch
from torch import Tensor

from tandem.errors import GenerationError
from tandem.training.rollout_rows import joined
from tandem.training.scored_answers import ScoredAnswers
from tandem.types import PromptRow, Rollout

MorePrompts = Callable[[int, Sequence[PromptRow], int], Sequence[PromptRow]]
"""Further prompts of a step: its number, the prompts that it has, and how many are wanted. Two
calls for one prompt must give what one call for two gives."""

Answered = tuple[Rollout, ScoredAnswers]

_LOOK_SECONDS = 0.2
"""A wait without end would miss a Ctrl-C that comes just before it begins."""


class Refill:
    """Scores groups while others are being answered, and replaces those without a signal: the
    `following` of a rollout. A context manager; leaving it ends what still scores.

    Attributes:
        longest: tokens of the longest prompt that may follow.
    """

    def __init__(
        self,
        num_given: int,
        num_most: int,
        *,
        score: Callable[[Rollout], ScoredAnswers],
        more: Callable[[int], Sequence[PromptRow]],
        longest: int,
        stop: Callable[[], None] | None,
    ) -> None:
        """
        Args:
            num_given, num_most: prompts that the rollout starts with, and may have at most.
            score: of one prompt's answers.
            more: gives at most as many further prompts as it is asked for, each once.
            stop: makes a `score` that runs in another thread end soon. With it, groups are scored
                in a thread while answers are drawn; None: not where the device does both.
        """
        self.longest = longest
        self._asked, self._most = num_given, num_most
        self._score, self._more = score, more
        self._stop = stop
        self._thread = futures.ThreadPoolExecutor(1, "rewards") if stop is not None else None
        self._running: dict[futures.Future[ScoredAnswers], int] = {}
        self._scored: dict[int, ScoredAnswers] = {}
        self._missing = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._thread is None:
            return
        self._thread.shutdown(wait=False, cancel_futures=True)
        if error is not None and self._stop is not None:
            self._stop()  # else Ctrl-C would wait for a reward function's deadlines
        self._thread.shutdown(wait=True)

    def ended(self, place: int, answers: Rollout) -> None:
        """Score a group."""
        if self._thread is not None:
            self._running[self._thread.submit(self._score, answers)] = place
        else:
            self._note(place, self._score(answers))

    def following(self, *, wait: bool) -> Sequence[PromptRow]:
        """A prompt for each group without a signal that has none yet."""
        while True:
            self._look()
            wanted = min(self._missing, self._most - self._asked)
            self._missing = 0
            prompts = self._more(wanted) if wanted else ()
            if prompts or not wait or not self._running:
                break
            futures.wait(self._running, _LOOK_SECONDS, futures.FIRST_COMPLETED)
        self._asked += len(prompts)
        if too_long := [prompt for prompt in prompts if len(prompt) > self.longest]:
            raise GenerationError(
                f"{too_long[0].source}: a further prompt must have at most {self.longest} tokens "
                f"(dataset.max_prompt_tokens); got {len(too_long[0])}."
            )
        return prompts

    def scores(self) -> ScoredAnswers:
        """All groups' scores, in the order of their prompts."""
        return ScoredAnswers.joined([self._scored[place] for place in sorted(self._scored)])

    def _look(self) -> None:
        for future in [future for future in self._running if future.done()]:
            self._note(self._running.pop(future), future.result())

    def _note(self, place: int, scored: ScoredAnswers) -> None:
        self._scored[place] = scored
        group = torch.zeros(len(scored.scores), dtype=torch.long)
        self._missing += not bool(scored.has_signal(group.to(scored.scores.device)).any())


def refilled(
    collect: Callable[[Refill], Rollout], refill: Refill, num_given: int
) -> tuple[Rollout, ScoredAnswers, Tensor]:
    """One rollout in which prompts without a signal are replaced while it runs.

    Args:
        collect: answers the step's prompts and those that follow.
    Returns:
        all answers with their scores, and which to learn from (`_with_signal`).
    """
    with refill:
        rollout = collect(refill)
        scored = refill.scores()
    return rollout, scored, _with_signal(rollout, scored, num_given)


def in_rounds(
    first: Answered,
    *,
    num_most: int,
    answer: Callable[[int, int], Answered | None],
    pad_token_id: int,
) -> tuple[Rollout, ScoredAnswers, Tensor]:
    """The same by further rollouts, each of as many prompts as there are groups to replace.

    Args:
        first: the step's own prompts, answered and scored.
        num_most: prompts at most, the first counted.
        answer: takes a number of prompts and where in the step they begin, and makes and scores
            answers to them; None: there are no more.
    """
    parts = [first]
    wanted = asked = int(first[0].group.max()) + 1
    found = _num_with_signal(first)
    while missing := min(wanted - found, num_most - asked):
        part = answer(missing, asked)
        if part is None:
            break
        parts.append(part)
        asked += int(part[0].group.max()) + 1
        found += _num_with_signal(part)
    rollout = joined([made for made, _ in parts], pad_token_id)
    scored = ScoredAnswers.joined([scores for _, scores in parts])
    return rollout, scored, _with_signal(rollout, scored, wanted)


def _with_signal(rollout: Rollout, scored: ScoredAnswers, num_given: int) -> Tensor:
    """(B,) bool, the answers to learn from: those of groups with a signal, or of the step's own
    prompts where no group has one."""
    with_signal = rollout.group[scored.has_signal(rollout.group)].unique()
    if len(with_signal) == 0:
        return rollout.group < num_given
    return torch.isin(rollout.group, with_signal)


def _num_with_signal(answered: Answered) -> int:
    rollout, scored = answered
    return len(rollout.group[scored.has_signal(rollout.group)].unique())
