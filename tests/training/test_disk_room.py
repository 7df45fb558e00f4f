"""A disk that is too small is told before a stage's first step."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.config.schema import RunConfig
from tandem.errors import CheckpointError
from tandem.training.run_stages import train
from tests.tiny import tiny_config

MIB = 1 << 20


def with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    """Every disk has so many bytes free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(num_bytes)))


@pytest.fixture
def config(tmp_path: Path, tiny_model: str, preferences: str) -> RunConfig:
    return replace(tiny_config(tmp_path / "run", tiny_model, preferences), stages=("sft",))


def lines_of(config: RunConfig, **more: Any) -> list[str]:
    lines: list[str] = []
    train(config, command="test", print_line=lines.append, **more)
    return lines


def saved_bytes(config: RunConfig) -> int:
    return (Path(config.output_dir) / "sft" / "model.safetensors").stat().st_size


def test_models_that_cannot_fit_are_refused_before_the_first_step(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, 1000)
    with pytest.raises(
        CheckpointError,
        match=r"--output-dir must have room for what sft leaves; .*run has .* MiB free, and the "
        r"models alone need .* MiB. Free some space or choose another --output-dir.$",
    ):
        lines_of(config)
    assert not (Path(config.output_dir) / "metrics.jsonl").exists()


def test_checkpoints_that_may_not_fit_are_a_warning(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("disk" in line for line in lines_of(config))
    size = saved_bytes(config)
    other = replace(config, output_dir=config.output_dir + "-2", save_every=0)
    with_free(monkeypatch, 1.2 * size)
    (line,) = (line for line in lines_of(other) if "disk" in line)
    assert line.startswith("sft: the disk may be too small: ")
    assert "free, and checkpoints and models may need" in line
    assert saved_bytes(other) == size
