"""PPO's two halves: making experience with the engine, and learning from it.

A step is one rollout and its updates. Departures from DeepSpeed-Chat: answers are sampled, EOS is
a trained token, advantages are whitened, several epochs and minibatches work, every coefficient
is a knob, and the ratio before the first update is measured and must be 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.schema import RunConfig, num_updates
from tandem.engine.forward import deal_batch, response_logprobs
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.optimizer import Trainee, scaling_metrics, step_together
from tandem.engine.room import Room
from tandem.errors import BadStepError, ConfigError, NumericsError
from tandem.generation.sampler import sequence_key
from tandem.metrics.timing import Phases
from tandem.objectives.kl import Estimator, adapted_kl_coef, token_kl
from tandem.objectives.losses import PolicyLoss, policy_loss, sft_loss, value_loss
from tandem.objectives.masked import masked_sum
from tandem.training.experience import make_experience
from tandem.training.means import Means, require_finite
from tandem.training.mixture import mixed_in
from tandem.training.operations import batch_flops, generation_flops, scoring_flops
from tandem.training.reward_function import RewardFunction
from tandem.types import Experience, PromptRow, TokenBatch, TokenRow

Result = TypeVar("Result")

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
        reward_function: RewardFunction | None = None,
        ptx_rows: Sequence[TokenRow] = (),
        phases: Phases | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`ptx_rows` are rendered texts for mixture training; `phases` times what is done; `say`
        shows a line to the user. ConfigError if there is nothing to reward with."""
        has_model = engine.scorer is not None and config.ppo.reward_model_weight > 0
        if reward_function is None and not has_model:
            raise ConfigError(
                "PPOTrainer must have a reward; got no reward function and no reward model of a "
                "weight above 0. Pass reward_function=, or RLHFEngine(reward_model=...)."
            )
        self.engine = engine
        self.config = config
        self.reward_function = reward_function
        self.ptx_rows = ptx_rows
        self.phases = phases or Phases()
        self.room = Room(config, engine.world, say or _say_nothing)
        self.on_bad: Callable[[BadStepError, Experience], None] | None = None
        """Hears of updates that were left out, and of the answers they were made on; without it
        the error is raised."""
        self.kl_coef = config.ppo.kl_coef

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
            rollout = engine.rollout(prompts, step=step, numbers=numbers)
            phase.samples, phase.tokens = len(rollout), rollout.batch.num_response_tokens
            phase.flops = generation_flops(engine, rollout)
        with self.phases("score") as phase:
            experience = make_experience(
                rollout,
                engine,
                config.ppo,
                kl_coef=self.kl_coef,
                reward_function=self.reward_function,
            )
            phase.samples = len(rollout)
            phase.tokens = int(rollout.batch.attention_mask.sum())
            phase.flops = scoring_flops(engine, rollout, experience)
        return experience

    def train_rlhf(self, experience: Experience, *, step: int) -> dict[str, float]:
        """Update actor and critic on an experience; returns the step's metrics.

        Raises:
            NumericsError: the ratio before the first update is not 1; or, without `on_bad`, a
                gradient is not sound (BadStepError).
        """
        ppo, engine = self.config.ppo, self.engine
        trains_actor = step > ppo.critic_warmup_steps
        actor_log, critic_log = Means(), Means()
        epochs_done, stop = 0, False
        # Only dropout draws from it, other numbers on every rank.
        torch.manual_seed(self.config.seed + step + (self.engine.world.rank << 40))
        with self.phases("train") as phase:
            engine.train()
            for epoch in range(ppo.epochs):
                for number, rows in enumerate(self._minibatches(experience, step, epoch)):
                    minibatch = experience.select(rows)
                    first = epoch == 0 and number == 0
                    has_actor = False
                    if trains_actor:
                        with self._left_out_if_bad(minibatch):
                            update = partial(
                                self._update_actor, minibatch, actor_log, step, epoch, number, first
                            )
                            stop = self._fitting(engine.actor_trainee, update)
                            has_actor = True
                        phase.flops += batch_flops(engine.actor, minibatch.batch, backward=True)
                        if self._has_ptx:
                            texts = self._ptx_batch(step, epoch, number)
                            phase.flops += batch_flops(engine.actor, texts, backward=True)
                    with self._left_out_if_bad(minibatch):
                        update_critic = partial(self._update_critic, minibatch, critic_log)
                        self._fitting(engine.critic_trainee, update_critic)
                        self._step_scaled(has_actor, actor_log, critic_log)
                    phase.flops += batch_flops(engine.critic, minibatch.batch, backward=True)
                    phase.samples += len(minibatch)
                    phase.tokens += int(minibatch.batch.attention_mask.sum())
                    if stop:
                        break
                if stop:
                    break
                epochs_done += 1
            engine.actor.eval()
            engine.critic.eval()
        self._adapt_kl_coef(experience)
        return {**actor_log.means(), **critic_log.means(), "epochs_done": float(epochs_done)}

    def rehearse(self, prompts: Sequence[PromptRow]) -> None:
        """The largest micro-batches that can come, forward and backward, for nothing: what does
        not fit into memory is known before the first step.

        Raises:
            RoomError: it does not.
        """
        engine = self.engine
        answer = self.config.sampling.max_new_tokens
        length = max(len(prompt) for prompt in prompts) + answer
        device = engine.device

        # No rank is dealt more answers of a minibatch than this.
        share = -(-self.config.ppo.minibatch_size // engine.world.size)

        def batch() -> TokenBatch:
            rows = max(1, min(self.room.tokens // length, share))
            response = torch.zeros((rows, length), dtype=torch.bool, device=device)
            response[:, length - answer :] = True
            ids = torch.full((rows, length), engine.renderer.pad_token_id, device=device)
            return TokenBatch(ids, torch.ones_like(response), response)

        def actor() -> None:
            with_entropy = self.config.ppo.entropy_coef > 0
            with self.room.kept_for(engine.actor_trainee):
                loss = engine.actor_logprobs(batch(), with_entropy=with_entropy)[0].sum()
                engine.actor_trainee.backward(loss, 1.0, weight=0.0)
            engine.actor_trainee.forget()

        def critic() -> None:
            with self.room.kept_for(engine.critic_trainee):
                loss = engine.values(batch()).sum()
                engine.critic_trainee.backward(loss, 1.0, weight=0.0)
            engine.critic_trainee.forget()

        engine.train()
        self._fitting(engine.actor_trainee, actor)
        self._fitting(engine.critic_trainee, critic)
        engine.actor.eval()
        engine.critic.eval()

    def _fitting(self, trainee: Trainee, work: Callable[[], Result]) -> Result:
        model = cast(PreTrainedModel, trainee.model)
        return self.room.attempt(trainee.name, model, work, trainee.forget)

    def _minibatches(self, experience: Experience, step: int, epoch: int) -> Iterator[Tensor]:
        """Row numbers, shuffled anew each epoch by (seed, step, epoch)."""
        generator = torch.Generator().manual_seed(sequence_key(self.config.seed, step, epoch, 0))
        order = torch.randperm(len(experience), generator=generator).to(self.engine.device)
        yield from order.split(self.config.ppo.minibatch_size)

    def _update_actor(
        self, minibatch: Experience, log: Means, step: int, epoch: int, number: int, first: bool
    ) -> bool:
        """One optimizer step of the actor. Returns whether to leave the rollout's updates."""
        ppo, trainee = self.config.ppo, self.engine.actor_trainee
        count = minibatch.batch.num_response_tokens
        learning_rate = trainee.learning_rate
        totals: defaultdict[str, float] = defaultdict(float)
        dealt = deal_batch(minibatch.batch, self.room.tokens, self.engine.world)
        for rows, part in dealt:
            loss = self._actor_loss(minibatch.select(rows), totals, part.weight)
            is_last = part.is_last and not self._has_ptx
            trainee.backward(loss, count, weight=part.weight, is_last=is_last)
        log.maximum("ratio_max", self.engine.world.largest([totals.pop("ratio_max")])[0])
        sums = self.engine.world.sums(totals)
        means = {name: total / count for name, total in sums.items()}
        require_finite(trainee, means)
        gap, kl = means.pop("gap"), means["policy_kl"]
        if first:
            log.add("ratio_gap_before_update", gap)
            if self.engine.trusts_sampler:
                log.add("rollout_gap", gap)
            log.add("policy_kl_before_update", kl)
            self._require_same_policy(gap, minibatch)
        if self._has_ptx:
            means["ptx_loss"] = self._add_ptx_gradient(step, epoch, number)
            require_finite(trainee, means)
        for name, value in means.items():
            log.add(name, value)
        log.add("actor_learning_rate", learning_rate)
        if self.engine.scaler is None:
            self._note_actor_step(trainee.step(), log)
        return bool(ppo.target_kl > 0 and kl > ppo.target_kl)

    def _actor_loss(
        self, part: Experience, totals: defaultdict[str, float], weight: float
    ) -> Tensor:
        """The micro-batch's loss as a sum over response tokens; `weight` times the metrics' sums
        join `totals`."""
        ppo, mask = self.config.ppo, part.batch.response_mask
        logprobs, entropy = self.engine.actor_logprobs(
            part.batch, with_entropy=ppo.entropy_coef > 0
        )
        surrogate = policy_loss(
            logprobs, part.old_logprobs, part.advantages, mask, clip_ratio=ppo.clip_ratio
        )
        loss = surrogate.loss
        if ppo.entropy_coef > 0:
            loss = loss - ppo.entropy_coef * masked_sum(entropy, mask)
        if ppo.kl_in == "loss" and self.kl_coef > 0:
            estimator: Estimator = "k3" if ppo.kl_estimator == "k3" else "k2"
            kl = masked_sum(token_kl(logprobs, part.ref_logprobs, estimator), mask)
            loss = loss + self.kl_coef * kl
            totals["kl_loss"] += weight * float(kl.detach())
        _add_policy_sums(totals, surrogate, weight)
        return loss

    def _update_critic(self, minibatch: Experience, log: Means) -> None:
        """One optimizer step of the critic."""
        trainee = self.engine.critic_trainee
        count = minibatch.batch.num_response_tokens
        learning_rate = trainee.learning_rate
        totals: defaultdict[str, float] = defaultdict(float)
        world = self.engine.world
        for rows, part in deal_batch(minibatch.batch, self.room.tokens, world):
            chosen = minibatch.select(rows)
            loss = value_loss(
                self.engine.values(chosen.batch),
                chosen.values,
                chosen.returns,
                chosen.batch.response_mask,
                value_clip=self.config.ppo.value_clip,
            )
            trainee.backward(loss.loss, count, weight=part.weight, is_last=part.is_last)
            totals["value_loss"] += part.weight * float(loss.loss.detach())
            totals["value_clip_fraction"] += part.weight * float(loss.clipped)
            totals["rank_idle"] += part.idle * count  # the actor's rows are balanced alike
        means = {name: total / count for name, total in world.sums(totals).items()}
        require_finite(trainee, means)
        for name, mean in means.items():
            log.add(name, mean)
        if self.engine.scaler is None:
            log.add("critic_grad_norm", trainee.step())
        log.add("critic_learning_rate", learning_rate)

    @contextmanager
    def _left_out_if_bad(self, minibatch: Experience) -> Iterator[None]:
        """An update whose numbers are not sound changed nothing: `on_bad` hears of it."""
        try:
            yield
        except BadStepError as bad:
            # What the other model of a scaled pair has gathered goes with it.
            self.engine.actor_trainee.forget()
            self.engine.critic_trainee.forget()
            if self.on_bad is None:
                raise
            self.on_bad(bad, minibatch)

    def _note_actor_step(self, norm: float, log: Means) -> None:
        log.add("actor_grad_norm", norm)
        log.count("updates")
        if self.engine.ema is not None:
            self.engine.ema.update()

    def _step_scaled(self, has_actor: bool, actor_log: Means, critic_log: Means) -> None:
        """In fp16 both models step once both gradients are known to be good, or neither does."""
        engine = self.engine
        if engine.scaler is None:
            return
        trainees = [engine.critic_trainee, *([engine.actor_trainee] if has_actor else [])]
        norms = step_together(trainees, engine.scaler)
        for name, value in scaling_metrics(engine.scaler).items():
            critic_log.latest(name, value)
        if norms is None:
            return
        critic_log.add("critic_grad_norm", norms[0])
        if has_actor:
            self._note_actor_step(norms[1], actor_log)

    @property
    def _has_ptx(self) -> bool:
        return bool(self.ptx_rows) and self.config.ppo.ptx_coef > 0

    def _ptx_batch(self, step: int, epoch: int, number: int) -> TokenBatch:
        """The texts of an update, which follow from its number alone."""
        per_step = num_updates(self.config, 1)
        update = (step - 1) * per_step + epoch * (per_step // self.config.ppo.epochs) + number
        rows = mixed_in(self.ptx_rows, update, self.config)
        return TokenBatch.from_rows(rows, self.engine.renderer.pad_token_id)

    def _add_ptx_gradient(self, step: int, epoch: int, number: int) -> float:
        """Add the gradient of ptx_coef * language-model loss per token; returns that loss."""
        ppo, trainee = self.config.ppo, self.engine.actor_trainee
        batch = self._ptx_batch(step, epoch, number)
        count = batch.num_response_tokens
        total = 0.0
        world = self.engine.world
        for positions, part in deal_batch(batch, self.room.tokens, world):
            text = batch.select(positions).to(self.engine.device)
            loss = sft_loss(response_logprobs(self.engine.actor, text)[0], text.response_mask)
            scaled = ppo.ptx_coef * loss
            trainee.backward(scaled, count, weight=part.weight, is_last=part.is_last)
            total += part.weight * float(loss.detach())
        return world.sums({"loss": total})["loss"] / count

    def _require_same_policy(self, gap: float, minibatch: Experience) -> None:
        """The policy must not differ from itself before it is updated."""
        tolerance = self.ratio_tolerance
        if gap <= tolerance:
            return
        self.engine.actor_trainee.forget()
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
        if ppo.kl_target > 0:
            self.kl_coef = adapted_kl_coef(
                self.kl_coef,
                experience.metrics["kl"],
                target=ppo.kl_target,
                horizon=ppo.kl_horizon,
                num_answers=len(experience),
            )


def _say_nothing(line: str) -> None:
    """Where nobody listens."""


def _add_policy_sums(totals: defaultdict[str, float], loss: PolicyLoss, weight: float) -> None:
    totals["policy_loss"] += weight * float(loss.loss.detach())
    totals["clip_fraction"] += weight * float(loss.clipped)
    totals["policy_kl"] += weight * float(loss.kl)
    totals["ratio_mean"] += weight * float(loss.ratio)
    totals["gap"] += weight * float(loss.abs_log_ratio)
    totals["ratio_max"] = max(totals["ratio_max"], weight * float(loss.max_ratio))
