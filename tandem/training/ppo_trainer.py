"""The two halves of an RL step: making experience with the engine, and learning from it.

One trainer for PPO and for the algorithms without a critic, which differ in their `Algorithm`. A
step is one rollout and its updates. Departures from DeepSpeed-Chat: answers are sampled, EOS is
a trained token, advantages are whitened, several epochs and minibatches work, every coefficient
is a knob, and the ratio before the first update is measured and must be 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tandem.config.schema import RunConfig, num_updates, rl_section
from tandem.config.stages import rl_stage
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.learner import Learner
from tandem.engine.oom import MicroBatchBudget
from tandem.engine.update import LossTerm, MicroBatchLoss, Update, training_mode
from tandem.errors import BadStepError, ConfigError, NumericsError
from tandem.generation.sampler import sequence_key
from tandem.metrics.timing import Phases
from tandem.objectives.kl import adapted_kl_coef
from tandem.objectives.policy import aggregation
from tandem.training.algorithm import AdvantagesOf, actor_loss, algorithm_of, critic_loss
from tandem.training.dynamic_sampling import Answered, MorePrompts, enough_with_signal
from tandem.training.experience import make_experience, score_answers
from tandem.training.mixture import mixed_in, mixture_term
from tandem.training.operations import (
    batch_flops,
    generation_flops,
    scoring_flops,
    update_flops,
)
from tandem.training.rehearsal import rehearse_updates
from tandem.training.reward_function import GivenRewards, rewards_of
from tandem.training.rollout_source import RolloutSource, SingleTurn
from tandem.training.step_metrics import Means
from tandem.types import Experience, PromptRow, TokenBatch, TokenRow

Skip = Callable[[BadStepError, Experience], None]

RATIO_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Mean |log-ratio| that two forwards of one policy may differ by, in nats."""


