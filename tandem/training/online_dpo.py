"""Online DPO: the policy answers each prompt several times, the reward picks the better and the
worse answer, and DPO's loss learns from them.

Rollouts, scores and evaluation are PPO's, and so are their knobs (section `ppo`); the loss and its
knobs are DPO's (section `dpo`). There is no critic. Of more than two answers the best and the worst
are taken; a prompt whose answers tie is skipped and counted.
Source: arXiv:2402.04792. Differs: a reward model or function picks, not a judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.checkpoint.state import SavedState
from tandem.config.updates import minibatch_size, num_rollouts
from tandem.data.loader import BatchOrder
from tandem.engine.forward import Rows
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.oom import MicroBatchBudget
from tandem.engine.state import engine_state, restore_engine
from tandem.engine.update import (
    LossTerm,
    MicroBatchLoss,
    Update,
    rehearse,
    training_mode,
)
from tandem.errors import BadStepError, DataError
from tandem.generation.sampler import sequence_key
from tandem.metrics.timing import Phases
from tandem.objectives.preferences import AnswerLogprobs
from tandem.rewards.scoring import RewardFunctions
from tandem.training.algorithm import algorithm_of
from tandem.training.answer_records import AnswerKeeper
from tandem.training.dpo import describe_loss, loss_of_pairs
from tandem.training.evaluate import policy_metrics
from tandem.training.experience import shaped_rewards
from tandem.training.flight_recorder import rows_of
from tandem.training.operations import generation_flops, scoring_flops, update_flops
from tandem.training.policy_functions import named_pair_losses
from tandem.training.ppo import first_answers, reward_source, save_engine
from tandem.training.reference import halves
from tandem.training.reward_function import columns_given, rewards_of
from tandem.training.run_folder import Run
from tandem.training.scored_answers import score_answers
from tandem.training.stage_data import StepRows
from tandem.training.stage_loop import StageJob, StepLoop
from tandem.training.step_metrics import Means, count_rows, note_steps
from tandem.types import Experience, PromptRow, TokenBatch

_NOT_OURS = ("advantage_", "shaped_return", "kl_coef", "groups_without_signal")
"""Metrics of an experience that speak of what only PPO and GRPO make of it. `tied_prompts` counts
groups without signal here."""


def prepare(run: Run, rows: StepRows) -> StageJob:
    """Online DPO, ready to run; it leaves `RUN/online-dpo/{actor,ema}`.

    Raises:
        DataError: there is no prompt.
        ConfigError: there is nothing to reward with.
    """
    config, prompts = run.config, rows.prompts
    if not prompts:
        raise DataError("stage online-dpo must have at least one prompt; got none. See the drops.")
    order = BatchOrder(
        num_rows=len(prompts),
        batch_size=config.ppo.prompts_per_step,
        seed=config.seed,
        epochs=None,
        max_steps=num_rollouts(config.ppo, len(prompts)),
    )
    engine = RLHFEngine(
        run.settings,
        run.policy_source("online-dpo"),
        tokenizer=rows.tokenizer,
        reward_model=reward_source(run, "online-dpo"),
        reward_tokenizer=run.reward_module.tokenizer if run.reward_module else None,
        reference=config.reference_model or None,
        has_critic=False,
        has_reference=config.dpo.needs_reference,
        world=run.world,
    )
    run.print_line(f"online-dpo: {engine.describe()}")
    run.print_line(f"online-dpo: {describe_loss(config.dpo)}")
    if engine.scorer is not None and (note := engine.scorer.note_on_text(engine.renderer)):
        run.print_line(f"online-dpo: {note}")
    if engine.scorer is not None and (note := engine.scorer.note_on_units()):
        run.print_line(f"online-dpo: {note}")
    columns = columns_given(config, rows).names
    functions = config.ppo.reward_function or None
    rewards = rewards_of(functions, config.scoring, run.print_line, columns)
    stage = OnlineDPO(engine, rows, rewards, order.num_steps, run)
    return StageJob(
        stage,
        prompts,
        order,
        config.ppo.eval_every,
        save=partial(save_engine, engine, rows, dtype=config.save_dtype),
    )


class OnlineDPO:
    """A step is one rollout and its updates (a `StageTrainer`)."""

    def __init__(
        self,
        engine: RLHFEngine,
        rows: StepRows,
        rewards: RewardFunctions | None,
        num_steps: int,
        run: Run,
    ) -> None:
        """`num_steps`: rollouts that the learning rate's schedule lasts."""
        self.engine = engine
        self.phases = Phases()
        self.thresholds: Mapping[str, float] = {}
        self._config = run.config
        self._rows = rows
        self._rewards = rewards
        self._given = named_pair_losses(run.config.dpo)
        self._kept = AnswerKeeper(engine.tokenizer, run.config.log.record_answers)
        self.followed = self._kept.followed
        self._print_line = run.print_line
        self._budget = MicroBatchBudget(engine.settings, engine.world, run.print_line)
        updates = -(-self._config.ppo.prompts_per_step // self._pairs_per_update)
        engine.actor_learner.schedule(num_steps * self._config.ppo.epochs * updates)

    @property
    def _pairs_per_update(self) -> int:
        return max(1, minibatch_size(self._config) // 2)

    def step(self, step: int, rows: Sequence[PromptRow], loop: StepLoop) -> dict[str, float]:
        """Answer the prompts, pair the answers, and learn from the pairs."""
        experience = self._experience(rows, step)
        loop.made(experience)
        every = self._config.log.print_samples_every
        if every and step % every == 0:
            loop.sample(*first_answers(experience))
        self._kept.record(loop, experience)
        pairs, metrics = best_and_worst(experience, len(rows))
        return {**metrics, **self._learn(experience, pairs, step, loop)}

    def _experience(self, prompts: Sequence[PromptRow], step: int) -> Experience:
        engine, config = self.engine, self._config
        with self.phases("generate") as phase:
            rollout = engine.rollout(prompts, step=step)
            phase.samples, phase.tokens = len(rollout), rollout.batch.num_response_tokens
            phase.flops = generation_flops(engine, rollout)
        with self.phases("score") as phase:
            scored = score_answers(
                rollout,
                engine.scorer,
                engine.renderer,
                config.ppo,
                self._rewards,
                engine.world,
                combine=config.scoring.combine,
            )
            scored.tell_failed_models(self._print_line)
            algorithm = algorithm_of(
                config.ppo,
                config.sampling.max_new_tokens,
                advantages_of=lambda made: (torch.zeros_like(made.rewards), None),
            )
            shaped = shaped_rewards(rollout, scored, engine, algorithm, kl_coef=0.0)
            experience = shaped.with_advantages(algorithm)
            count_rows(phase, rollout.batch)
            phase.flops = scoring_flops(engine, rollout, experience)
        ours = {n: v for n, v in experience.metrics.items() if not n.startswith(_NOT_OURS)}
        return replace(experience, metrics=ours)

    def _learn(
        self, experience: Experience, pairs: Tensor, step: int, loop: StepLoop
    ) -> dict[str, float]:
        """The updates on (P, 2) pairs of an experience's rows; metrics of the step."""
        engine, log = self.engine, Means()
        with self.phases("train") as phase, training_mode(engine.actor):
            for rows in self._minibatches(pairs, step):
                part = experience.select(rows.flatten())
                try:
                    with Update(self._budget) as update:
                        learning_rate = engine.actor_learner.learning_rate
                        (means,) = update.learn(engine.actor_learner, [self._term(part)])
                except BadStepError as bad:
                    loop.skip(bad, rows_of(part.batch))
                    continue
                means["preference_loss"] = means.pop("loss")
                for name, value in {**means, "actor_learning_rate": learning_rate}.items():
                    log.add(name, value)
                note_steps(engine, update, log)
                count_rows(phase, part.batch)
                phase.flops += update_flops(engine, part.batch, actor=True)
        return log.means()

    def _minibatches(self, pairs: Tensor, step: int) -> Iterator[Tensor]:
        """The pairs of every update, in another order each epoch, by (seed, step, epoch)."""
        if not len(pairs):
            return
        for epoch in range(self._config.ppo.epochs):
            key = sequence_key(self._config.seed, step, epoch, 0)
            order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(key))
            for numbers in order.split(self._pairs_per_update):
                yield pairs[numbers]

    def _term(self, pairs: Experience) -> LossTerm:
        """DPO's loss of pairs, whose rows come as chosen, rejected, chosen, rejected ..."""
        lengths = pairs.batch.on_host().lengths().view(-1, 2)

        def loss(numbers: Rows) -> MicroBatchLoss:
            first, there = 2 * numbers.host, 2 * numbers.on(pairs.batch.token_ids.device)
            part = pairs.select(torch.cat([first, first + 1]), torch.cat([there, there + 1]))
            chosen, rejected = halves(self._logprobs(part))
            result = loss_of_pairs(chosen, rejected, self._config.dpo, self._given)
            sums = {
                "preference_accuracy": result.accuracy,
                "preference_margin": result.chosen_reward - result.rejected_reward,
            }
            return MicroBatchLoss(result.loss, sums)

        return LossTerm((2 * lengths.amax(dim=1)).tolist(), len(lengths), loss)

    def _logprobs(self, part: Experience) -> AnswerLogprobs:
        logprobs, _ = self.engine.actor_logprobs(part.batch, with_entropy=False)
        reference = None if part.ref_logprobs is None else part.ref_logprobs.sum(dim=1)
        return AnswerLogprobs(logprobs.sum(dim=1), part.batch.response_mask.sum(dim=1), reference)

    def evaluate(self) -> dict[str, float]:
        """Scores of answers to held-out prompts."""
        heldout = self._rows.heldout_prompts[: self._config.ppo.eval_prompts]
        return policy_metrics(
            self.engine,
            heldout,
            self._config,
            self._rewards,
            self._kept.follow,
            print_line=self._print_line,
        )

    def rehearse(self) -> None:
        """The largest micro-batch that can come, forward and backward, for nothing."""
        engine, answer = self.engine, self._config.sampling.max_new_tokens
        length = max(map(len, self._rows.prompts)) + answer
        share = -(-self._pairs_per_update // engine.world.size)

        def loss(max_tokens: int) -> Tensor:
            rows = 2 * max(1, min(max_tokens // (2 * length), share))
            response = torch.zeros((rows, length), dtype=torch.bool, device=engine.device)
            response[:, length - answer :] = True
            ids = torch.full((rows, length), engine.renderer.pad_token_id, device=engine.device)
            batch = TokenBatch(ids, torch.ones_like(response), response)
            return engine.actor_logprobs(batch, with_entropy=False)[0].sum()

        with training_mode(engine.actor):
            rehearse(self._budget, engine.actor_learner, loss)

    def state(self) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
        """The engine's; no numbers."""
        return engine_state(self.engine), {}

    def restore(self, state: SavedState) -> None:
        """Continue from a checkpoint."""
        restore_engine(state, self.engine)


def best_and_worst(experience: Experience, num_prompts: int) -> tuple[Tensor, dict[str, float]]:
    """(P, 2) int64 rows of the best and the worst answer to each prompt, and what was skipped.

    Args:
        num_prompts: that were answered; of some, no answer may have been scored.
    Of equal scores the first answer is the best and the last the worst. A prompt is skipped where
    all scores are equal or fewer than two answers have any.
    """
    scores, group = experience.scores.tolist(), experience.group.tolist()
    rows_of_prompt: dict[int, list[int]] = {}
    for row, prompt in enumerate(group):
        rows_of_prompt.setdefault(prompt, []).append(row)
    pairs, gaps = [], []
    for rows in rows_of_prompt.values():
        best = max(rows, key=lambda row: (scores[row], -row))
        worst = min(rows, key=lambda row: (scores[row], -row))
        if scores[best] > scores[worst]:
            pairs.append((best, worst))
            gaps.append(scores[best] - scores[worst])
    metrics = {
        "preference_pairs": float(len(pairs)),
        "tied_prompts": 1 - len(pairs) / num_prompts,
    }
    if gaps:
        metrics["score_gap"] = sum(gaps) / len(gaps)
    return torch.tensor(pairs, dtype=torch.long).view(-1, 2), metrics
