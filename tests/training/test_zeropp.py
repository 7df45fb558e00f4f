"""Runs under ZeRO++, from the configuration on: what is said, and that all steps end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.flags import parse_run_flags
from tandem.config.schema import ParallelConfig, RunConfig
from tandem.errors import ConfigError
from tandem.parallel.world import World
from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.training.runs import ran

ALL = ParallelConfig(
    actor_zero_stage=3,
    critic_zero_stage=3,
    zero_quantized_weights=True,
    zero_quantized_gradients=True,
    zero_hpz=True,
)


def said(world: World, config: RunConfig) -> list[str]:
    lines: list[str] = []
    ran(config, world, lines)
    return lines


def test_a_run_says_once_what_is_switched_off(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences)
    config = replace(config, stages=("sft",), parallel=ALL)
    first, second = on_ranks(2, said, config)
    about = [line for line in first if line.startswith("ZeRO++:")]
    assert len(about) == 1
    assert "switched off" in about[0]
    assert "share one node" in about[0]
    assert second == []


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.slow), 4])
def test_all_steps_run_under_all_of_it(
    tmp_path: Path, tiny_model: str, preferences: str, bits: int
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences,
        sft__max_steps=1, reward__max_steps=1, ppo__steps=1,
    )  # fmt: skip
    parallel = replace(ALL, zero_gradient_bits=bits)
    ppo = replace(config.ppo, ema=True, ptx_data=(preferences,))
    config = replace(config, parallel=parallel, ppo=ppo)
    first, *_ = on_ranks(4, said, config, ranks_per_node=2)
    assert not any(line.startswith("ZeRO++") for line in first)
    assert any("bit for bit" in line for line in first if line.startswith("ppo:"))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_whole_reference_from_a_folder_is_rounded_as_the_policy_is(
    tmp_path: Path, tiny_model: str, preferences: str, stage: int
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["dpo"], dpo__max_steps=1
    )
    parallel = ParallelConfig(actor_zero_stage=stage, zero_quantized_weights=True, zero_forced=True)
    on_ranks(2, said, replace(config, parallel=parallel))
    assert (tmp_path / "run" / "dpo" / "MANIFEST.json").exists()


def test_the_short_flags_are_the_knobs() -> None:
    flags = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz --zero-gradient-bits 4"
    config = parse_run_flags(flags.split(), "train")
    defaults = ParallelConfig()
    expected = replace(ALL, zero_gradient_bits=4)
    assert config.parallel == replace(
        expected,
        actor_zero_stage=defaults.actor_zero_stage,
        critic_zero_stage=defaults.critic_zero_stage,
    )
    with pytest.raises(ConfigError, match="zero_gradient_bits must be one of 8, 4; got '6'"):
        parse_run_flags(["--zero-gradient-bits", "6"], "train")
