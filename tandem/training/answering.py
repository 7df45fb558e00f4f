"""A step's prompts, answered and scored; by dynamic sampling until enough groups have a signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from tandem.config.schema import RunConfig, rl_section
from tandem.engine.hybrid import RLHFEngine
from tandem.generation.keeping import StateKeeper
from tandem.metrics.timing import Phases
from tandem.rewards.scoring import RewardFunctions
from tandem.text import ignore_line
from tandem.training.algorithm import Algorithm
from tandem.training.checks.agreement import require_same_prompts
from tandem.training.dynamic_sampling import Answered, MorePrompts, Refill, in_rounds, refilled
from tandem.training.operations import generation_flops
from tandem.training.rollout_source import RolloutSource
from tandem.training.scored_answers import ScoredAnswers, score_answers
from tandem.training.step_metrics import count_rows
from tandem.types import PromptRow, Rollout


class Answering:
    """Answers prompts with the policy in training and scores the answers.

    Attributes:
        more_prompts: where dynamic sampling finds further prompts; None: nowhere.
        source: where answers come from.
    """

    def __init__(
        self,
        engine: RLHFEngine,
        config: RunConfig,
        algorithm: Algorithm,
        *,
        source: RolloutSource | None,
        rewards: RewardFunctions | None,
        more_prompts: MorePrompts | None,
        phases: Phases,
        print_line: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            source: where answers come from; None: the engine's rollouts.
            phases: times what is done.
            print_line: shows a line to the user, on the first rank; None prints.
        """
        self.more_prompts, self.source = more_prompts, source
        self._engine, self._config, self._algorithm = engine, config, algorithm
        self._rewards = rewards
        self._phases = phases
        self._print_line = print_line if engine.world.is_first else ignore_line

    def answered(
        self,
        prompts: Sequence[PromptRow],
        step: int,
        numbers: Sequence[int] | None = None,
        keeper: StateKeeper | None = None,
    ) -> Answered:
        """Answers to prompts, and their scores; `keeper` keeps the tokens' states if the rollout is
        the engine's."""
        made = self._answered(prompts, step, numbers, keeper)
        made[1].tell_failed_models(self._print_line)
        return made

    def _answered(
        self,
        prompts: Sequence[PromptRow],
        step: int,
        numbers: Sequence[int] | None = None,
        keeper: StateKeeper | None = None,
    ) -> Answered:
        require_same_prompts(prompts, self._engine.world)
        with self._phases("generate") as phase:
            if self.source is None:
                rollout = self._engine.rollout(prompts, step=step, numbers=numbers, keeper=keeper)
            else:
                rollout = self.source.collect(prompts, step=step, numbers=numbers)
            phase.samples, phase.tokens = len(rollout), rollout.batch.num_response_tokens
            phase.flops = generation_flops(self._engine, rollout)
        with self._phases("score") as phase:
            scored = self._scored(rollout)
            count_rows(phase, rollout.batch)
        return rollout, scored

    def with_signal(
        self, prompts: Sequence[PromptRow], step: int, numbers: Sequence[int] | None = None
    ) -> tuple[Rollout, ScoredAnswers, Tensor]:
        """Answers to as many prompts with a signal as are given, or to the most that
        `sampling_rounds` allows; their scores; and which to learn from, (B,) bool."""
        made = self._with_signal(prompts, step, numbers)
        made[1].tell_failed_models(self._print_line)
        return made

    def _with_signal(
        self, prompts: Sequence[PromptRow], step: int, numbers: Sequence[int] | None
    ) -> tuple[Rollout, ScoredAnswers, Tensor]:
        num_most = len(prompts) * self._algorithm.sampling_rounds
        if not self._can_refill():
            return in_rounds(
                self._answered(prompts, step, numbers),
                num_most=num_most,
                answer=partial(self._answered_more, list(prompts), step, numbers),
                pad_token_id=self._engine.renderer.pad_token_id,
            )
        refill = Refill(
            len(prompts),
            num_most,
            score=self._scored,
            more=partial(self._more, list(prompts), step),
            longest=max(self._config.dataset.max_prompt_tokens, *map(len, prompts)),
            # A reward model would compete with the generation for the same cores.
            stop=self._rewards.close if self._rewards and self._engine.scorer is None else None,
        )

        def collect(following: Refill) -> Rollout:
            return self._engine.rollout(prompts, step=step, numbers=numbers, following=following)

        with self._phases("generate") as phase, self._told_once():
            made = refilled(collect, refill, len(prompts))
            phase.samples, phase.tokens = len(made[0]), made[0].batch.num_response_tokens
            phase.flops = generation_flops(self._engine, made[0])
        return made

    def _told_once(self) -> AbstractContextManager[None]:
        """Within: what reward functions print and fail on is shown at the end, as of one batch."""
        return nullcontext() if self._rewards is None else self._rewards.told_once()

    def _can_refill(self) -> bool:
        """Whether prompts can join a running rollout, and groups be scored one by one."""
        scores_each = self._rewards is None or self._rewards.scores_each
        return self.source is None and self._engine.can_follow and scores_each

    def _scored(self, rollout: Rollout) -> ScoredAnswers:
        engine, config = self._engine, self._config
        scored = score_answers(
            rollout,
            engine.scorer,
            engine.renderer,
            rl_section(config),
            self._rewards,
            engine.world,
            combine=config.scoring.combine,
        )
        return scored.without_overlong(rollout, self._algorithm)

    def _more(self, prompts: list[PromptRow], step: int, count: int) -> Sequence[PromptRow]:
        """At most `count` further prompts, which join the step's."""
        if self.more_prompts is None:
            return ()
        more = self.more_prompts(step, prompts, count)
        prompts.extend(more)
        return more

    def _answered_more(
        self,
        prompts: list[PromptRow],
        step: int,
        numbers: Sequence[int] | None,
        count: int,
        place: int,
    ) -> Answered | None:
        """Answers to `count` further prompts, the first of them at that place in the step."""
        more = self._more(prompts, step, count)
        if not more:
            return None
        first = place if numbers is None else max(numbers) + 1 + place - len(numbers)
        return self._answered(more, step, range(first, first + len(more)))
