"""Where a step's answers come from, if not from the engine alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem.types import PromptRow, Rollout


class RolloutSource(Protocol):
    """Answers prompts with the policy in training; all ranks call it and get the same rollout.

    Conversations with an environment are one (`conversations`). In what it returns, `response_mask`
    marks every token that the policy sampled, in as many spans as it had turns; tokens of the
    environment lie between them, with log-prob 0. Losses, rewards and advantages step over those.
    Row i answers prompt `group[i]`; `prompts[i].messages` holds all turns before the last answer
    and `responses[i]` that answer, from which a reward model with another tokenizer renders the
    whole.
    """

    def collect(
        self, prompts: Sequence[PromptRow], *, step: int, numbers: Sequence[int] | None = None
    ) -> Rollout:
        """The answers to these prompts.

        Args:
            step, numbers: with the run's seed they key the sampling (see `generation.generate`).
        """
