"""Checkpoints of a real PPO run, damaged: found, fallen back from, and the run finished equal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from tandem.checkpoint.state import LATEST, load_newest_state
from tandem.config.schema import RunConfig
from tests.battery.figures import record
from tests.tiny import save_tiny_model, tiny_config, write_preferences
from tests.training.runs import StopError, assert_equal_runs, ran, stop_at

SEED = 20


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path, Path]:
    """A run's config, its folder where it is finished, and where it stopped with two
    checkpoints of PPO."""
    folder = tmp_path_factory.mktemp("damage")
    model = save_tiny_model(folder / "model")
    data = write_preferences(folder / "prefs.jsonl", 60)
    config = tiny_config(
        folder / "stopped", model, data, stages=["ppo"], save_every=1, ppo__ema=True,
        ppo__reward_function=f"{rewards(folder)}:short", ppo__eval_every=0,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "ppo", 3)
        with pytest.raises(StopError):
            ran(config)
    wait_for(folder / "stopped/checkpoints/ppo/step-000002")
    shutil.copytree(folder / "stopped", folder / "whole")
    ran(replace(config, output_dir=str(folder / "whole")))
    return config, folder / "whole", folder / "stopped"


def rewards(folder: Path) -> Path:
    """A reward function, so that no reward model need be trained."""
    path = folder / "rewards.py"
    path.write_text(
        "def short(prompts, completions, **columns):\n"
        "    return [-len(c) / 10 for c in completions]\n"
    )
    return path


def wait_for(path: Path) -> None:
    """Until the thread that writes has done so."""
    import time

    for _ in range(3000):
        if path.exists() and not list(path.parent.glob(".tmp-*")):
            return
        time.sleep(0.01)
    raise AssertionError(f"no {path}")


def checkpoint_files(folder: Path) -> list[Path]:
    """Every file that resuming reads: the newest checkpoint's, and the pointer."""
    newest = max(folder.glob("step-*"))
    return [*sorted(newest.iterdir()), folder / LATEST]


def flips(folder: Path, count: int) -> Iterator[tuple[Path, int]]:
    """Single bits of any of the files, every file as likely as every other."""
    random = Random(SEED)
    for _ in range(count):
        path = random.choice(checkpoint_files(folder))
        yield path, random.randrange(8 * path.stat().st_size)


def found(folder: Path, damaged: Path, why: str) -> None:
    """The damage must be told in one line each, and another checkpoint taken where it matters."""
    state, notes = load_newest_state(folder)
    assert notes, f"{why}: not noticed"
    assert all(note.isprintable() for note in notes)
    assert state is not None, why
    assert state.step == (2 if damaged.name == LATEST else 1), why
    for tensors in state.tensors.values():
        assert all(bool(torch.isfinite(t.whole()).all()) for t in tensors.values())


def put_back(folder: Path, sound: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(sound, folder)


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(
    stopped: tuple[RunConfig, Path, Path], tmp_path: Path, count: int
) -> None:
    sound = stopped[2] / "checkpoints/ppo"
    folder = tmp_path / "ppo"
    shutil.copytree(sound, folder)
    for path, bit in flips(sound, count):
        target = folder / path.relative_to(sound)
        flip(target, bit)
        found(folder, target, f"bit {bit} of {path.name}")
        put_back(folder, sound)
    record("single-bit flips", flips=count, seed=SEED, found=count)


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


def test_every_file_that_is_cut_empty_or_missing_is_found(
    stopped: tuple[RunConfig, Path, Path], tmp_path: Path
) -> None:
    sound = stopped[2] / "checkpoints/ppo"
    folder = tmp_path / "ppo"
    shutil.copytree(sound, folder)
    trials = 0
    for path in checkpoint_files(sound):
        for what in ("cut by one byte", "cut in half", "empty", "missing", "a folder"):
            target = folder / path.relative_to(sound)
            size = target.stat().st_size
            if what == "missing":
                target.unlink()
            elif what == "a folder":
                target.unlink()
                target.mkdir()
            else:
                os.truncate(target, {"cut by one byte": size - 1, "empty": 0}.get(what, size // 2))
            found(folder, target, f"{path.name} {what}")
            put_back(folder, sound)
            trials += 1
    record("truncated, empty and missing files", trials=trials, found=trials)


@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_the_same_command_falls_back_and_finishes_equal(
    stopped: tuple[RunConfig, Path, Path], tmp_path: Path, count: int
) -> None:
    config, whole, sound = stopped
    for number, (path, bit) in enumerate(flips(sound / "checkpoints/ppo", count)):
        folder = tmp_path / str(number)
        shutil.copytree(sound, folder)
        flip(folder / path.relative_to(sound), bit)
        lines: list[str] = []
        ran(replace(config, output_dir=str(folder)), lines=lines)
        said = [line for line in lines if "must" in line]
        assert len(said) >= 1, lines
        assert_equal_runs(folder, whole)
        shutil.rmtree(folder)
    record("runs continued from damaged checkpoints", runs=count, seed=SEED, equal=count)
