"""DAPO's dynamic sampling: further prompts in place of those whose answers all score alike.

A round is a rollout of the missing prompts by all ranks, scored before the next. Which groups are
kept follows from their order alone, so the result does not depend on ranks or on which answer ends
first; a refill of the running generation would save the last answers' wait in each round, and
would need scores while the engine generates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.training.experience import ScoredAnswers
from tandem.training.rollout_rows import joined
from tandem.types import PromptRow, Rollout

MorePrompts = Callable[[int, Sequence[PromptRow], int], Sequence[PromptRow]]
"""Further prompts of a step: its number, the prompts that it has, and how many are wanted."""

Answered = tuple[Rollout, ScoredAnswers]

_LEAST_SHARE = 0.25
"""At most four prompts are asked for each group that is missing."""


def enough_with_signal(
    first: Answered,
    *,
    rounds: int,
    answer: Callable[[int, int], Answered | None],
    pad_token_id: int,
) -> tuple[Rollout, ScoredAnswers, Tensor, int]:
    """Answers to as many prompts as there were at first, of groups whose scores differ.

    Args:
        first: the step's own prompts, answered and scored.
        rounds: rollouts at most, the first counted.
        answer: makes and scores answers to so many further prompts, the first of them with that
            number in the step; None: there are no more.
    Returns:
        all answers of all rounds with their scores; which to learn from, (B,) bool: those of the
        first groups with a signal, or the step's own where no group has one; the rounds made.
    """
    parts = [first]
    wanted = int(first[0].group.max()) + 1
    num_made, found = 1, _groups_with_signal(first)
    asked = wanted
    while found < wanted and num_made < rounds:
        share = max(found / asked, _LEAST_SHARE)
        missing = min(wanted, math.ceil((wanted - found) / share))
        part = answer(missing, asked)
        if part is None:
            break
        parts.append(part)
        num_made += 1
        asked += int(part[0].group.max()) + 1
        found += _groups_with_signal(part)
    rollout = joined([made for made, _ in parts], pad_token_id)
    scored = ScoredAnswers.joined([scores for _, scores in parts])
    group = rollout.group
    with_signal = group[scored.has_signal(group)].unique()[:wanted]
    if len(with_signal) == 0:
        return rollout, scored, group < wanted, num_made
    return rollout, scored, torch.isin(group, with_signal), num_made


def _groups_with_signal(answered: Answered) -> int:
    rollout, scored = answered
    return len(rollout.group[scored.has_signal(rollout.group)].unique())
