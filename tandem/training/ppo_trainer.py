"""PPO's two halves: making experience with the engine, and learning from it.

A step is one rollout and its updates. Departures from DeepSpeed-Chat: answers are sampled, EOS is
a trained token, advantages are whitened, several epochs and minibatches work, every coefficient
is a knob, and the ratio before the first update is measured and must be 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from tandem.config.schema import RunConfig, num_updates
from tandem.engine.forward import response_logprobs
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.learner import Learner
from tandem.engine.oom import MicroBatchBudget
from tandem.engine.update import LossTerm, MicroBatchLoss, Update, rehearse, training_mode
from tandem.errors import BadStepError, ConfigError, NumericsError
from tandem.generation.sampler import sequence_key
from tandem.metrics.timing import Phases
from tandem.objectives.kl import Estimator, adapted_kl_coef, token_kl
from tandem.objectives.losses import policy_loss, sft_loss, value_loss
from tandem.objectives.masked import masked_sum
from tandem.training.experience import AdvantagesOf, make_experience
from tandem.training.mixture import mixed_in
from tandem.training.operations import (
    batch_flops,
    generation_flops,
    scoring_flops,
    update_flops,
)
from tandem.training.reward_function import RewardFunction
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
        reward_function: RewardFunction | None = None,
        advantages_of: AdvantagesOf | None = None,
        source: RolloutSource | None = None,
        ptx_rows: Sequence[TokenRow] = (),
        phases: Phases | None = None,
        print_line: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            num_steps: rollouts that the learning rates' schedules last; None takes `ppo.steps`, or
                leaves the rates at their peak where that is 0.
            advantages_of: what is made of the rewards; None: GAE by the critic.
            source: where answers come from; None: one turn of the engine's policy.
            ptx_rows: rendered texts for mixture training.
            phases: times what is done.
            print_line: shows a line to the user.
        Raises:
            ConfigError: there is nothing to reward with, or the engine lacks a critic or reference
                that the algorithm needs.
        """
        has_model = engine.scorer is not None and config.ppo.reward_model_weight > 0
        if reward_function is None and not has_model:
            raise ConfigError(
                "PPOTrainer must have a reward; got no reward function and no reward model of a "
                "weight above 0. Pass reward_function=, or RLHFEngine(reward_model=...)."
            )
        if engine.critic is None and advantages_of is None:
            raise ConfigError(
                "PPOTrainer must have a critic for its advantages; the engine has none. Pass "
                "advantages_of=, or an engine with a critic."
            )
        if not engine.has_reference and config.ppo.kl_coef > 0:
            raise ConfigError(
                f"ppo.kl_coef must be 0 without a reference; got {config.ppo.kl_coef:g}. Set it to "
                "0, or use an engine with a reference."
            )
        self.engine = engine
        self.config = config
        self.advantages_of = advantages_of
        self.source = source or SingleTurn(engine)
        self.reward_function = reward_function
        self.ptx_rows = ptx_rows
        self.phases = phases or Phases()
        self.budget = MicroBatchBudget(engine.settings, engine.world, print_line)
        self.kl_coef = config.ppo.kl_coef
        if num_steps := num_steps or config.ppo.steps:
            actor_steps = max(1, num_steps - config.ppo.critic_warmup_steps)
            engine.actor_learner.schedule(num_updates(config, actor_steps))
            if engine.critic_learner is not None:
                engine.critic_learner.schedule(num_updates(config, num_steps))

    @property
    def ratio_tolerance(self) -> float:
        """How far the mean |log-ratio| before an update may be from 0, in nats."""
        return self.config.ppo.ratio_tolerance or RATIO_TOLERANCE[self.engine.dtype]

    def generate_experience(
        self, prompts: Sequence[PromptRow], *, step: int, numbers: Sequence[int] | None = None
    ) -> Experience:
        """Answer the prompts and score the answers.

        Args:
            step, numbers: with the seed they key the sampling (see `generate`).
        """
        engine, config = self.engine, self.config
        with self.phases("generate") as phase:
            rollout = self.source.collect(prompts, step=step, numbers=numbers)
            phase.samples, phase.tokens = len(rollout), rollout.batch.num_response_tokens
            phase.flops = generation_flops(engine, rollout)
        with self.phases("score") as phase:
            experience = make_experience(
                rollout,
                engine,
                config.ppo,
                kl_coef=self.kl_coef,
                reward_function=self.reward_function,
                advantages_of=self.advantages_of,
            )
            phase.samples = len(rollout)
            phase.tokens = int(rollout.batch.attention_mask.sum())
            phase.flops = scoring_flops(engine, rollout, experience)
        return experience

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
        ppo, engine, log = self.config.ppo, self.engine, Means()
        trains_actor = step > ppo.critic_warmup_steps
        epochs_done, stop = ppo.epochs, False
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
                phase.samples += len(minibatch)
                phase.tokens += int(minibatch.batch.attention_mask.sum())
                phase.flops += update_flops(engine, minibatch.batch, actor=trains_actor)
                if trains_actor and self._has_ptx:
                    texts = self._ptx_batch(step, number)
                    phase.flops += batch_flops(engine.actor, texts, backward=True)
                if stop:
                    epochs_done = number // self._updates_per_epoch
                    break
        self._adapt_kl_coef(experience)
        return {**log.means(), "epochs_done": float(epochs_done)}

    def rehearse(self, prompts: Sequence[PromptRow]) -> None:
        """The largest micro-batches that can come, forward and backward, for nothing: what does
        not fit into memory is known before the first step.

        Raises:
            OutOfMemoryError: it does not.
        """
        engine = self.engine
        answer = self.config.sampling.max_new_tokens
        length = max(len(prompt) for prompt in prompts) + answer
        device = engine.device

        # No rank is dealt more answers of a minibatch than this.
        share = -(-self.config.ppo.minibatch_size // engine.world.size)

        def batch(max_tokens: int) -> TokenBatch:
            rows = max(1, min(max_tokens // length, share))
            response = torch.zeros((rows, length), dtype=torch.bool, device=device)
            response[:, length - answer :] = True
            ids = torch.full((rows, length), engine.renderer.pad_token_id, device=device)
            # No two rows share their prompt: the most that a micro-batch can take.
            vocabulary = engine.actor.config.get_text_config().vocab_size
            ids[:, 0] = torch.arange(rows, device=device) % vocabulary
            return TokenBatch(ids, torch.ones_like(response), response)

        def actor_loss(max_tokens: int) -> Tensor:
            with_entropy = self.config.ppo.entropy_coef > 0
            return engine.actor_logprobs(batch(max_tokens), with_entropy=with_entropy)[0].sum()

        def critic_loss(max_tokens: int) -> Tensor:
            return engine.values(batch(max_tokens)).sum()

        with training_mode(*engine.trained_models):
            rehearse(self.budget, engine.actor_learner, actor_loss)
            if engine.critic_learner is not None:
                rehearse(self.budget, engine.critic_learner, critic_loss)

    @property
    def _updates_per_epoch(self) -> int:
        return num_updates(self.config, 1) // self.config.ppo.epochs

    def _minibatches(self, experience: Experience, step: int) -> Iterator[tuple[int, Tensor]]:
        """Every update's number within the step and its rows. Prompts are shuffled each epoch by
        (seed, step, epoch); the answers to one stay together, so that they can share it."""
        found, group = experience.group.unique(return_inverse=True)
        for epoch in range(self.config.ppo.epochs):
            key = sequence_key(self.config.seed, step, epoch, 0)
            places = torch.randperm(len(found), generator=torch.Generator().manual_seed(key))
            order = places.argsort().to(group.device)[group].argsort(stable=True)
            minibatches = order.to(self.engine.device).split(self.config.ppo.minibatch_size)
            for number, rows in enumerate(minibatches):
                yield epoch * self._updates_per_epoch + number, rows

    def _update_actor(
        self, update: Update, minibatch: Experience, log: Means, step: int, number: int
    ) -> bool:
        """Teach the actor. Returns whether to leave the rollout's other updates."""
        learner, target = self.engine.actor_learner, self.config.ppo.early_stop_kl
        terms = [
            LossTerm(
                minibatch.batch.lengths().tolist(),
                minibatch.batch.num_response_tokens,
                lambda rows: self._actor_loss(minibatch.select(self._rows(rows))),
                batch=minibatch.batch,
            )
        ]
        if self._has_ptx:
            terms.append(self._ptx_term(step, number))
        learning_rate = learner.learning_rate
        check = partial(self._require_same_policy, minibatch) if number == 0 else None
        means, *others = update.learn(learner, terms, check)
        log.maximum("ratio_max", means.pop("ratio_max"))
        gap = means.pop("ratio_gap")
        if number == 0:
            log.add("ratio_gap_before_update", gap)
            log.add("policy_kl_before_update", means["policy_kl"])
            if self.engine.trusts_sampler:
                log.add("rollout_gap", gap)
        if others:
            means["ptx_loss"] = others[0]["loss"]
        for name, value in means.items():
            if name != "loss":
                log.add(name, value)
        log.add("actor_learning_rate", learning_rate)
        return bool(target > 0 and means["policy_kl"] > target)

    def _actor_loss(self, part: Experience) -> MicroBatchLoss:
        """The loss of some answers as a sum over response tokens."""
        ppo, mask = self.config.ppo, part.batch.response_mask
        logprobs, entropy = self.engine.actor_logprobs(
            part.batch, with_entropy=ppo.entropy_coef > 0
        )
        surrogate = policy_loss(
            logprobs,
            part.old_logprobs,
            part.advantages,
            mask,
            clip_low=ppo.clip_ratio,
            clip_high=ppo.clip_ratio,
        )
        loss = surrogate.loss
        sums = {
            "policy_loss": surrogate.loss,
            "clip_fraction": surrogate.clipped,
            "policy_kl": surrogate.kl,
            "ratio_mean": surrogate.ratio,
            "ratio_gap": surrogate.abs_log_ratio,
        }
        if ppo.entropy_coef > 0:
            loss = loss - ppo.entropy_coef * masked_sum(entropy, mask)
        if ppo.kl_in == "loss" and self.kl_coef > 0 and part.ref_logprobs is not None:
            estimator: Estimator = "k3" if ppo.kl_estimator == "k3" else "k2"
            kl = masked_sum(token_kl(logprobs, part.ref_logprobs, estimator), mask)
            loss = loss + self.kl_coef * kl
            sums["kl_loss"] = kl
        return MicroBatchLoss(loss, sums, {"ratio_max": surrogate.max_ratio})

    def _update_critic(
        self, update: Update, learner: Learner, minibatch: Experience, log: Means
    ) -> None:
        """Teach the critic."""

        def loss(rows: list[int]) -> MicroBatchLoss:
            part = minibatch.select(self._rows(rows))
            assert part.values is not None
            assert part.returns is not None
            found = value_loss(
                self.engine.values(part.batch),
                part.values,
                part.returns,
                part.batch.response_mask,
                value_clip=self.config.ppo.value_clip,
            )
            sums = {"value_loss": found.loss, "value_clip_fraction": found.clipped}
            return MicroBatchLoss(found.loss, sums)

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
        return bool(self.ptx_rows) and self.config.ppo.ptx_coef > 0

    def _ptx_batch(self, step: int, number: int) -> TokenBatch:
        """The texts of an update, which follow from its number alone."""
        update = (step - 1) * num_updates(self.config, 1) + number
        rows = mixed_in(self.ptx_rows, update, self.config)
        return TokenBatch.from_rows(rows, self.engine.renderer.pad_token_id)

    def _ptx_term(self, step: int, number: int) -> LossTerm:
        """ptx_coef * language-model loss per token of the update's texts."""
        batch = self._ptx_batch(step, number)

        def loss(rows: list[int]) -> MicroBatchLoss:
            text = batch.select(torch.tensor(rows)).to(self.engine.device)
            logprobs, _ = response_logprobs(self.engine.actor, text)
            return MicroBatchLoss(sft_loss(logprobs, text.response_mask))

        lengths, count = batch.lengths().tolist(), batch.num_response_tokens
        return LossTerm(lengths, count, loss, self.config.ppo.ptx_coef)

    def _require_same_policy(self, minibatch: Experience, means: Mapping[str, float]) -> None:
        """The policy must not differ from itself before it is updated."""
        tolerance, gap = self.ratio_tolerance, means["ratio_gap"]
        if gap <= tolerance:
            return
        cause = (
            "dropout is on: two forwards of one policy differ. Use --dropout 0"
            if self.config.dropout > 0 or self.config.lora.dropout > 0
            else "the training and scoring forwards of this model disagree. Use --dtype fp32, or "
            "raise ppo.ratio_tolerance if you know why"
        )
        raise NumericsError(
            "the policy ratio before the first update must be 1 (mean |log-ratio| at most "
            f"{tolerance:g}); got {gap:.3g} over {len(minibatch)} answers: {cause}."
        )

    def _adapt_kl_coef(self, experience: Experience) -> None:
        ppo = self.config.ppo
        if ppo.kl_coef_target > 0 and "kl" in experience.metrics:
            self.kl_coef = adapted_kl_coef(
                self.kl_coef,
                experience.metrics["kl"],
                target=ppo.kl_coef_target,
                horizon=ppo.kl_horizon,
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
