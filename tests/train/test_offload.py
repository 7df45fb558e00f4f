"""Whole runs with weights and states in host memory, and in half precision, against plain ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tandem.config.schema import LoraConfig, ParallelConfig, RunConfig
from tandem.parallel.world import World
from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.train.test_ranks import assert_same_run, ran, records

ALL = ("optimizer", "params", "reference", "reward")


def all_steps(folder: Path, model: str, data: str, lora: int = 0) -> RunConfig:
    config = tiny_config(folder, model, data)
    return replace(
        config,
        lora=LoraConfig(rank=lora),
        ppo=replace(config.ppo, ema=True, ptx_data=(data,)),
    )


@pytest.mark.parametrize(
    ("offload", "lora"),
    [(("optimizer",), 0), (("params",), 0), (("reference", "reward"), 2), (ALL, 2)],
)
def test_offload_at_one_process_changes_no_number(
    tmp_path: Path, tiny_model: str, preferences: str, offload: tuple[str, ...], lora: int
) -> None:
    plain = all_steps(tmp_path / "plain", tiny_model, preferences, lora)
    ran(World(), plain)
    ours = replace(
        plain,
        output_dir=str(tmp_path / "ours"),
        parallel=ParallelConfig(offload=offload),  # type: ignore[arg-type]
    )
    # In a process of its own: offloaded weights make a process group.
    on_ranks(1, ran, ours)
    assert_same_run(tmp_path / "ours", tmp_path / "plain")


@pytest.mark.parametrize(("stage", "lora"), [(3, 0), (2, 2)])
def test_offloaded_weights_over_ranks_change_no_number(
    tmp_path: Path, tiny_model: str, preferences: str, stage: int, lora: int
) -> None:
    plain = all_steps(tmp_path / "plain", tiny_model, preferences, lora)
    ran(World(), plain)
    ours = replace(
        plain,
        output_dir=str(tmp_path / "ours"),
        parallel=ParallelConfig(actor_zero_stage=stage, critic_zero_stage=stage, offload=ALL),
    )
    on_ranks(2, ran, ours)
    assert_same_run(tmp_path / "ours", tmp_path / "plain")


@pytest.mark.parametrize(
    ("size", "stage", "offload"), [(1, 2, ()), (1, 2, ("optimizer",)), (2, 3, ()), (2, 2, ALL)]
)
def test_a_run_in_fp16_follows_that_in_fp32(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    size: int,
    stage: int,
    offload: tuple[str, ...],
) -> None:
    plain = all_steps(tmp_path / "plain", tiny_model, preferences)
    plain = replace(plain, steps=("sft", "reward", "ppo"))
    ran(World(), plain)
    ours = replace(
        plain,
        dtype="fp16",
        output_dir=str(tmp_path / "ours"),
        parallel=ParallelConfig(
            actor_zero_stage=stage,
            critic_zero_stage=stage,
            offload=offload,  # type: ignore[arg-type]
        ),
    )
    on_ranks(size, ran, ours)
    losses = {}
    for folder in ("plain", "ours"):
        values = [r["values"] for r in records(tmp_path / folder) if r["stage"] == "sft"]
        losses[folder] = [v["loss"] for v in values if "loss" in v]
    assert losses["ours"] == pytest.approx(losses["plain"], rel=5e-3)
    scaled = [r["values"] for r in records(tmp_path / "ours") if "loss_scale" in r["values"]]
    assert {"sft", "reward", "ppo"} <= {
        r["stage"] for r in records(tmp_path / "ours") if "loss_scale" in r["values"]
    }
    # The first scale is higher than these gradients bear: it falls until steps are taken.
    assert all(v["loss_scale"] >= 1 for v in scaled)
    saved = load_file(tmp_path / "ours" / "ppo" / "actor" / "model.safetensors")
    assert {str(w.dtype) for w in saved.values()} == {"torch.float32"}
