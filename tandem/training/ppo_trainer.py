"""The two halves of an RL step: making experience with the engine, and learning from it.

One trainer for PPO and for the algorithms without a critic, which differ in their `Algorithm`. A
step is one rollout and its updates. Departures from DeepSpeed-Chat: answers are sampled, EOS is
a trained token, advantages are whitened, several epochs and minibatches work, every coefficient
is a knob, and the ratio before the first update is measured and must be 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tandem.config.schema import RunConfig, minibatch_size, num_updates, rl_section
from tandem.config.stages import rl_stage
from tandem.engine.forward import Rows
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.learner import Learner
from tandem.engine.oom import MicroBatchBudget
from tandem.engine.update import (
    BegunUpdate,
    LossTerm,
    MicroBatchLoss,
    Update,
    begin_update,
    training_mode,
)
from tandem.errors import BadStepError, ConfigError, NumericsError
from tandem.generation.sampler import sequence_key
from tandem.metrics.timing import Phases
from tandem.models.packed import drops_now
from tandem.objectives.kl import adapted_kl_coef
from tandem.objectives.policy import aggregation
from tandem.training.algorithm import (
    AdvantagesOf,
    Algorithm,
    actor_loss,
    algorithm_of,
    critic_loss,
    first_critic_loss,
)
from tandem.training.answering import Answering
from tandem.training.dynamic_sampling import MorePrompts
from tandem.training.experience import shaped_rewards
from tandem.training.mixture import mixed_in, mixture_term
from tandem.training.operations import (
    batch_flops,
    scoring_flops,
    update_flops,
)
from tandem.training.rehearsal import rehearse_updates
from tandem.training.reward_function import GivenRewards, rewards_of
from tandem.training.rollout_source import RolloutSource
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
        section = rl_stage(config.stages).section
        own_advantages = advantages_of is not None
        _require_roles(engine, algorithm, section, rl.kl_coef, own_advantages=own_advantages)
        self.engine = engine
        self.config = config
        self.rl = rl
        self.algorithm = algorithm
        self.advantages_of = advantages_of
        self.ptx_rows = ptx_rows
        self.phases = phases or Phases()
        self.answering = Answering(
            engine,
            config,
            algorithm,
            source=source,
            rewards=self.reward_function,
            more_prompts=more_prompts,
            phases=self.phases,
        )
        self.budget = MicroBatchBudget(engine.settings, engine.world, print_line)
        self.kl_coef = rl.kl_coef
        self._begun: _Begun | None = None
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
        self,
        prompts: Sequence[PromptRow],
        *,
        step: int,
        numbers: Sequence[int] | None = None,
        begins_update: bool = False,
    ) -> Experience:
        """Answer the prompts and score the answers.

        Args:
            step, numbers: with the seed they key the sampling (see `generate`).
            begins_update: the experience goes to `train_rlhf` next. The critic's first gradient is
                then made by the forward that its values come from, where nothing stands against
                it (dropout, advantages of your own), and waits in its learner.
        """
        self._drop_begun()
        kept = None
        if self.algorithm.sampling_rounds > 1:
            rollout, scored, kept = self.answering.with_signal(prompts, step, numbers)
        else:
            rollout, scored = self.answering.answered(prompts, step, numbers)
        begins = begins_update and self._can_begin()
        with self.phases("score") as phase:
            shaped = shaped_rewards(
                rollout,
                scored,
                self.engine,
                self.algorithm,
                kl_coef=self.kl_coef,
                kept=kept,
                with_values=not begins,
            )
            phase.flops = scoring_flops(self.engine, rollout, shaped.experience)
        begun = None
        if begins:
            begun, values = self._begin_critic(shaped.experience, step)
            shaped = shaped.with_values(values)
        try:
            with self.phases("score"):
                experience = shaped.with_advantages(self.algorithm, self.advantages_of)
        except BadStepError:
            if begun is not None:
                begun.drop()
            raise
        if begun is not None:
            self._begun = _Begun.of(begun, experience, step)
        if kept is None:
            return experience
        rounds = (int(rollout.group.max()) + 1) / len(prompts)
        return replace(experience, metrics={**experience.metrics, "sampling_rounds": rounds})

    def train_rlhf(
        self, experience: Experience, *, step: int, skip: Skip | None = None
    ) -> dict[str, float]:
        """Update critic and actor on an experience; returns the step's metrics.

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
        begun = None
        if self._begun is not None and self._begun.is_of(experience, step):
            begun, self._begun = self._begun.update, None
        self._drop_begun()
        # Only dropout draws from it, other numbers on every rank.
        torch.manual_seed(self.config.seed + step + (engine.world.rank << 40))
        with self.phases("train") as phase, training_mode(*engine.trained_models):
            for number, rows in self._minibatches(experience, step):
                minibatch = experience.select(rows)
                with _left_out(minibatch, skip), Update(self.budget) as update:
                    # The critic first: its gradient may be there already.
                    if engine.critic_learner is not None:
                        with _left_out(minibatch, skip):
                            self._update_critic(
                                update, engine.critic_learner, minibatch, log, begun
                            )
                    if trains_actor:
                        stop = self._update_actor(update, minibatch, log, step, number)
                self._note_steps(update, log)
                rows = self._with_gradient(minibatch)
                if len(rows):
                    learned = minibatch.batch.select(rows)
                    phase.samples += len(learned)
                    phase.tokens += int(learned.on_host().attention_mask.sum())
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
        rehearse_updates(
            self.engine, self.budget, minibatch_size(self.config), self.algorithm, prompts
        )

    @property
    def _updates_per_epoch(self) -> int:
        return num_updates(self.config, 1) // self.rl.epochs

    def _minibatches(self, experience: Experience, step: int) -> Iterator[tuple[int, Tensor]]:
        """Every update's number within the step and its rows. Prompts are shuffled each epoch by
        (seed, step, epoch); the answers to one stay together, so that they can share it."""
        # On the host, where rows are dealt.
        chosen, group = torch.arange(len(experience)), experience.group.cpu()
        if experience.in_loss is not None:
            in_loss = experience.in_loss.cpu()
            chosen, group = chosen[in_loss], group[in_loss]
        if len(chosen) == 0:
            return
        found, group = group.unique(return_inverse=True)
        for epoch in range(self.rl.epochs):
            key = sequence_key(self.config.seed, step, epoch, 0)
            places = torch.randperm(len(found), generator=torch.Generator().manual_seed(key))
            order = places.argsort()[group].argsort(stable=True)
            minibatches = chosen[order].split(minibatch_size(self.config))
            for number, rows in enumerate(minibatches):
                yield epoch * self._updates_per_epoch + number, rows

    def _with_gradient(self, minibatch: Experience) -> Tensor:
        """The rows of a minibatch that its forward must read: not those that add exactly 0 to the
        gradient."""
        every = torch.arange(len(minibatch))
        if self.advantages_of is not None or not self.algorithm.skips_without_signal():
            return every
        return every[(minibatch.advantages != 0).any(dim=1).cpu()]

    def _update_actor(
        self, update: Update, minibatch: Experience, log: Means, step: int, number: int
    ) -> bool:
        """Train the actor, unless no answer has a gradient: an optimizer step would then move the
        weights by momentum alone. Returns whether to skip the rollout's other updates."""
        learner, algorithm = self.engine.actor_learner, self.algorithm
        mask = minibatch.batch.on_host().response_mask
        _, units = aggregation(mask, algorithm.normalization, max_tokens=algorithm.max_tokens)
        learned = minibatch.select(self._with_gradient(minibatch))
        log.add("answers_learned", len(learned) / len(minibatch))
        texts = []
        if self._has_ptx:
            batch = self._ptx_batch(step, number)
            texts.append(mixture_term(self.engine.actor, batch, self.rl.ptx_coef))
        if len(learned) == 0:
            for means in update.learn(learner, texts) if texts else ():
                log.add("ptx_loss", means["loss"])
            return False
        answers = LossTerm(
            learned.batch.on_host().lengths().tolist(),
            units,
            lambda rows: actor_loss(
                self.engine, algorithm, self._part(learned, rows), kl_coef=self.kl_coef
            ),
            batch=learned.batch,
        )
        # The loss has its own denominator; metrics are means over the tokens of the forward.
        per_token = units / learned.batch.num_response_tokens
        learning_rate = learner.learning_rate
        # Texts alone move the policy too, where no answer has a gradient.
        is_first = not (log.has("ratio_gap_before_update") or log.has("ptx_loss"))
        check = partial(self._require_same_policy, learned, per_token) if is_first else None
        means, *others = update.learn(learner, [answers, *texts], check)
        log.maximum("ratio_max", means.pop("ratio_max"))
        largest_gap = means.pop("gap_max")
        del means["loss"]
        for name in ("policy_loss", "rank_idle"):
            log.add(name, means.pop(name))
        means = {name: value * per_token for name, value in means.items()}
        gap = means.pop("ratio_gap")
        if is_first:
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
        self,
        update: Update,
        learner: Learner,
        minibatch: Experience,
        log: Means,
        begun: BegunUpdate | None,
    ) -> None:
        """Train the critic; what was begun is of the first minibatch."""

        def loss(rows: Rows) -> MicroBatchLoss:
            return critic_loss(self.engine, self.algorithm, self._part(minibatch, rows))

        learning_rate = learner.learning_rate
        (means,) = update.learn(learner, [_critic_term(minibatch, loss)], begun=begun)
        for name in ("value_loss", "value_clip_fraction", "rank_idle"):
            log.add(name, means[name])
        log.add("critic_learning_rate", learning_rate)

    def _can_begin(self) -> bool:
        """Whether the forward of the critic's first gradient makes its values too."""
        critic = self.engine.critic
        if critic is None or self.advantages_of is not None:
            return False
        with training_mode(critic):
            return not drops_now(critic)

    def _begin_critic(self, made: Experience, step: int) -> tuple[BegunUpdate, Tensor]:
        """The critic's gradient over the step's first minibatch, and the values of all answers.

        Only those of the first minibatch: the others' forward in training is by other weights.
        """
        engine, learner = self.engine, self.engine.critic_learner
        assert engine.critic is not None
        assert learner is not None
        _, rows = next(self._minibatches(made, step))
        values = torch.zeros_like(made.rewards)
        others = torch.ones(len(made), dtype=torch.bool).index_fill(0, rows, value=False)
        if bool(others.any()):
            with self.phases("score") as phase:
                place = others.nonzero().flatten()
                batch = made.batch.select(place)
                found = engine.all_values(batch)
                values[place.to(values.device), : found.shape[1]] = found
                phase.flops = batch_flops(engine.critic, batch)
        minibatch = made.select(rows)
        kept = torch.zeros_like(minibatch.rewards)

        def loss(part: Rows) -> MicroBatchLoss:
            return first_critic_loss(engine, self.algorithm, self._part(minibatch, part))

        # The operations count where the update ends.
        with self.phases("train"), training_mode(engine.critic):
            term = replace(_critic_term(minibatch, loss), keep=kept)
            begun = begin_update(self.budget, learner, [term])
        values[rows.to(values.device), : kept.shape[1]] = kept
        return begun, values

    def _drop_begun(self) -> None:
        if self._begun is not None:
            self._begun.update.drop()
            self._begun = None

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

    def _part(self, minibatch: Experience, rows: Rows) -> Experience:
        return minibatch.select(rows.host, rows.on(minibatch.batch.token_ids.device))

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


