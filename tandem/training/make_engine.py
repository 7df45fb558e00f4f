"""An engine from a run's configuration."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.config.engine import engine_settings
from tandem.config.load import check_values
from tandem.config.schema import RunConfig
from tandem.engine.hybrid import RLHFEngine
from tandem.parallel.world import World


def make_engine(
    config: RunConfig,
    actor: PreTrainedModel | str | Path,
    *,
    reward_model: PreTrainedModel | str | Path | None = None,
    critic: PreTrainedModel | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_tokenizer: PreTrainedTokenizerBase | None = None,
    has_critic: bool = True,
    has_reference: bool = True,
    world: World | None = None,
) -> RLHFEngine:
    """The engine that a configuration describes; see `RLHFEngine` for the models.

    Raises:
        ConfigError: the configuration is wrong, all of it at once.
        ModelError: a model or tokenizer cannot be used.
    """
    check_values(config)
    return RLHFEngine(
        engine_settings(config),
        actor,
        reward_model=reward_model,
        critic=critic,
        tokenizer=tokenizer,
        reward_tokenizer=reward_tokenizer,
        has_critic=has_critic,
        has_reference=has_reference,
        world=world,
    )