class PPOTrainer:
    """Makes experience with an engine and learns from it.

    Its own state between steps is `kl_coef` alone; the rest is the engine's.
    """

    def __init__(
        self,
        engine: RLHFEngine,
        config: RunConfig,
        *,
        num_steps: int | None = None,
        reward_function: GivenRewards | None = None,
        advantages_of: AdvantagesOf | None = None,
        source: RolloutSource | None = None,
        ptx_rows: Sequence[TokenRow] = (),
        more_prompts: MorePrompts | None = None,
        phases: Phases | None = None,
        print_line: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            num_steps: rollouts that the learning rates' schedules last; None takes the stage's
                `steps`, or leaves the rates at their peak where that is 0.
            reward_function: one or several, by name or as they are; `scoring` says how they run.
            advantages_of: what is made of the rewards; None: what the stage's knobs say.
            source: where answers come from; None: one turn of the engine's policy.
            ptx_rows: rendered texts for mixture training.
            more_prompts: where dynamic sampling finds further prompts; None: nowhere.
            phases: times what is done.
            print_line: shows a line to the user.
        Raises:
            ConfigError: there is nothing to reward with, or the engine lacks a critic or reference
                that the algorithm needs.
        """
        rl = rl_section(config)
        algorithm = algorithm_of(rl, config.sampling.max_new_tokens)
        has_model = engine.scorer is not None and rl.reward_model_weight > 0
        self.reward_function = rewards_of(reward_function, config.scoring, print_line)
        if self.reward_function is None and not has_model:
            raise ConfigError(
                "PPOTrainer must have a reward; got no reward function and no reward model of a "
                "weight above 0. Pass reward_function=, or RLHFEngine(reward_model=...)."
            )
        if engine.critic is None and algorithm.has_critic and advantages_of is None:
            raise ConfigError(
                "PPOTrainer must have a critic for its advantages; the engine has none. Pass "
                "advantages_of=, or an engine with a critic."
            )
        if engine.critic is not None and not algorithm.has_critic:
            raise ConfigError(
                "PPOTrainer must get no critic, which this algorithm would not train; the engine "
                "has one. Use RLHFEngine(has_critic=False)."
            )
        if not engine.has_reference and rl.kl_coef > 0:
            raise ConfigError(
                f"{rl_stage(config.stages).section}.kl_coef must be 0 without a reference; got "
                f"{rl.kl_coef:g}. Set it to 0, or use an engine with a reference."
            )
        self.engine = engine
        self.config = config
        self.rl = rl
        self.algorithm = algorithm
        self.advantages_of = advantages_of
        self.source = source or SingleTurn(engine)
        self.ptx_rows = ptx_rows
        self.more_prompts = more_prompts
        self.phases = phases or Phases()
        self.budget = MicroBatchBudget(engine.settings, engine.world, print_line)
        self.kl_coef = rl.kl_coef
        if num_steps := num_steps or rl.steps:
            actor_steps = max(1, num_steps - algorithm.critic_warmup_steps)
            engine.actor_learner.schedule(num_updates(config, actor_steps))
            if engine.critic_learner is not None:
                engine.critic_learner.schedule(num_updates(config, num_steps))

    @property
    def ratio_tolerance(self) -> float:
        """How far the mean |log-ratio| before an update may be from 0, in nats."""
        return self.rl.ratio_tolerance or RATIO_TOLERANCE[self.engine.dtype]

    def generate_experience(
        self, prompts: Sequence[PromptRow], *, step: int, numbers: Sequence[int] | None = None
    ) -> Experience:
        """Answer the prompts and score the answers.

        Args:
            step, numbers: with the seed they key the sampling (see `generate`).
        """
        own = self._answered(prompts, step, numbers)
        rollout, scored, kept, rounds = own[0], own[1], None, 1
        if self.algorithm.sampling_rounds > 1:
            rollout, scored, kept, rounds = enough_with_signal(
                own,
                rounds=self.algorithm.sampling_rounds,
                answer=partial(self._answered_more, list(prompts), step),
                pad_token_id=self.engine.renderer.pad_token_id,
            )
        with self.phases("score") as phase:
            experience = make_experience(
                rollout,
                scored,
                self.engine,
                self.algorithm,
                kl_coef=self.kl_coef,
                kept=kept,
                advantages_of=self.advantages_of,
            )
            phase.flops = scoring_flops(self.engine, rollout, experience)
        if kept is None:
            return experience
        return replace(experience, metrics={**experience.metrics, "sampling_rounds": float(rounds)})

    def _answered(
        self, prompts: Sequence[PromptRow], step: int, numbers: Sequence[int] | None
    ) -> Answered:
        """Answers to prompts, and their scores."""
        engine = self.engine
        with self.phases("generate") as phase:
            rollout = self.source.collect(prompts, step=step, numbers=numbers)
            phase.samples, phase.tokens = len(rollout), rollout.batch.num_response_tokens
            phase.flops = generation_flops(engine, rollout)
        with self.phases("score") as phase:
            scored = score_answers(
                rollout, engine.scorer, engine.renderer, self.rl, self.reward_function, engine.world
            )
            phase.samples = len(rollout)
            phase.tokens = int(rollout.batch.attention_mask.sum())
        return rollout, scored.without_overlong(rollout, self.algorithm)

    def _answered_more(
        self, prompts: list[PromptRow], step: int, count: int, number: int
    ) -> Answered | None:
        """The same of `count` further prompts, which join the step's."""
        if self.more_prompts is None:
            return None
        more = self.more_prompts(step, prompts, count)
        if not more:
            return None
        prompts.extend(more)
        return self._answered(more, step, range(number, number + len(more)))

    def train_rlhf(
        self, experience: Experience, *, step: int, skip: Skip | None = None
    ) -> dict[str, float]:
        """Update actor and critic on an experience; returns the step's metrics.

        Args:
            skip: hears of an update that was left out, and of the answers it was made on; without
                it the error is raised.
        Raises:
            NumericsError: the ratio before the first update is not 1; or, without `skip`, a
                gradient is not sound (BadStepError).
        """
        engine, log = self.engine, Means()
        trains_actor = step > self.algorithm.critic_warmup_steps
        epochs_done, stop = self.rl.epochs, False
        # Only dropout draws from it, other numbers on every rank.
        torch.manual_seed(self.config.seed + step + (engine.world.rank << 40))
        with self.phases("train") as phase, training_mode(*engine.trained_models):
            for number, rows in self._minibatches(experience, step):
                minibatch = experience.select(rows)
                with _left_out(minibatch, skip), Update(self.budget) as update:
                    if trains_actor:
                        with _left_out(minibatch, skip):
                            stop = self._update_actor(update, minibatch, log, step, number)
                    if engine.critic_learner is not None:
                        self._update_critic(update, engine.critic_learner, minibatch, log)
                self._note_steps(update, log)
                learned = minibatch.batch.select(self._with_gradient(minibatch))
                phase.samples += len(learned)
                phase.tokens += int(learned.attention_mask.sum())
                phase.flops += update_flops(engine, learned, actor=trains_actor)
                if trains_actor and self._has_ptx:
                    texts = self._ptx_batch(step, number)
                    phase.flops += batch_flops(engine.actor, texts, backward=True)
                if stop:
                    epochs_done = number // self._updates_per_epoch
                    break
        self._adapt_kl_coef(experience)
        return {**log.means(), "epochs_done": float(epochs_done)}

    def rehearse(self, prompts: Sequence[PromptRow]) -> None:
        """Run the largest possible micro-batches forward and backward, to find out before the
        first step what does not fit into memory.

        Raises:
            OutOfMemoryError: it does not.
        """
        rehearse_updates(self.engine, self.budget, self.rl, self.algorithm, prompts)

    @property
    def _updates_per_epoch(self) -> int:
        return num_updates(self.config, 1) // self.rl.epochs

    def _minibatches(self, experience: Experience, step: int) -> Iterator[tuple[int, Tensor]]:
        """Every update's number within the step and its rows. Prompts are shuffled each epoch by
        (seed, step, epoch); the answers to one stay together, so that they can share it."""
        chosen, group = torch.arange(len(experience), device=self.engine.device), experience.group
        if experience.in_loss is not None:
            chosen, group = chosen[experience.in_loss], group[experience.in_loss.to(group.device)]
        if len(chosen) == 0:
            return
        found, group = group.unique(return_inverse=True)
        for epoch in range(self.rl.epochs):
            key = sequence_key(self.config.seed, step, epoch, 0)
            places = torch.randperm(len(found), generator=torch.Generator().manual_seed(key))
            order = places.argsort().to(group.device)[group].argsort(stable=True)
            minibatches = chosen[order.to(chosen.device)].split(self.rl.minibatch_size)
            for number, rows in enumerate(minibatches):
                yield epoch * self._updates_per_epoch + number, rows

    def _with_gradient(self, minibatch: Experience) -> Tensor:
        """The rows of a minibatch that its forward must read: not those that add exactly 0 to the
        gradient. One at least, so that a step is taken with every minibatch."""
        every = torch.arange(len(minibatch), device=self.engine.device)
        if self.advantages_of is not None or not self.algorithm.skips_without_signal():
            return every
        rows = every[(minibatch.advantages != 0).any(dim=1)]
        return rows if len(rows) else every[:1]

    def _update_actor(
        self, update: Update, minibatch: Experience, log: Means, step: int, number: int
    ) -> bool:
        """Train the actor. Returns whether to skip the rollout's other updates."""
        learner, algorithm = self.engine.actor_learner, self.algorithm
        mask = minibatch.batch.response_mask
        _, units = aggregation(mask, algorithm.normalization, max_tokens=algorithm.max_tokens)
        learned = minibatch.select(self._with_gradient(minibatch))
        log.add("answers_learned", len(learned) / len(minibatch))
        terms = [
            LossTerm(
                learned.batch.lengths().tolist(),
                units,
                lambda numbers: actor_loss(
                    self.engine,
                    algorithm,
                    learned.select(self._rows(numbers)),
                    kl_coef=self.kl_coef,
                ),
                batch=learned.batch,
            )
        ]
        if self._has_ptx:
            batch = self._ptx_batch(step, number)
            terms.append(mixture_term(self.engine.actor, batch, self.rl.ptx_coef))
        # The loss has its own denominator; metrics are means over the tokens of the forward.
        per_token = units / learned.batch.num_response_tokens
        learning_rate = learner.learning_rate
        check = partial(self._require_same_policy, learned, per_token) if number == 0 else None
        means, *others = update.learn(learner, terms, check)
        log.maximum("ratio_max", means.pop("ratio_max"))
        gap, largest_gap = means.pop("ratio_gap") * per_token, means.pop("gap_max")
        for name in ("policy_loss", "rank_idle"):
            log.add(name, means.pop(name))
        means = {name: value * per_token for name, value in means.items() if name != "loss"}
        if number == 0:
            log.add("ratio_gap_before_update", gap)
            log.add("policy_kl_before_update", means["policy_kl"])
            if self.engine.trusts_sampler:
                log.add("rollout_gap", gap)
                log.maximum("rollout_gap_max", largest_gap)
        if others:
            means["ptx_loss"] = others[0]["loss"]
        for name, value in means.items():
            log.add(name, value)
        log.add("actor_learning_rate", learning_rate)
        return 0 < self.rl.early_stop_kl < means["policy_kl"]

    def _update_critic(
        self, update: Update, learner: Learner, minibatch: Experience, log: Means
    ) -> None:
        """Train the critic."""

        def loss(rows: list[int]) -> MicroBatchLoss:
            return critic_loss(self.engine, self.algorithm, minibatch.select(self._rows(rows)))

        batch = minibatch.batch
        lengths, count = batch.lengths().tolist(), batch.num_response_tokens
        term = LossTerm(lengths, count, loss, batch=batch)
        learning_rate = learner.learning_rate
        (means,) = update.learn(learner, [term])
        for name in ("value_loss", "value_clip_fraction", "rank_idle"):
            log.add(name, means[name])
        log.add("critic_learning_rate", learning_rate)

    def _note_steps(self, update: Update, log: Means) -> None:
        """Log the steps that were taken; the average follows the actor's."""
        for name, norm in update.grad_norms.items():
            log.add(f"{name}_grad_norm", norm)
        for name, value in update.scaling.items():
            log.latest(name, value)
        if "actor" in update.grad_norms:
            log.count("updates")
            if self.engine.ema is not None:
                self.engine.ema.update()

    def _rows(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.engine.device)

    @property
    def _has_ptx(self) -> bool:
        return bool(self.ptx_rows) and self.rl.ptx_coef > 0

    def _ptx_batch(self, step: int, number: int) -> TokenBatch:
        """The texts of an update, which follow from its number alone."""
        update = (step - 1) * num_updates(self.config, 1) + number
        rows = mixed_in(self.ptx_rows, update, self.rl.ptx_batch_size, self.config.seed)
        return TokenBatch.from_rows(rows, self.engine.renderer.pad_token_id)

    def _require_same_policy(
        self, minibatch: Experience, per_token: float, means: Mapping[str, float]
    ) -> None:
        """The policy must not differ from itself before it is updated."""
        tolerance, gap = self.ratio_tolerance, means["ratio_gap"] * per_token
        if gap <= tolerance:
            return
        cause = (
            "dropout is on: two forwards of one policy differ. Use --dropout 0"
            if self.config.dropout > 0 or self.config.lora.dropout > 0
            else "the training and scoring forwards of this model disagree. Use --dtype fp32, or "
            "raise ratio_tolerance if you know why"
        )
        raise NumericsError(
            "the policy ratio before the first update must be 1 (mean |log-ratio| at most "
            f"{tolerance:g}); got {gap:.3g} over {len(minibatch)} answers: {cause}."
        )

    def _adapt_kl_coef(self, experience: Experience) -> None:
        rl = self.rl
        if rl.kl_coef_target > 0 and "kl" in experience.metrics:
            self.kl_coef = adapted_kl_coef(
                self.kl_coef,
                experience.metrics["kl"],
                target=rl.kl_coef_target,
                horizon=rl.kl_horizon,
                num_answers=len(experience),
            )


@contextmanager
def _left_out(minibatch: Experience, skip: Skip | None) -> Iterator[None]:
    """An update whose numbers are not sound changed nothing: `skip` hears of it."""
    try:
        yield
    except BadStepError as bad:
        if skip is None:
            raise
        skip(bad, minibatch)
