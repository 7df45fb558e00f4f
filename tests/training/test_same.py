"""What must not change a number: running again, saving and showing at other times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_config
from tests.training.runs import assert_equal_runs, ran


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str) -> Path:
    return ran(tiny_config(tmp_path_factory.mktemp("first") / "run", tiny_model, preferences))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),  # the others say it as well
        {"save_every": 1, "save_async": False},
        {"keep_checkpoints": 5, "log__tensorboard": True, "log__print_samples_every": 1},
    ],
)
def test_the_same_seed_is_the_same_run(
    tmp_path: Path, first: Path, tiny_model: str, preferences: str, changes: dict[str, Any]
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, **changes)
    assert_equal_runs(ran(config), first)


def test_another_seed_is_another_run(
    tmp_path: Path, first: Path, tiny_model: str, preferences: str
) -> None:
    config = replace(tiny_config(tmp_path / "run", tiny_model, preferences), seed=77)
    other = ran(config) / "ppo" / "actor" / "model.safetensors"
    assert other.read_bytes() != (first / "ppo" / "actor" / "model.safetensors").read_bytes()