@dataclass(frozen=True, slots=True)
class _Begun:
    """The critic's first gradient of a step, and what it was made of."""

    update: BegunUpdate
    experience: Experience
    step: int
    versions: tuple[int, ...]

    @staticmethod
    def of(update: BegunUpdate, experience: Experience, step: int) -> _Begun:
        versions = _versions(experience)
        return _Begun(update, experience, step, versions)

    def is_of(self, experience: Experience, step: int) -> bool:
        """Whether that step's update of the experience begins with it: the same tensors, which
        nobody has written to since."""
        given = _learned_from(experience)
        return (
            step == self.step
            and all(a is b for a, b in zip(given, _learned_from(self.experience), strict=True))
            and _versions(experience) == self.versions
        )


def _learned_from(experience: Experience) -> list[Tensor | None]:
    """What the critic's gradient and the choice of minibatches depend on."""
    batch = experience.batch
    return [
        batch.token_ids,
        batch.attention_mask,
        batch.response_mask,
        experience.values,
        experience.returns,
        experience.group,
        experience.in_loss,
    ]


def _versions(experience: Experience) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in _learned_from(experience) if tensor is not None)


def _critic_term(minibatch: Experience, loss: Callable[[Rows], MicroBatchLoss]) -> LossTerm:
    batch = minibatch.batch
    lengths = batch.on_host().lengths().tolist()
    return LossTerm(lengths, batch.num_response_tokens, loss, batch=batch)


def _require_roles(
    engine: RLHFEngine, algorithm: Algorithm, section: str, kl_coef: float, *, own_advantages: bool
) -> None:
    """Refuse an engine without a role that the algorithm needs, or with one that it would not
    train."""
    if engine.critic is None and algorithm.has_critic and not own_advantages:
        raise ConfigError(
            "PPOTrainer must have a critic for its advantages; the engine has none. Pass "
            "advantages_of=, or an engine with a critic."
        )
    if engine.critic is not None and not algorithm.has_critic:
        raise ConfigError(
            "PPOTrainer must get no critic, which this algorithm would not train; the engine "
            "has one. Use RLHFEngine(has_critic=False)."
        )
    if not engine.has_reference and kl_coef > 0:
        raise ConfigError(
            f"{section}.kl_coef must be 0 without a reference; got "
            f"{kl_coef:g}. Set it to 0, or use an engine with a reference."
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
