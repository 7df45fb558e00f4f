"""What this room needs to know of a stage: its name, what people call it, and its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.errors import ConfigError

Family = Literal["supervised", "pairs", "rl"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that logs. `short` is the name of the model it makes; its family decides which
    metrics, alarms, columns and charts it has."""

    name: str
    title: str
    short: str
    family: Family


STAGES = (
    Stage("sft", "Supervised fine-tuning", "SFT", "supervised"),
    Stage("reward", "Reward model", "Reward", "pairs"),
    Stage("dpo", "Direct preference optimization", "DPO", "pairs"),
    Stage("ppo", "PPO", "PPO", "rl"),
)
"""In the order in which a run takes them."""


def stage_names() -> tuple[str, ...]:
    """Of all stages, in their order."""
    return tuple(stage.name for stage in STAGES)


def stage_of(name: str) -> Stage:
    """The stage of that name.

    Raises:
        ConfigError: there is none.
    """
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise ConfigError(f"stage must be one of {', '.join(stage_names())}; got {name!r}. Use one.")
