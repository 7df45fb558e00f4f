"""Deterministic algorithms: asked for on a GPU alone, by the knob and by every replay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tandem.config.schema import RunConfig
from tandem.devices import ask_for_determinism
from tandem.parallel.world import World
from tandem.training import run_folder
from tandem.training.run_folder import Run


def test_only_a_gpu_needs_other_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda on, warn_only: asked.append((on, warn_only))
    )
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    ask_for_determinism(torch.device("cpu"), strict=True)
    assert asked == []
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    ask_for_determinism(torch.device("cuda"), strict=True)
    ask_for_determinism(torch.device("cuda"), strict=False)
    assert asked == [(True, False), (True, True)]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


@pytest.mark.parametrize(
    ("knob", "writes", "expected"),
    [(False, True, []), (True, True, [True]), (False, False, [False]), (True, False, [True])],
)
def test_the_knob_and_a_replay_ask(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    knob: bool,
    writes: bool,
    expected: list[bool],
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        run_folder, "ask_for_determinism", lambda device, *, strict: asked.append(strict)
    )
    config = RunConfig(deterministic=knob, output_dir=str(tmp_path))
    Run(config, world=World(), writes=writes)
    assert asked == expected
