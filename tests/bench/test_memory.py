"""The memory bench: what it measures is what is held, and the ladder stops where it must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import memory
from bench.memory import formula, main, phases_of, row_of
from bench.memory_case import Measured, MemoryCase, measure, save_models
from tandem.errors import ConfigError
from tandem.memory.shape import shape_of

_MIB = 2**20


def test_a_case_holds_at_least_what_it_trains(tmp_path: Path) -> None:
    """A process of its own: 5M weights with gradients and moments, and little else beside."""
    case = MemoryCase(shape=memory.MODELS["5m"], step="sft", steps=2)
    save_models(case, tmp_path)
    (found,) = measure(case, tmp_path)
    weights = shape_of(case.model_config).parameters
    row = row_of("5m", "stage 0", case, [found])
    assert found.peaks.keys() == {"load", "train"} == row["formula"].keys()
    assert 16 * weights < found.peaks["train"] < 16 * weights + 60 * _MIB
    assert 0.8 < row["measured"]["train"] / row["formula"]["train"] < 1.1  # it counts every answer


@pytest.mark.slow
def test_ranks_that_share_weights_hold_less(tmp_path: Path) -> None:
    stages = {"parallel.actor_zero_stage": 3, "parallel.critic_zero_stage": 3}
    case = MemoryCase(shape=memory.MODELS["5m"], ranks=2, knobs=stages, prompts=4)
    save_models(case, tmp_path)
    found = measure(case, tmp_path)
    assert len(found) == 2
    peaks = phases_of(formula(case))
    for phase, expected in peaks.items():
        measured = max(rank.peaks[phase] for rank in found)
        assert abs(measured - expected) < 0.1 * expected + 30 * _MIB, phase


@pytest.mark.usefixtures("forked")
def test_a_rank_that_fails_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="a_rank must answer from every process; got exit codes"):
        measure(MemoryCase(shape=memory.MODELS["tiny"], step="sft"), tmp_path / "nothing")
    assert "nothing" in capfd.readouterr().err


def test_the_table_has_every_combination(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "run_case", _exactly)
    out = tmp_path / "out.json"
    flags = ["--models", "tiny", "--stages", "0", "3", "--lora", "0", "4", "--json", str(out)]
    cases = main(flags)["cases"]
    one = [case["name"] for case in cases if case["ranks"] == 1]
    two = [case["name"] for case in cases if case["ranks"] == 2]
    assert one[:2] == ["stage 0", "stage 0, LoRA 4"]
    assert two[:4] == ["stage 0", "stage 0, LoRA 4", "stage 3", "stage 3, LoRA 4"]
    assert two[4:] == [f"stage 3, {name}" for name in memory.VARIANTS]
    assert all(case["measured"] == case["formula"] for case in cases)
    assert len(json.loads(out.read_text())["cases"]) == len(cases)


def test_the_ladder_ends_at_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "run_case", _exactly)
    found = main(["--largest", "0.5", "--ranks", "1", "--start", "tiny"])["largest"]
    tried = [row["model"] for row in found["tried"]]
    assert tried == list(memory.MODELS)[: len(tried)]
    peaks = {row["model"]: max(row["measured"].values()) for row in found["tried"]}
    assert peaks[found["largest"]] <= 2**29
    after = list(memory.MODELS)[tried.index(found["largest"]) + 1]
    assert peaks.get(after, 2**30) > 2**29


def test_knobs_are_read_as_yaml() -> None:
    flags = ["--models", "tiny", "--knobs", "lora.rank=8", "parallel.offload=[optimizer]"]
    options = memory._options(flags)
    case = memory._case(options, "tiny", 1, 0, {})
    assert (case.config.lora.rank, case.config.parallel.offload) == (8, ("optimizer",))
    with pytest.raises(ConfigError, match="--knobs must be NAME=VALUE"):
        main(["--models", "tiny", "--knobs", "lora.rank"])


def _exactly(case: MemoryCase) -> list[Measured]:
    """A run that needs what the formula says."""
    peaks: dict[str, Any] = phases_of(formula(case))
    return [Measured(peaks, 1.0)] * case.ranks
