"""What a Python loop hands a trainer, refused in one line where it is something else."""

from __future__ import annotations

from typing import Any

from tandem.config.schema import RunConfig
from tandem.engine.hybrid import RLHFEngine
from tandem.errors import ConfigError
from tandem.types import Experience


def require_trainer_arguments(engine: Any, config: Any, source: Any) -> None:
    """Refuse an engine, a configuration or a source of answers that is none.

    Raises:
        ConfigError: one is something else.
    """
    if not isinstance(engine, RLHFEngine):
        raise ConfigError(
            f"PPOTrainer's engine must be an RLHFEngine; got {_named(engine)}. Write "
            "PPOTrainer(engine, config), with make_engine's engine."
        )
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"PPOTrainer's config must be a RunConfig; got {_named(config)}. Use build_config."
        )
    if source is not None and not callable(getattr(source, "collect", None)):
        raise ConfigError(
            "PPOTrainer's source must have a method collect(prompts, *, step, numbers=None), "
            f"which returns a Rollout; got {_named(source)}. Write one, or leave source out."
        )


def require_experience(given: Any) -> None:
    """Refuse what is no experience.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(given, Experience):
        raise ConfigError(
            f"train_rlhf must get an Experience; got {_named(given)}. Pass what "
            "generate_experience returned."
        )


def _named(given: Any) -> str:
    """Its class; of a class given in place of an object, that it is one."""
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
