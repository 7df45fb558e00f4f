"""The 16 cases of ZeRO 2 or 3, hybrid engine, offload, LoRA: each the run of one plain process."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tandem.config.schema import ParallelConfig
from tests.ranks import on_ranks
from tests.training.conftest import PlainRun
from tests.training.runs import assert_same_run, ranks_ran

OFFLOADED = ("optimizer", "reference", "reward")
SHORT = ((2, 3, False, True),)
"""LoRA rank, stage, hybrid engine, offload of what every test run has; the hybrid engine without
offload is in test_ranks, with adapters in test_frozen, with offload in test_offload."""


@pytest.mark.parametrize(
    ("lora", "stage", "hybrid", "offloads"),
    [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.slow)
        for case in itertools.product((0, 2), (2, 3), (True, False), (False, True))
    ],
)
def test_every_case_is_the_run_of_one_plain_process(
    tmp_path: Path,
    plain_run: PlainRun,
    lora: int,
    stage: int,
    hybrid: bool,
    offloads: bool,
) -> None:
    config = plain_run(lora)
    reference = Path(config.output_dir)
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
    on_ranks(2, ranks_ran, ours)
    assert_same_run(tmp_path, reference, unlike=() if hybrid else ("old_logprobs_sampled",))
    AutoModelForCausalLM.from_pretrained(tmp_path / "ppo" / "actor")
