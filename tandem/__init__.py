"""Tandem: from a pretrained language model to an assistant with human feedback.

The names below are the public API; each is imported on first use, so that `import tandem` and help
pages do not wait for torch. None may be the name of a package or module below: Python would replace
it as soon as that is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.config.load import build_config, load_config
    from tandem.config.schema import RunConfig, SamplingConfig
    from tandem.data.render import Renderer
    from tandem.engine.hybrid import RLHFEngine
    from tandem.errors import TandemError
    from tandem.generation.generator import generate
    from tandem.generation.stops import Stops
    from tandem.metrics.records import read_metrics
    from tandem.models.save import save_model
    from tandem.training.callbacks import Callback, RunState
    from tandem.training.make_engine import make_engine
    from tandem.training.ppo_trainer import PPOTrainer
    from tandem.training.run_stages import train
    from tandem.training.tracked_loop import TrackedLoop
    from tandem.types import Experience, Message, PromptRow, Rollout

_HOMES = {
    "Callback": "tandem.training.callbacks",
    "Experience": "tandem.types",
    "Message": "tandem.types",
    "PPOTrainer": "tandem.training.ppo_trainer",
    "PromptRow": "tandem.types",
    "RLHFEngine": "tandem.engine.hybrid",
    "Renderer": "tandem.data.render",
    "Rollout": "tandem.types",
    "RunConfig": "tandem.config.schema",
    "RunState": "tandem.training.callbacks",
    "SamplingConfig": "tandem.config.schema",
    "Stops": "tandem.generation.stops",
    "TandemError": "tandem.errors",
    "TrackedLoop": "tandem.training.tracked_loop",
    "build_config": "tandem.config.load",
    "generate": "tandem.generation.generator",
    "load_config": "tandem.config.load",
    "make_engine": "tandem.training.make_engine",
    "read_metrics": "tandem.metrics.records",
    "save_model": "tandem.models.save",
    "train": "tandem.training.run_stages",
}

__all__ = [
    "Callback",
    "Experience",
    "Message",
    "PPOTrainer",
    "PromptRow",
    "RLHFEngine",
    "Renderer",
    "Rollout",
    "RunConfig",
    "RunState",
    "SamplingConfig",
    "Stops",
    "TandemError",
    "TrackedLoop",
    "build_config",
    "generate",
    "load_config",
    "make_engine",
    "read_metrics",
    "save_model",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
