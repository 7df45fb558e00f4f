"""Whole runs with weights and states in host memory, and in half precision, against plain ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tandem.config.schema import ParallelConfig
from tests.ranks import on_ranks
from tests.training.conftest import PlainRun
from tests.training.runs import assert_same_run, ranks_ran, records

ALL = ("optimizer", "params", "reference", "reward")


@pytest.mark.parametrize(
    ("offload", "lora"),
    [
        pytest.param(("optimizer",), 0, marks=pytest.mark.slow),
        (("params",), 0),
        pytest.param(("reference", "reward"), 2, marks=pytest.mark.slow),
        (ALL, 2),
    ],
)
def test_offload_at_one_process_changes_no_number(
    tmp_path: Path, plain_run: PlainRun, offload: tuple[str, ...], lora: int
) -> None:
    plain = plain_run(lora)
    ours = replace(
        plain,
        output_dir=str(tmp_path / "ours"),
        parallel=ParallelConfig(offload=offload),  # type: ignore[arg-type]
    )
    # In a process of its own: offloaded weights make a process group.
    on_ranks(1, ranks_ran, ours)
    assert_same_run(tmp_path / "ours", Path(plain.output_dir))


@pytest.mark.parametrize(("stage", "lora"), [(3, 0), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_offloaded_weights_over_ranks_change_no_number(
    tmp_path: Path, plain_run: PlainRun, stage: int, lora: int
) -> None:
    plain = plain_run(lora)
    ours = replace(
        plain,
        output_dir=str(tmp_path / "ours"),
        parallel=ParallelConfig(actor_zero_stage=stage, critic_zero_stage=stage, offload=ALL),
    )
    on_ranks(2, ranks_ran, ours)
    assert_same_run(tmp_path / "ours", Path(plain.output_dir))


@pytest.mark.parametrize(
    ("size", "stage", "offload"),
    [
        pytest.param(1, 2, (), marks=pytest.mark.slow),
        # One process in fp16: engine/test_half, test_begun_update.
        pytest.param(1, 2, ("optimizer",), marks=pytest.mark.slow),
        pytest.param(2, 3, (), marks=pytest.mark.slow),
        (2, 2, ALL),
    ],
)
def test_a_run_in_fp16_follows_that_in_fp32(
    tmp_path: Path, plain_run: PlainRun, size: int, stage: int, offload: tuple[str, ...]
) -> None:
    plain = plain_run(0)
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
    on_ranks(size, ranks_ran, ours)
    losses = {}
    for name, config in (("plain", plain), ("ours", ours)):
        values = [r["values"] for r in records(Path(config.output_dir)) if r["stage"] == "sft"]
        losses[name] = [v["loss"] for v in values if "loss" in v]
    assert losses["ours"] == pytest.approx(losses["plain"], rel=5e-3)
    scaled = [r["values"] for r in records(tmp_path / "ours") if "loss_scale" in r["values"]]
    assert {"sft", "reward", "ppo"} <= {
        r["stage"] for r in records(tmp_path / "ours") if "loss_scale" in r["values"]
    }
    # The first scale is higher than these gradients bear: it falls until steps are taken.
    assert all(v["loss_scale"] >= 1 for v in scaled)
    saved = load_file(tmp_path / "ours" / "ppo" / "actor" / "model.safetensors")
    assert {str(w.dtype) for w in saved.values()} == {"torch.float32"}
