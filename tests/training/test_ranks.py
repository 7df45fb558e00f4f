"""A run of all steps over ranks against the same run by one process, stage by stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.schema import ParallelConfig
from tandem.models.load import new_causal_lm
from tests.models.families import config_of
from tests.models.hybrid_families import HYBRIDS
from tests.ranks import on_ranks
from tests.tiny import tiny_config, tiny_tokenizer
from tests.training.conftest import PlainRun
from tests.training.runs import assert_same_run, ran, ranks_ran, records


@pytest.mark.parametrize(
    ("stage", "rank", "size", "slices"),
    [
        (0, 0, 2, 1),
        pytest.param(1, 0, 2, 1, marks=pytest.mark.slow),
        (3, 0, 2, 2),
        # Adapters at stage 2 are in test_matrix, uneven pieces in engine/test_spread.
        pytest.param(2, 2, 2, 1, marks=pytest.mark.slow),
        pytest.param(3, 0, 3, 1, marks=pytest.mark.slow),
    ],
)
def test_all_steps_over_ranks_are_those_of_one(
    tmp_path: Path, plain_run: PlainRun, stage: int, rank: int, size: int, slices: int
) -> None:
    config = plain_run(rank)
    alone = Path(config.output_dir)
    parallel = ParallelConfig(
        actor_zero_stage=stage, critic_zero_stage=stage, inference_tp_size=slices
    )
    config = replace(config, output_dir=str(tmp_path / "ranks"), parallel=parallel)
    on_ranks(size, ranks_ran, config)
    assert_same_run(tmp_path / "ranks", alone)
    found = records(tmp_path / "ranks", unlike=())
    waits = [r["values"].get("rank_wait") for r in found]
    assert any(wait is not None for wait in waits)
    assert all(0 <= wait < 1 for wait in waits if wait is not None)
    updates = [r for r in found if {"loss", "value_loss"} & set(r["values"])]
    assert {r["stage"] for r in updates} == {"sft", "reward", "ppo"}
    assert all(0 <= r["values"]["rank_idle"] < 1 for r in updates)
    if rank:
        adapter = load_file(tmp_path / "ranks/ppo/actor/adapter/adapter_model.safetensors")
        assert all(torch.isfinite(value).all() for value in adapter.values())


@pytest.mark.parametrize(
    "family", ["recurrent_gemma", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
def test_a_family_that_hugging_face_answers_for(
    tmp_path: Path, preferences: str, family: str
) -> None:
    """Its ranks generate in other batches, of prompts of equal length, and for other numbers of
    tokens: none may wait for another."""
    tokenizer = tiny_tokenizer()
    config = config_of(family, **(HYBRIDS[family] | {"vocab_size": len(tokenizer)}))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = new_causal_lm(config, seed=0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    alone = tiny_config(
        tmp_path / "alone", str(tmp_path / "model"), preferences,
        sft__max_steps=1, reward__max_steps=1, ppo__steps=2, ppo__ema=True,
    )  # fmt: skip
    ran(alone)
    parallel = ParallelConfig(actor_zero_stage=3, critic_zero_stage=3)
    on_ranks(2, ranks_ran, replace(alone, output_dir=str(tmp_path / "ranks"), parallel=parallel))
    assert_same_run(tmp_path / "ranks", tmp_path / "alone")
