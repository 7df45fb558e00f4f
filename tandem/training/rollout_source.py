"""Where a step's answers come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem.engine.hybrid import RLHFEngine
from tandem.generation.following import Following
from tandem.generation.keeping import StateKeeper
from tandem.types import PromptRow, Rollout


class RolloutSource(Protocol):
    """Answers prompts with the policy in training; all ranks call it and get the same rollout.

    Conversations with an environment are another one (`conversations`). In what it returns,
    `response_mask` marks every token that the policy sampled, in as many spans as it had turns;
    tokens of the environment lie between them, with log-prob 0. Losses, rewards and advantages step
    over those. Row i answers
    prompt `group[i]`; `prompts[i].messages` holds all turns before the last answer and
    `responses[i]` that answer, from which a reward model with another tokenizer renders the whole.
    """

    def collect(
        self, prompts: Sequence[PromptRow], *, step: int, numbers: Sequence[int] | None = None
    ) -> Rollout:
        """The answers to these prompts.

        Args:
            step, numbers: with the run's seed they key the sampling (see `generation.generate`).
        """


class SingleTurn:
    """One answer, or `sampling.samples_per_prompt` of them, to each prompt."""

    def __init__(self, engine: RLHFEngine) -> None:
        self._engine = engine

    def collect(
        self, prompts: Sequence[PromptRow], *, step: int, numbers: Sequence[int] | None = None
    ) -> Rollout:
        """The engine's own rollout."""
        return self._engine.rollout(prompts, step=step, numbers=numbers)

    def collect_kept(
        self,
        prompts: Sequence[PromptRow],
        keeper: StateKeeper,
        *,
        step: int,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """The same, with the states of its tokens kept where they can be."""
        return self._engine.rollout(prompts, step=step, numbers=numbers, keeper=keeper)

    def collect_with(
        self,
        prompts: Sequence[PromptRow],
        following: Following,
        *,
        step: int,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """The same with prompts that join while it runs, where the engine `can_follow`."""
        return self._engine.rollout(prompts, step=step, numbers=numbers, following=following)
