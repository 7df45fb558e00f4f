"""What the engine reads of a configuration."""

from __future__ import annotations

import dataclasses

import pytest

from tandem.config.engine import EngineSettings, engine_settings
from tandem.config.schema import ParallelConfig, PPOConfig, RunConfig


def test_every_setting_is_the_knob_of_its_name() -> None:
    config = RunConfig(seed=7, dtype="bf16", micro_batch_tokens=99, dropout=0.5)
    settings = engine_settings(config)
    for field in dataclasses.fields(EngineSettings):
        if hasattr(config, field.name):
            assert getattr(settings, field.name) == getattr(config, field.name), field.name
    assert settings.spike_sigma == config.guards.spike_sigma


def test_optimizers_and_average_are_those_of_the_section() -> None:
    ppo = PPOConfig(ema_decay=0.5, old_logprobs="forward")
    settings = engine_settings(RunConfig(ppo=ppo))
    assert settings.optimizers == {"actor": ppo.actor, "critic": ppo.critic}
    assert (settings.ema_decay, settings.old_logprobs) == (0.0, "forward")
    assert engine_settings(RunConfig(ppo=dataclasses.replace(ppo, ema=True))).ema_decay == 0.5


@pytest.mark.parametrize(
    ("stages", "roles"),
    [
        (("sft",), {"actor"}),
        (("reward",), {"critic"}),
        (("sft", "reward", "ppo"), {"actor", "critic"}),
    ],
)
def test_the_roles_are_those_that_the_run_trains(stages: tuple[str, ...], roles: set[str]) -> None:
    assert engine_settings(RunConfig(stages=stages)).trained_roles == roles


def test_adapters_are_carried_on_over_a_base_that_stays_frozen() -> None:
    def carries(parallel: ParallelConfig) -> bool:
        return engine_settings(RunConfig(parallel=parallel)).carries_adapters

    assert not carries(ParallelConfig())
    assert carries(ParallelConfig(frozen_weights="nf4"))
    assert carries(ParallelConfig(shared_base=True))
