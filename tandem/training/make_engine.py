"""An engine from a run's configuration."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.config.engine import engine_settings
from tandem.config.load import check_values
from tandem.config.lora import TrainedRole
from tandem.config.schema import RunConfig, rl_section
from tandem.config.stages import rl_stage, sources
from tandem.engine.hybrid import RLHFEngine
from tandem.models.lora import require_targets
from tandem.parallel.world import World


def make_engine(
    config: RunConfig,
    actor: PreTrainedModel | str | Path,
    *,
    reward_model: nn.Module | str | Path | None = None,
    critic: PreTrainedModel | str | Path | None = None,
    reference: PreTrainedModel | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_tokenizer: PreTrainedTokenizerBase | None = None,
    has_critic: bool | None = None,
    has_reference: bool | None = None,
    world: World | None = None,
) -> RLHFEngine:
    """The engine that a configuration describes; see `RLHFEngine` for the models.

    Args:
        reward_model: None: `config.reward_model`, unless stage reward of `config.stages` trains it.
        reference: None: `config.reference_model`, or the actor's present state.
        critic: None: `config.critic_model`, or as `RLHFEngine` says.
        has_critic, has_reference: None: if the configured algorithm needs them.
    Raises:
        ConfigError: the configuration is wrong, all of it at once.
        ModelError: a model or tokenizer cannot be used.
    """
    check_values(config)
    rl = rl_section(config)
    stage = rl_stage(config.stages)
    trainers = {earlier.name for earlier in sources("reward model", stage.name)}
    is_weighed = stage.rewarded and rl.reward_model_weight > 0
    if is_weighed and trainers.isdisjoint(config.stages):
        reward_model = reward_model or config.reward_model or None
    engine = RLHFEngine(
        engine_settings(config),
        actor,
        reward_model=reward_model,
        critic=critic or config.critic_model or None,
        reference=reference or config.reference_model or None,
        tokenizer=tokenizer,
        reward_tokenizer=reward_tokenizer,
        has_critic=rl.has_critic if has_critic is None else has_critic,
        has_reference=rl.has_reference if has_reference is None else has_reference,
        world=world,
    )
    models: dict[TrainedRole, PreTrainedModel | None] = {
        "actor": engine.actor,
        "critic": engine.critic,
    }
    adapted = [m for role, m in models.items() if m is not None and config.lora.of(role).rank]
    if adapted:
        require_targets(adapted, config.lora.targets)
    return engine
