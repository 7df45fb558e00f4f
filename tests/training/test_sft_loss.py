"""The losses that supervised fine-tuning learns, and what is logged of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.training.runs import assert_same_measures, ran, ranks_ran, records


def test_dft_is_logged_beside_the_cross_entropy_and_learns(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    values = {"stages": ["sft"], "dtype": "fp32", "ppo__eval_prompts": 0, "sft__warmup": 0.0}
    plain = tiny_config(tmp_path / "nll", tiny_model, preferences, **values)
    weighted = replace(
        plain, output_dir=str(tmp_path / "dft"), sft=replace(plain.sft, loss="dft", max_steps=12)
    )
    ran(plain)
    ran(weighted)
    nll = [line["values"] for line in records(tmp_path / "nll") if "loss" in line["values"]]
    dft = [line["values"] for line in records(tmp_path / "dft") if "loss" in line["values"]]
    assert dft[0]["loss"] == pytest.approx(nll[0]["loss"], rel=1e-6)  # before any update
    assert dft[1]["loss"] != pytest.approx(nll[1]["loss"], rel=1e-6)
    for line in dft:
        assert 0 < line["dft_loss"] <= math.exp(-1)
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
        assert "cross_entropy" not in line
    assert "dft_loss" not in nll[0]
    first, *_, last = (
        line["values"]["heldout_loss"]
        for line in records(tmp_path / "dft")
        if "heldout_loss" in line["values"]
    )
    assert last < first
    cut = replace(weighted, output_dir=str(tmp_path / "cut"), micro_batch_tokens=130)
    on_ranks(2, ranks_ran, cut)
    assert_same_measures(tmp_path / "cut", tmp_path / "dft")
