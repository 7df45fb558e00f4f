"""Checks of the arguments that a Python loop passes to a trainer."""

from __future__ import annotations

from typing import Any

from tandem.config.schema import RunConfig
from tandem.engine.hybrid import RLHFEngine
from tandem.errors import ConfigError
from tandem.text import class_name
from tandem.types import Experience


def require_trainer_arguments(engine: Any, config: Any, source: Any) -> None:
    """Check the arguments of `PPOTrainer`.

    Raises:
        ConfigError: one is of another kind.
    """
    if not isinstance(engine, RLHFEngine):
        raise ConfigError(
            f"PPOTrainer's engine must be an RLHFEngine; got {class_name(engine)}. Write "
            "PPOTrainer(engine, config), with make_engine's engine."
        )
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"PPOTrainer's config must be a RunConfig; got {class_name(config)}. Use build_config."
        )
    if source is not None and not callable(getattr(source, "collect", None)):
        raise ConfigError(
            "PPOTrainer's source must have a method collect(prompts, *, step, numbers=None), "
            f"which returns a Rollout; got {class_name(source)}. Write one, or remove source."
        )


def require_experience(given: Any) -> None:
    """Check the argument of `train_rlhf`.

    Raises:
        ConfigError: it is no experience.
    """
    if not isinstance(given, Experience):
        raise ConfigError(
            f"train_rlhf must get an Experience; got {class_name(given)}. Pass what "
            "generate_experience returned."
        )
