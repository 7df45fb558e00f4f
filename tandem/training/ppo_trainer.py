"""The two halves of an RL step: making experience with the engine, and learning from it.

One trainer for PPO and for the algorithms without a critic, which differ in their `Algorithm`.
Departures from DeepSpeed-Chat: answers are sampled, EOS is a trained token, advantages are
whitened, several epochs and minibatches work, and the ratio before an update must be 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tandem.config.conversations import answer_tokens, sampled_tokens
from tandem.config.schema import RunConfig, rl_section
from tandem.config.stages import rl_stage
from tandem.config.updates import minibatch_size, num_updates
from tandem.engine.forward import Rows
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.learner import Learner
from tandem.engine.oom import MicroBatchBudget
from tandem.engine.update import BegunUpdate, LossTerm, MicroBatchLoss, Update, training_mode
from tandem.errors import BadStepError, ConfigError
from tandem.generation.limits import max_positions
from tandem.metrics.timing import Phases
from tandem.models.replayed import KeptStates
from tandem.objectives.kl import adapted_kl_coef
from tandem.objectives.policy import TokenLosses, aggregation
from tandem.training.algorithm import (
    AdvantagesOf,
    actor_loss,
    algorithm_of,
    critic_loss,
    require_roles,
)
from tandem.training.answering import Answering
from tandem.training.conversations import own_conversations
from tandem.training.dynamic_sampling import MorePrompts
from tandem.training.experience import shaped_rewards
from tandem.training.first_update import FirstUpdate, critic_term, part_of, require_same_policy
from tandem.training.loop_arguments import require_experience, require_trainer_arguments
from tandem.training.minibatches import Skip, left_out, minibatches
from tandem.training.mixture import mixed_in, mixture_term, require_texts
from tandem.training.operations import mixture_flops, scoring_flops, update_flops
from tandem.training.policy_functions import named_advantages, named_losses
from tandem.training.rehearsal import rehearse_updates
from tandem.training.reward_function import GivenRewards, rewards_of
from tandem.training.rollout_source import RolloutSource
from tandem.training.step_metrics import Means, count_rows, note_steps
from tandem.types import Experience, PromptRow, TokenBatch, TokenRow

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
        token_losses: TokenLosses | None = None,
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
                None: those that the stage's `reward_function` names.
            advantages_of: what is made of the rewards, used as it comes: not whitened. None: what
                the stage's knobs say.
            token_losses: the policy's loss of every token, without the KL and entropy terms, which
                the knobs add; None: what they say.
            source: where answers come from; None: the engine's policy, in conversations where the
                stage's `environment` or `tools` ask for them.
            ptx_rows: rendered texts for mixture training, which `ptx_data` alone does not read.
            more_prompts: where dynamic sampling finds further prompts; None: nowhere.
            phases: times what is done.
            print_line: shows a line to the user.
        Raises:
            ConfigError: there is nothing to reward with, the engine lacks a critic or reference
                that the algorithm needs, a name leads nowhere, or `ptx_data` comes without rows.
        """
        require_trainer_arguments(engine, config, source)
        rl, stage = rl_section(config), rl_stage(config.stages)
        own = (
            advantages_of or named_advantages(rl, stage.section),
            token_losses or named_losses(rl, stage.section),
        )
        algorithm = algorithm_of(rl, sampled_tokens(config), *own, is_rewarded=stage.rewarded)
        has_model = engine.scorer is not None and rl.reward_model_weight > 0
        given = reward_function or rl.reward_function or None
        self.reward_function = rewards_of(given, config.scoring, print_line)
        if algorithm.is_rewarded and self.reward_function is None and not has_model:
            raise ConfigError(
                "PPOTrainer must have a reward; got no reward function and no reward model of a "
                "weight above 0. Pass reward_function=, or an engine with a reward model."
            )
        require_texts(rl, stage.section, ptx_rows)
        require_roles(engine, algorithm, stage.section, rl.kl_coef)
        self.engine = engine
        self.config, self.rl = config, rl
        self.algorithm = algorithm
        self.ptx_rows = ptx_rows
        self.phases = phases or Phases()
        self.answering = Answering(
            engine,
            config,
            algorithm,
            source=source or own_conversations(engine, config, print_line),
            rewards=self.reward_function,
            more_prompts=more_prompts,
            phases=self.phases,
            print_line=print_line,
        )
        self.budget = MicroBatchBudget(engine.settings, engine.world, print_line)
        self.kl_coef = rl.kl_coef
        self.first_update = FirstUpdate(engine, config, algorithm, self.budget, self.phases)
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
                it (dropout, advantages of your own), and waits in its learner. With one update per
                rollout the actor's states are kept for it, as `kept_states` says.
        """
        first = self.first_update
        first.drop()
        kept = keeper = None
        if self.algorithm.sampling_rounds > 1:
            rollout, scored, kept = self.answering.with_signal(prompts, step, numbers)
        else:
            keeper = first.keeper(step) if begins_update else None
            rollout, scored = self.answering.answered(prompts, step, numbers, keeper)
        begins = begins_update and not self.algorithm.given_advantages and first.can_begin()
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
        if begins:
            shaped = shaped.with_values(first.values(shaped.experience, step))
        try:
            with self.phases("score"):
                experience = shaped.with_advantages(self.algorithm)
        except BadStepError:
            first.drop()
            raise
        is_whole = experience.batch is rollout.batch  # no answer was left out
        states = keeper.states if keeper is not None and is_whole else None
        first.belongs_to(experience, step, states)
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
        require_experience(experience)
        engine, log = self.engine, Means()
        trains_actor = step > self.algorithm.critic_warmup_steps
        plan, taken, stop = list(minibatches(self.config, experience, step)), 0, False
        # Only dropout draws from it, other numbers on every rank.
        torch.manual_seed(self.config.seed + step + (engine.world.rank << 40))
        with (
            self.first_update.taken(experience, step) as (begun, states),
            self.phases("train") as phase,
            training_mode(*engine.trained_models),
        ):
            for number, rows in plan:
                minibatch = experience.select(rows)
                texts = self._ptx_batch(step, number) if trains_actor else None
                with left_out(minibatch, skip), Update(self.budget) as update:
                    if engine.critic_learner is not None:
                        # In fp16 they step together, so without the critic the actor does not.
                        together = engine.critic_learner.scaler is not None
                        with left_out(minibatch, None if together else skip):
                            self._update_critic(
                                update, engine.critic_learner, minibatch, log, begun
                            )
                    if trains_actor:
                        kept = None if states is None else states.of(rows, states.rows.shape[1])
                        stop = self._update_actor(update, minibatch, log, texts, kept)
                if states is not None:
                    states.release()
                note_steps(self.engine, update, log)
                rows = self._with_gradient(minibatch)
                if len(rows):
                    learned = minibatch.batch.select(rows)
                    count_rows(phase, learned)
                    exact, replayed = bool(self.algorithm.divergence), states is not None
                    phase.flops += update_flops(
                        engine, learned, actor=trains_actor, replayed=replayed, compares=exact
                    )
                states = None
                if texts is not None:
                    count_rows(phase, texts)
                    compares = self.algorithm.ptx_divergence is not None
                    phase.flops += mixture_flops(engine, texts, compares=compares)
                taken += 1
                if stop:
                    break
        if trains_actor and not plan:  # no answer is in the loss
            log.add("answers_learned", 0.0)
        self._adapt_kl_coef(experience)
        epochs_done = self.rl.epochs * taken / len(plan) if plan else 0.0
        return {**log.means(), "epochs_done": epochs_done}

    def rehearse(self, prompts: Sequence[PromptRow]) -> None:
        """Run the largest possible micro-batches forward and backward, to find out before the
        first step what does not fit into memory.

        Raises:
            OutOfMemoryError: it does not.
        """
        longest, positions = max(map(len, prompts)), max_positions(self.engine.actor)
        answer, size = answer_tokens(self.config, longest, positions), minibatch_size(self.config)
        rehearse_updates(self.engine, self.budget, size, self.algorithm, prompts, answer)

    def _with_gradient(self, minibatch: Experience) -> Tensor:
        """The rows of a minibatch that its forward must read: not those that add exactly 0 to the
        gradient."""
        every = torch.arange(len(minibatch))
        if not self.algorithm.skips_without_signal():
            return every
        return every[(minibatch.advantages != 0).any(dim=1).cpu()]

    def _update_actor(
        self,
        update: Update,
        minibatch: Experience,
        log: Means,
        ptx: TokenBatch | None,
        kept: KeptStates | None,
    ) -> bool:
        """Train the actor, unless no answer has a gradient: an optimizer step would then move the
        weights by momentum alone. Returns whether to skip the rollout's other updates.

        Args:
            ptx: texts that are mixed in. kept: the states of the minibatch's tokens.
        """
        learner, algorithm = self.engine.actor_learner, self.algorithm
        mask = minibatch.batch.on_host().response_mask
        _, units = aggregation(mask, algorithm.normalization, max_tokens=algorithm.max_tokens)
        chosen = self._with_gradient(minibatch)
        learned = minibatch.select(chosen)
        log.add("answers_learned", len(learned) / len(minibatch))
        texts = []
        if ptx is not None:
            texts.append(mixture_term(self.engine, ptx, self.rl.ptx_coef, algorithm.ptx_divergence))
        if len(learned) == 0:
            for means in update.learn(learner, texts) if texts else ():
                log.add("ptx_loss", means["loss"])
            return False

        def loss(rows: Rows) -> MicroBatchLoss:
            part, states = part_of(learned, rows), None
            if kept is not None:
                states = kept.of(chosen[rows.host], part.batch.token_ids.shape[1])
            return actor_loss(self.engine, algorithm, part, kl_coef=self.kl_coef, kept=states)

        lengths = learned.batch.on_host().lengths().tolist()
        answers = LossTerm(lengths, units, loss, batch=learned.batch)
        # The loss has its own denominator; metrics are means over the tokens of the forward. What
        # it leaves out has an advantage of 0, which no bound cuts: that share is of all tokens.
        per_token = units / learned.batch.num_response_tokens
        of_all = units / int(mask.sum())
        learning_rate = learner.learning_rate
        # Texts alone move the policy too, where no answer has a gradient.
        is_first = not (log.has("ratio_gap_before_update") or log.has("ptx_loss"))
        check = None
        if is_first:
            tolerance, count = self.ratio_tolerance, len(learned)
            check = partial(require_same_policy, self.config, tolerance, count, per_token)
        means, *others = update.learn(learner, [answers, *texts], check)
        log.maximum("ratio_max", means.pop("ratio_max"))
        largest_gap = means.pop("gap_max")
        del means["loss"]
        for name in ("policy_loss", "rank_idle"):
            log.add(name, means.pop(name))
        means = {n: v * (of_all if n.startswith("clip_") else per_token) for n, v in means.items()}
        gap = means.pop("ratio_gap")
        if is_first:
            self.first_update.has_measured = True
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
            return critic_loss(self.engine, self.algorithm, part_of(minibatch, rows))

        learning_rate = learner.learning_rate
        (means,) = update.learn(learner, [critic_term(minibatch, loss)], begun=begun)
        for name in ("value_loss", "value_clip_fraction", "rank_idle"):
            log.add(name, means[name])
        log.add("critic_learning_rate", learning_rate)

    def _ptx_batch(self, step: int, number: int) -> TokenBatch | None:
        """The texts that an update mixes in, which follow from its number alone; None without."""
        if not self.ptx_rows or self.rl.ptx_coef == 0:
            return None
        update = (step - 1) * num_updates(self.config, 1) + number
        rows = mixed_in(self.ptx_rows, update, self.rl.ptx_batch_size, self.config.seed)
        return TokenBatch.from_rows(rows, self.engine.renderer.pad_token_id)

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
