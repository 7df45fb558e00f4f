"""A tiny model and data set, made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.config.lora import LoraConfig
from tandem.config.schema import RunConfig
from tests.tiny import save_tiny_model, tiny_config, write_preferences
from tests.training.runs import ran


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama's folder."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small file of preferences."""
    return write_preferences(tmp_path_factory.mktemp("data") / "prefs.jsonl")


PlainRun = Callable[[int], RunConfig]
"""A LoRA rank (0: none) to a finished run's configuration."""


@pytest.fixture(scope="session")
def plain_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str
) -> PlainRun:
    """All three steps with EMA and ptx, by one plain process with whole weights: what runs in other
    layouts are compared with. Made once for each LoRA rank."""
    made: dict[int, RunConfig] = {}

    def plain(lora: int) -> RunConfig:
        if lora not in made:
            config = tiny_config(
                tmp_path_factory.mktemp("plain") / "run", tiny_model, preferences,
                sft__max_steps=2, reward__max_steps=2, ppo__steps=2,
            )  # fmt: skip
            config = replace(
                config,
                lora=LoraConfig(rank=lora),
                ppo=replace(config.ppo, ema=True, ptx_data=(preferences,)),
            )
            ran(config)
            made[lora] = config
        return made[lora]

    return plain
