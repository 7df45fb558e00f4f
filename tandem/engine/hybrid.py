"""The hybrid engine: the roles of RLHF on one set of weights that trains and generates.

actor         the policy that is trained; it also generates
reference     the policy as it started (with LoRA the actor with its adapters off, else a copy),
              which may follow the actor (moving_reference), or another model
critic        values of states, in the units of normalized scores
reward_model  one score per answer

Only the actor is required. With `parallel.shared_base` all roles share one frozen base and differ
in adapters and heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.config.engine import EngineSettings, require_settings
from tandem.data.chat.own_template import put_template, read_template
from tandem.data.render import Renderer
from tandem.data.trained_tokens import tokens_to_train
from tandem.devices import resolve_device
from tandem.engine.checks import check_policy, check_same_start
from tandem.engine.critic_start import critic_start
from tandem.engine.ema import moving_average
from tandem.engine.forward import response_logprobs, scored, token_values
from tandem.engine.learner import Learner
from tandem.engine.module_scorer import any_scorer
from tandem.engine.moving_reference import moving_reference
from tandem.engine.placement import Base, Model, Placement
from tandem.engine.reference import place_reference, start_of_reference
from tandem.engine.rollouts import generating, rollout_of
from tandem.engine.scoring import scorer_tokenizer
from tandem.errors import ConfigError, ModelError
from tandem.generation.conversing import Conversing
from tandem.generation.following import Following
from tandem.generation.keeping import StateKeeper
from tandem.generation.limits import vocabulary_size
from tandem.generation.stops import Stops
from tandem.models.eos import stop_ids
from tandem.models.load import check_vocabulary, load_tokenizer
from tandem.models.lora import adapters_off
from tandem.models.modes import evaluating
from tandem.models.replayed import KeptStates
from tandem.models.scalar import normalization
from tandem.models.twin import decodes, why_unpacked
from tandem.objectives.rewards import normalized_scores
from tandem.ops import native
from tandem.parallel.scaling import LossScaler
from tandem.parallel.tensor import tensor_group
from tandem.parallel.world import World, launched
from tandem.text import counted
from tandem.types import PromptRow, Rollout, TokenBatch


@dataclass(frozen=True, slots=True)
class PolicyNumbers:
    """What the scoring pass computes for a rollout; all (B, T) float32, 0 off the response.

    ref_logprobs, values: None without a reference; without a critic, or where not asked for.
    from_sampler: log-probs and entropy are those that the sampler kept.
    """

    logprobs: Tensor
    entropy: Tensor
    ref_logprobs: Tensor | None
    values: Tensor | None
    from_sampler: bool


class RLHFEngine:
    """Actor, critic, reference, reward model and the actor's moving average.

    It knows neither data files nor an algorithm: a custom loop calls `rollout`, `policy_numbers`,
    `scores`, then `actor_learner` and `critic_learner`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        actor: Model | Path,
        *,
        reward_model: Model | nn.Module | Path | None = None,
        critic: Model | Path | None = None,
        reference: Model | Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reward_tokenizer: PreTrainedTokenizerBase | None = None,
        has_critic: bool = True,
        has_reference: bool = True,
        world: World | None = None,
    ) -> None:
        """Load models given as a folder or hub name; use modules as they are.

        Args:
            settings: of a run's configuration: `engine_settings(config)`.
            actor: the SFT model.
            reward_model: a model with a scalar head, any torch module (called as
                `module_scorer.RewardModule` says), or None where a function rewards.
            critic: where the critic starts; by default the reward model, or the actor's backbone
                with a new head of zeros if there is none or its tokenizer is another.
            reference: what the actor is compared with, of the same tokenizer; by default the
                actor's present state.
            tokenizer, reward_tokenizer: required for models given as modules.
            has_critic, has_reference: False for an algorithm without them; they then take no
                memory.
            world: the ranks that share work and weights; None: torchrun's, or this process alone.
        Raises:
            ConfigError: settings that contradict each other, or that these ranks cannot satisfy.
            ModelError: a model or tokenizer cannot be used.
        """
        actor = str(actor) if isinstance(actor, Path) else actor
        reward_model = str(reward_model) if isinstance(reward_model, Path) else reward_model
        critic = str(critic) if isinstance(critic, Path) else critic
        reference = str(reference) if isinstance(reference, Path) else reference
        self.settings = require_settings(settings)
        self.world = world or launched(settings.parallel, resolve_device(settings.device))
        self.device = self.world.device
        placement = Placement(settings, self.world)
        self.dtype = placement.dtype
        self.tensor_group = tensor_group(self.world, settings.parallel.inference_tp_size)
        self.tokenizer = tokenizer = tokenizer or self._tokenizer_of(actor, "tokenizer")
        if isinstance(reward_model, PreTrainedModel | str) and reward_tokenizer is None:
            reward_tokenizer = self._tokenizer_of(reward_model, "reward_tokenizer")
        # Copies are made before their original gets adapters or is split.
        tokens_of_reference = None if reference is None else self.tokenizer
        reference = start_of_reference(actor, reference, settings, needed=has_reference)
        if has_critic and critic is None:
            critic = critic_start(actor, reward_model, tokenizer, reward_tokenizer)
        self.has_reference = has_reference
        tokens = tokens_to_train(settings.lora, tokenizer)
        self.actor = placement.policy(actor, trained=True, keeps_start=True, tokens=tokens)
        check_vocabulary(self.actor, self.tokenizer)
        base = Base.of(self.actor, actor) if settings.parallel.shared_base else None
        self.renderer = Renderer(self.tokenizer, stop_ids(self.actor.generation_config))
        self.scorer = any_scorer(placement, reward_model, reward_tokenizer, self.renderer, base)
        self.critic = None
        if has_critic and critic is not None:
            seed, tokens = settings.seed + 1, tokens_to_train(settings.lora.of("critic"), tokenizer)
            self.critic = placement.scalar(
                critic, trained=True, seed=seed, base=base, zero_head=True, tokens=tokens
            )
            check_vocabulary(self.critic, tokenizer)
        self.reference = place_reference(placement, reference, tokens_of_reference)
        self.agreement = check_policy(self.actor, self.tensor_group)
        if has_reference and tokens_of_reference is None:
            check_same_start(self.actor, self.reference)
        self.scaler = LossScaler() if self.dtype == torch.float16 else None
        self.actor_learner = self._learner("actor", self.actor)
        self.critic_learner = self._learner("critic", self.critic) if self.critic else None
        self.ema = moving_average(self.actor, settings.ema_decay, self.actor_learner.masters)
        self.moving_reference = moving_reference(settings, self.actor_learner, self.reference)

    @property
    def stops(self) -> Stops:
        """How the actor's answers end and become text."""
        return Stops.of(self.renderer)

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """The actor in generation mode: its weights whole on every rank, or in slices over its
        group; no dropout, no gradient checkpointing."""
        with generating(self.actor, self.tensor_group):
            yield self.actor

    @property
    def can_follow(self) -> bool:
        """Whether a rollout can take further prompts while it runs."""
        return self.world.size == 1 and self.can_converse

    @property
    def can_converse(self) -> bool:
        """Whether conversations can go on within a rollout."""
        return self.tensor_group is None and self.settings.hybrid_engine and decodes(self.actor)

    def rollout(
        self,
        prompts: Sequence[PromptRow],
        *,
        step: int,
        numbers: Sequence[int] | None = None,
        following: Following | None = None,
        conversing: Conversing | None = None,
        keeper: StateKeeper | None = None,
    ) -> Rollout:
        """The actor's answers, generated by all ranks and known to all.

        Args:
            step, numbers: with the seed they key the sampling (see `generation.generate`).
            following: names further prompts while answers end, where `can_follow`.
            conversing: says what answers hear back, where `can_converse`; each rank's own.
            keeper: keeps the states of the tokens, for `actor_logprobs`, where it can: on one rank.
        """
        return rollout_of(
            self.actor,
            prompts,
            self.settings,
            self.stops,
            step=step,
            numbers=numbers,
            following=following,
            conversing=conversing,
            keeper=keeper,
        )

    @property
    def policy_models(self) -> list[PreTrainedModel]:
        """The models that compute log-probs of the policy and of its reference."""
        return [self.actor] if self.reference is None else [self.actor, self.reference]

    def actor_logprobs(
        self, batch: TokenBatch, *, with_entropy: bool, kept: KeptStates | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy at the sampling temperature, (B, T), with gradient.

        Args:
            kept: what a rollout by the same weights computed of the batch's tokens, which then is
                not computed again.
        """
        return response_logprobs(
            self.actor,
            batch,
            temperature=self.settings.sampling.temperature,
            with_entropy=with_entropy,
            kept=kept,
        )

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """The reference's log-probs at the same temperature, (B, T); no gradient.

        Raises:
            ModelError: the engine has no reference.
        """
        if not self.has_reference:
            raise ModelError("log-probs of the reference need one. Use RLHFEngine(has_reference=).")
        temperature = self.settings.sampling.temperature
        with torch.no_grad():
            if self.reference is not None:
                return response_logprobs(self.reference, batch, temperature=temperature)[0]
            with adapters_off(self.actor):
                return response_logprobs(self.actor, batch, temperature=temperature)[0]

    def values(self, batch: TokenBatch) -> Tensor:
        """The critic's values, (B, T), normalized reward units, with gradient; 0 off the response.

        A critic that started as the reward model is in raw units: the constants that normalize
        scores normalize its values.

        Raises:
            ModelError: the engine has no critic.
        """
        if self.critic is None:
            raise ModelError(
                "values need a critic; the engine has none. Use RLHFEngine(has_critic=)."
            )
        raw = token_values(self.critic, batch)
        mean, std = normalization(self.critic)
        return normalized_scores(raw, mean, std).masked_fill(~batch.response_mask, 0.0)

    def policy_numbers(self, rollout: Rollout, *, with_values: bool = True) -> PolicyNumbers:
        """The scoring pass: actor, reference and critic over a rollout, without gradient.

        The actor's forward is skipped where the sampler's own numbers are the same, the critic's
        without `with_values`.
        """
        from_sampler, critic = self.trusts_sampler, self.critic if with_values else None

        def forward(part: TokenBatch) -> tuple[Tensor, ...]:
            found = () if from_sampler else self.actor_logprobs(part, with_entropy=True)
            if self.has_reference:
                found = (*found, self.reference_logprobs(part))
            return found if critic is None else (*found, self.values(part))

        found: list[Tensor] = []
        if not from_sampler or self.has_reference or critic is not None:
            models = self.policy_models + ([] if critic is None else [critic])
            with ExitStack() as stack:
                for model in self.trained_models:
                    stack.enter_context(evaluating(model))
                found += scored(rollout.batch, self.settings.micro_batch_tokens, forward, models)
        logprobs, entropy = rollout.rollout_logprobs, rollout.rollout_entropy
        if not from_sampler:
            logprobs, entropy = found.pop(0), found.pop(0)
        ref_logprobs = found.pop(0) if self.has_reference else None
        values = None if critic is None else found.pop(0)
        return PolicyNumbers(logprobs, entropy, ref_logprobs, values, from_sampler)

    def all_values(self, batch: TokenBatch) -> Tensor:
        """The critic's `values` of a whole batch, in micro-batches over the ranks; no gradient."""
        assert self.critic is not None
        with evaluating(self.critic):
            tokens = self.settings.micro_batch_tokens
            return scored(batch, tokens, lambda part: (self.values(part),), [self.critic])[0]

    @property
    def trusts_sampler(self) -> bool:
        """Whether the sampler's log-probs serve as PPO's old ones (`ppo.old_logprobs`)."""
        chosen = self.settings.old_logprobs
        if chosen == "auto":
            return self.agreement.trustworthy and self.settings.hybrid_engine
        return chosen == "sampler"

    def describe(self) -> str:
        """One line on how the actor generates, and where PPO's old log-probs come from."""
        source = "the sampler's" if self.trusts_sampler else "a forward's"
        beyond = vocabulary_size(self.actor) - self.renderer.pieces.num_ids
        if beyond > 0:
            padding = f"the policy's last {counted(beyond, 'token')}, which its tokenizer lacks"
            source += f"; never drawn: {padding}"
        if not self.settings.hybrid_engine:
            return f"generation: Hugging Face's generate, as asked; old log-probs: {source}"
        apart, why = self.agreement, why_unpacked(self.actor)
        if why:
            why += f", up to {apart.largest_gap:.1g} nats from the training forward"
            return f"generation: Hugging Face's generate, because {why}; old log-probs: {source}"
        operations = "the GPU" if self.device.type == "cuda" else "C++ operations"
        if self.device.type == "cpu" and native.why_not():
            operations = f"plain torch ({native.why_not()})"
        found = f"within {apart.gap:.1g} nats per token, {apart.largest_gap:.1g} at most"
        found = "bit for bit" if apart.bitwise else found
        return (
            f"generation: {operations}; decoding equals the training forward {found}; old "
            f"log-probs: {source}"
        )

    def scores(self, rollout: Rollout) -> Tensor:
        """The reward model's raw scores, (B,), at each answer's last token.

        Raises:
            ModelError: the engine has no reward model.
        """
        if self.scorer is None:
            raise ModelError("scores need a reward model; the engine has none. Pass reward_model.")
        return self.scorer.raw(rollout, self.renderer)

    def _tokenizer_of(self, model: Any, argument: str) -> PreTrainedTokenizerBase:
        if isinstance(model, str) and argument == "reward_tokenizer":
            return scorer_tokenizer(model, self.settings)
        if isinstance(model, str):
            found = load_tokenizer(model, trust_remote_code=self.settings.trust_remote_code)
            put_template(found, read_template(self.settings.chat_template))
            return found
        raise ModelError(
            f"RLHFEngine must get {argument} beside a model given as a module; got none. "
            f"Pass {argument}=."
        )

    @property
    def learners(self) -> dict[str, Learner]:
        """The models in training, by role."""
        learners = {"actor": self.actor_learner, "critic": self.critic_learner}
        return {role: learner for role, learner in learners.items() if learner is not None}

    @property
    def trained_models(self) -> list[PreTrainedModel]:
        """The models in training."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def _learner(self, role: str, model: PreTrainedModel) -> Learner:
        if role not in self.settings.optimizers:
            raise ConfigError(
                f"RLHFEngine must get has_{role}=False if the algorithm trains no {role}; got "
                "True. Use make_engine(config, actor), which reads it from the configuration."
            )
        return Learner(
            role,
            model,
            self.settings.optimizers[role],
            parallel=self.settings.parallel,
            dtype=self.dtype,
            scaler=self.scaler,
            spike_sigma=self.settings.spike_sigma,
        )
