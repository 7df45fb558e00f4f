"""What the engine reads of a run's configuration. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tandem.config.lora import LoraConfig, TrainedRole
from tandem.config.moving_reference import ReferenceConfig
from tandem.config.optimizer import OptimizerConfig
from tandem.config.parallel import ParallelConfig, Recompute
from tandem.config.schema import RunConfig, SamplingConfig, rl_section
from tandem.config.scoring import EnsembleName, WeightedModel, weighted_models
from tandem.config.stages import in_order, rl_stage
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How models are placed, trained and sampled from; made by `engine_settings`.

    Fields mean what the knobs of their names mean, and besides:

    trained_roles: "actor", "critic": what any stage of the run trains.
    checkpointed: the roles that recompute activations (`gradient_checkpointing`).
    optimizers: of each role that reinforcement learning trains.
    spike_sigma: `guards.spike_sigma`.
    ema_decay: of the actor's moving average; 0 keeps none.
    further_rewards: `scoring.reward_models`, read. ensemble: `scoring.ensemble`, likewise.
    chat_template: `dataset.own_template`.
    moving: `reference`, how the reference follows the policy.
    """

    seed: int
    device: str
    dtype: str
    lora: LoraConfig
    parallel: ParallelConfig
    sampling: SamplingConfig
    dropout: float
    checkpointed: frozenset[TrainedRole]
    trust_remote_code: bool
    micro_batch_tokens: int
    halve_micro_batches: bool
    hybrid_engine: bool
    generation_batch_size: int
    generation_prefill_tokens: int
    spike_sigma: float
    trained_roles: frozenset[str]
    optimizers: Mapping[str, OptimizerConfig]
    ema_decay: float
    old_logprobs: Literal["auto", "sampler", "forward"]
    further_rewards: tuple[WeightedModel, ...] = ()
    ensemble: EnsembleName = "sum"
    uncertainty_coef: float = 0.1
    recompute: Recompute = "layers"
    chat_template: str = ""
    moving: ReferenceConfig = field(default_factory=ReferenceConfig)

    @property
    def carries_adapters(self) -> bool:
        """Whether a stage loads an earlier stage's adapters on their base, not merged weights.

        Merged weights quantized again would lose the adapters, and are no base to share.
        """
        return bool(self.parallel.frozen_weights) or self.parallel.shared_base

    def takes_adapters(self, role: TrainedRole, *, trained: bool = True) -> bool:
        """Whether a model of that role is loaded with those adapters: not one of which all weights
        are trained."""
        return self.carries_adapters and (not trained or self.lora.of(role).rank > 0)


def require_settings(settings: EngineSettings) -> EngineSettings:
    """The settings, checked to be such.

    Raises:
        ConfigError: they are something else, such as a run's configuration.
    """
    if not isinstance(settings, EngineSettings):
        raise ConfigError(
            f"RLHFEngine must get EngineSettings; got {type(settings).__name__}. Call "
            "make_engine(config, actor), or pass engine_settings(config)."
        )
    return settings


def engine_settings(config: RunConfig) -> EngineSettings:
    """The settings of a run's engine; optimizers and average are of the run's RL stage,
    or of the first RL stage if the run has none."""
    section = rl_section(config)
    return EngineSettings(
        seed=config.seed,
        device=config.device,
        dtype=config.dtype,
        lora=config.lora,
        parallel=config.parallel,
        sampling=config.sampling,
        dropout=config.dropout,
        checkpointed=_checkpointed(config),
        trust_remote_code=config.trust_remote_code,
        micro_batch_tokens=config.micro_batch_tokens,
        halve_micro_batches=config.halve_micro_batches,
        hybrid_engine=config.hybrid_engine,
        generation_batch_size=config.generation_batch_size,
        generation_prefill_tokens=config.generation_prefill_tokens,
        spike_sigma=config.guards.spike_sigma,
        trained_roles=frozenset(role for s in in_order(config.stages) for role in s.trains),
        optimizers={role: getattr(section, role) for role in rl_stage(config.stages).trains},
        ema_decay=section.ema_decay if section.ema else 0.0,
        old_logprobs=section.old_logprobs,
        further_rewards=weighted_models(config.scoring.reward_models),
        ensemble=config.scoring.ensemble,
        uncertainty_coef=config.scoring.uncertainty_coef,
        recompute=config.recompute,
        chat_template=config.dataset.own_template,
        moving=config.reference,
    )


def _checkpointed(config: RunConfig) -> frozenset[TrainedRole]:
    both: frozenset[TrainedRole] = frozenset(("actor", "critic"))
    if not config.gradient_checkpointing:
        return frozenset()
    return both if config.recompute_roles == "all" else frozenset((config.recompute_roles,))
