"""A run of all steps over ranks against the same run by one process, stage by stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from tandem.config.schema import ParallelConfig, RunConfig
from tandem.models.load import new_causal_lm
from tests.models.decoders import decoder_config
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


def ran_alone(folder: Path, data: str, model: PreTrainedConfig) -> RunConfig:
    """The configuration of a short run of one process, which is over."""
    tokenizer = tiny_tokenizer()
    model.vocab_size = len(tokenizer)
    model.eos_token_id, model.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    new_causal_lm(model, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    alone = tiny_config(
        folder / "alone", str(folder / "model"), data,
        sft__max_steps=1, reward__max_steps=1, ppo__steps=2, ppo__ema=True,
    )  # fmt: skip
    ran(alone)
    return alone


@pytest.mark.parametrize(
    ("family", "positions"), [("qwen3_moe", "max_position_embeddings"), ("gptj", "n_positions")]
)
def test_slices_of_experts_and_of_what_hugging_face_answers_for(
    tmp_path: Path, preferences: str, family: str, positions: str
) -> None:
    alone = ran_alone(tmp_path, preferences, decoder_config(family, **{positions: 256}))
    parallel = ParallelConfig(actor_zero_stage=3, critic_zero_stage=3, inference_tp_size=2)
    on_ranks(2, ranks_ran, replace(alone, output_dir=str(tmp_path / "ranks"), parallel=parallel))
    assert_same_run(tmp_path / "ranks", tmp_path / "alone")


@pytest.mark.parametrize(
    "family", ["recurrent_gemma", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
def test_a_family_that_hugging_face_answers_for(
    tmp_path: Path, preferences: str, family: str
) -> None:
    """Its ranks generate in other batches, of prompts of equal length, and for other numbers of
    tokens: none may wait for another."""
    alone = ran_alone(tmp_path, preferences, config_of(family, **HYBRIDS[family]))
    parallel = ParallelConfig(actor_zero_stage=3, critic_zero_stage=3)
    on_ranks(2, ranks_ran, replace(alone, output_dir=str(tmp_path / "ranks"), parallel=parallel))
    assert_same_run(tmp_path / "ranks", tmp_path / "alone")
