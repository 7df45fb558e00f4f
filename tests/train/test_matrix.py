"""The 16 cases of ZeRO 2 or 3, hybrid engine, offload, LoRA: each the run of one plain process."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tandem.config.schema import LoraConfig, ParallelConfig, RunConfig
from tandem.parallel.world import World
from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.train.test_ranks import assert_same_run, ran

OFFLOADED = ("optimizer", "reference", "reward")
SHORT = ((2, True, True), (3, False, True))
"""Stage, hybrid engine, offload of the cases that every test run has."""


def all_steps(folder: Path, model: str, data: str, lora: int) -> RunConfig:
    """Three steps with EMA and ptx; whole weights, one process."""
    config = tiny_config(folder, model, data)
    return replace(
        config,
        lora=LoraConfig(rank=lora),
        ppo=replace(config.ppo, ema=True, ptx_data=(data,)),
        save_every=1,
    )


@pytest.fixture(scope="module", params=[0, 2], ids=["full", "lora"])
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunConfig, Path]:
    folder = tmp_path_factory.mktemp("alone")
    model = request.getfixturevalue("tiny_model")
    data = request.getfixturevalue("preferences")
    config = all_steps(folder / "run", model, data, request.param)
    ran(World(), config)
    return config, folder / "run"


@pytest.mark.parametrize(
    ("stage", "hybrid", "offloads"),
    [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.slow)
        for case in itertools.product((2, 3), (True, False), (False, True))
    ],
)
def test_every_case_is_the_run_of_one_plain_process(
    tmp_path: Path,
    alone: tuple[RunConfig, Path],
    stage: int,
    hybrid: bool,
    offloads: bool,
) -> None:
    config, reference = alone
    ours = replace(
        config,
        output_dir=str(tmp_path),
        hybrid_engine=hybrid,
        parallel=ParallelConfig(
            actor_zero_stage=stage,
            critic_zero_stage=stage,
            offload=OFFLOADED if offloads else (),
        ),
    )
    on_ranks(2, ran, ours)
    assert_same_run(tmp_path, reference, unlike=() if hybrid else ("old_logprobs_sampled",))
    AutoModelForCausalLM.from_pretrained(tmp_path / "ppo" / "actor")
