"""The hybrid engine: the roles of RLHF on one set of weights that trains and generates.

actor         the policy that is trained; it also generates
reference     where the policy started: with LoRA the actor with its adapters off, else a copy
critic        values of states, in the units of normalized scores
reward_model  one score per answer

Only the actor must be there: an algorithm without a critic or a KL penalty leaves those out.

With `parallel.shared_base` all of them hold one frozen base, and differ in adapters and heads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.config.load import check_values
from tandem.config.optimizer import OptimizerConfig
from tandem.config.schema import RunConfig
from tandem.data.render import Renderer
from tandem.engine.devices import resolve_device, resolve_dtype
from tandem.engine.ema import MovingAverage
from tandem.engine.forward import (
    response_logprobs,
    scored,
    token_values,
)
from tandem.engine.learner import Learner
from tandem.engine.loading import Base, Model, check_policy, place_policy, place_scalar
from tandem.engine.rollouts import answered, generating
from tandem.engine.same_start import check_same_start
from tandem.engine.scoring import place_scorer
from tandem.errors import ModelError
from tandem.generation.generator import Stops
from tandem.models.eos import stop_ids
from tandem.models.load import check_vocabulary, load_tokenizer
from tandem.models.lora import adapters_off
from tandem.models.modes import evaluating
from tandem.models.scalar import normalization
from tandem.models.twin import why_unpacked
from tandem.objectives.rewards import normalized_scores
from tandem.ops import native
from tandem.parallel.scaling import LossScaler
from tandem.parallel.tensor import tensor_group
from tandem.parallel.world import World
from tandem.types import PromptRow, Rollout, TokenBatch


@dataclass(frozen=True, slots=True)
class PolicyNumbers:
    """What the scoring pass says of a rollout's tokens; all (B, T) float32, 0 off the response.

    ref_logprobs, values: None where the engine has no reference, or no critic.
    from_sampler: log-probs and entropy are those that the sampler kept.
    """

    logprobs: Tensor
    entropy: Tensor
    ref_logprobs: Tensor | None
    values: Tensor | None
    from_sampler: bool


class RLHFEngine:
    """Actor, critic, reference, reward model and the actor's moving average.

    Nothing here knows of data files or of an algorithm: a custom loop calls `generating`,
    `policy_numbers`, `scores`, then `actor_learner` and `critic_learner`.
    """

    def __init__(
        self,
        *,
        actor: Model | Path,
        reward_model: Model | Path | None = None,
        critic: Model | Path | None = None,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reward_tokenizer: PreTrainedTokenizerBase | None = None,
        has_critic: bool = True,
        has_reference: bool = True,
        world: World | None = None,
    ) -> None:
        """Load what is given as a folder or hub name; take modules as they are.

        Args:
            actor: the SFT model. The reference is its present state.
            reward_model: a model with a scalar head, or None where a function rewards.
            critic: where the critic starts: by default the reward model, or the actor's backbone
                with a new head where there is none or its tokenizer is another.
            tokenizer, reward_tokenizer: needed for models given as modules.
            has_critic, has_reference: False where the algorithm needs none; it then takes no
                memory.
            world: the ranks that share the work and the weights; alone if None.
        Raises:
            ConfigError: the configuration is wrong, all of it at once.
            ModelError: a model or tokenizer cannot be used.
        """
        check_values(config)
        actor = str(actor) if isinstance(actor, Path) else actor
        reward_model = str(reward_model) if isinstance(reward_model, Path) else reward_model
        critic = str(critic) if isinstance(critic, Path) else critic
        self.config = config
        self.world = world or World(device=resolve_device(config.device))
        self.device = self.world.device
        self.tensor_group = tensor_group(self.world, config.parallel.inference_tp_size)
        self.dtype = resolve_dtype(config.dtype, self.device)
        self.tokenizer = tokenizer or self._tokenizer_of(actor, "tokenizer")
        # What starts as a copy of another is copied before that one gets adapters or is split.
        reference = _another(actor) if has_reference and config.lora.rank == 0 else None
        if has_critic and critic is None:
            critic = self._critic_start(actor, reward_model, reward_tokenizer)
        self.has_reference = has_reference
        self.actor = place_policy(
            actor, config, self.world, trained=True, seed=config.seed, keeps_start=True
        )
        check_vocabulary(self.actor, self.tokenizer)
        base = self._shared_base(actor)
        self.renderer = Renderer(self.tokenizer, stop_ids(self.actor.generation_config))
        self.scorer = None
        if reward_model is not None:
            tokenizer = reward_tokenizer or self._tokenizer_of(reward_model, "reward_tokenizer")
            self.scorer = place_scorer(reward_model, tokenizer, config, self.world, base=base)
        self.critic = None
        if has_critic and critic is not None:
            self.critic = place_scalar(
                critic, config, self.world, trained=True, seed=config.seed + 1, base=base
            )
        self.reference, hosted = None, "reference" in config.parallel.offload
        if reference is not None:
            self.reference = place_policy(
                reference, config, self.world, trained=False, on_host=hosted
            )
        self.agreement = check_policy(self.actor, config, self.tensor_group)
        if has_reference:
            check_same_start(self.actor, self.reference)
        self.scaler = LossScaler() if self.dtype == torch.float16 else None
        self.actor_learner = self._trainee("actor", self.actor, config.ppo.actor)
        self.critic_learner = None
        if self.critic is not None:
            self.critic_learner = self._trainee("critic", self.critic, config.ppo.critic)
        self.ema = None
        if config.ppo.ema:
            masters = self.actor_learner.masters
            self.ema = MovingAverage(self.actor, config.ppo.ema_decay, masters)

    @property
    def stops(self) -> Stops:
        """How the actor's answers end and become text."""
        return Stops.of(self.renderer)

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """The actor in generation mode: its weights whole on every rank, or in slices over its
        group; no dropout, no gradient checkpointing, compute type set."""
        with generating(self.actor, self.tensor_group):
            yield self.actor

    def rollout(
        self, prompts: Sequence[PromptRow], *, step: int, numbers: Sequence[int] | None = None
    ) -> Rollout:
        """The actor's answers, made by all ranks and known to all.

        Args:
            step, numbers: with the seed they key the sampling (see `generation.generate`).
        """
        return answered(
            self.actor,
            prompts,
            self.config,
            self.stops,
            step=step,
            numbers=numbers,
            group=self.tensor_group,
        )

    @property
    def policy_models(self) -> list[PreTrainedModel]:
        """The models that log-probs of the policy and of its reference come from."""
        return [self.actor] if self.reference is None else [self.actor, self.reference]

    def actor_logprobs(self, batch: TokenBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy at the sampling temperature, (B, T), with gradient."""
        return response_logprobs(
            self.actor,
            batch,
            temperature=self.config.sampling.temperature,
            with_entropy=with_entropy,
        )

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """The reference's log-probs at the same temperature, (B, T); no gradient.

        Raises:
            ModelError: the engine has no reference.
        """
        if not self.has_reference:
            raise ModelError("log-probs of the reference need one. Use RLHFEngine(has_reference=).")
        temperature = self.config.sampling.temperature
        with torch.no_grad():
            if self.reference is not None:
                return response_logprobs(self.reference, batch, temperature=temperature)[0]
            with adapters_off(self.actor):
                return response_logprobs(self.actor, batch, temperature=temperature)[0]

    def values(self, batch: TokenBatch) -> Tensor:
        """The critic's values, (B, T), normalized reward units, with gradient; 0 off the response.

        A critic that started as the reward model speaks raw units: the same constants that
        normalize scores bring it to theirs.

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

    def policy_numbers(self, rollout: Rollout) -> PolicyNumbers:
        """The scoring pass: actor, reference and critic over a rollout, without gradient.

        The actor's forward is left out where the sampler's own numbers are the same.
        """
        from_sampler = self.trusts_sampler

        def forward(part: TokenBatch) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = ()
            if not from_sampler:
                found = self.actor_logprobs(part, with_entropy=True)
            if self.has_reference:
                found = (*found, self.reference_logprobs(part))
            if self.critic is not None:
                found = (*found, self.values(part))
            return found

        logprobs, entropy = rollout.rollout_logprobs, rollout.rollout_entropy
        ref_logprobs = values = None
        if from_sampler and not self.has_reference and self.critic is None:
            return PolicyNumbers(logprobs, entropy, None, None, from_sampler)
        models = self.policy_models + ([] if self.critic is None else [self.critic])
        with ExitStack() as stack:
            for model in self.trained_models:
                stack.enter_context(evaluating(model))
            found = [*scored(rollout.batch, self.config.micro_batch_tokens, forward, models)]
        if not from_sampler:
            logprobs, entropy, *found = found
        if self.has_reference:
            ref_logprobs, *found = found
        if self.critic is not None:
            (values,) = found
        return PolicyNumbers(logprobs, entropy, ref_logprobs, values, from_sampler)

    @property
    def trusts_sampler(self) -> bool:
        """Whether the sampler's log-probs serve as PPO's old ones (`ppo.old_logprobs`)."""
        chosen = self.config.ppo.old_logprobs
        if chosen == "auto":
            agrees = self.agreement is not None and self.agreement.trustworthy
            return agrees and self.config.hybrid_engine
        return chosen == "sampler"

    def describe(self) -> str:
        """One line: on what the actor generates, and where PPO's old log-probs come from."""
        if self.agreement is None or not self.config.hybrid_engine:
            why = f"because {why_unpacked(self.actor)}" if self.config.hybrid_engine else "as asked"
            source = "the sampler's" if self.trusts_sampler else "a forward"
            return f"generation: Hugging Face's generate, {why}; old log-probs: {source}"
        operations = "the GPU" if self.device.type == "cuda" else "C++ operations"
        if self.device.type == "cpu" and native.why_not():
            operations = f"plain torch ({native.why_not()})"
        found = "bit for bit" if self.agreement.bitwise else f"within {self.agreement.gap:.1g} nats"
        source = "the sampler's" if self.trusts_sampler else "a forward's"
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

    def _tokenizer_of(self, model: Model, argument: str) -> PreTrainedTokenizerBase:
        if isinstance(model, str):
            return load_tokenizer(model, trust_remote_code=self.config.trust_remote_code)
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

    def _trainee(self, name: str, model: PreTrainedModel, settings: OptimizerConfig) -> Learner:
        return Learner(
            name,
            model,
            settings,
            offload=self.config.parallel.offload,
            dtype=self.dtype,
            scaler=self.scaler,
            spike_sigma=self.config.guards.spike_sigma,
        )

    def _critic_start(
        self,
        actor: Model,
        reward_model: Model | None,
        reward_tokenizer: PreTrainedTokenizerBase | None,
    ) -> Model:
        """What the critic starts from: a name to load again, or a copy of a module."""
        if reward_model is not None:
            tokenizer = reward_tokenizer or self._tokenizer_of(reward_model, "reward_tokenizer")
            if Renderer(tokenizer).renders_like(Renderer(self.tokenizer)):
                return _another(reward_model)
        if isinstance(actor, str):
            return actor
        raise ModelError(
            "RLHFEngine must get critic= where the actor is a module and no reward model shares "
            "its tokenizer; got none. Pass a folder or a model with a scalar head."
        )

    def _shared_base(self, actor: Model) -> Base | None:
        """What the other roles are to stand on; None where each has weights of its own."""
        if not self.config.parallel.shared_base:
            return None
        is_named = isinstance(actor, str)
        return Base(self.actor, self.actor.name_or_path if is_named else None)


def _another(model: Model) -> Model:
    """The same to load again, or a copy of a module."""
    return model if isinstance(model, str) else copy.deepcopy(model)
