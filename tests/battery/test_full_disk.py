"""Disks that are too small or read-only: one line, and what was there before is intact."""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

from tandem.checkpoint import saver as saver_module
from tandem.checkpoint.folder import write_folder
from tandem.checkpoint.saver import Saver
from tandem.checkpoint.state import State, load_newest_state
from tandem.cli import main
from tandem.config.load import dump_config
from tandem.config.schema import RunConfig
from tandem.errors import CheckpointError
from tandem.models.save import save_model
from tandem.training import run_stages as run_stages_module
from tandem.training import saving as saving_module
from tests.battery.figures import record
from tests.models.families import tiny_model, tokenizer
from tests.tiny import save_tiny_model, tiny_config, write_preferences
from tests.training.runs import assert_equal_runs, ran
from tests.whole import is_whole

KIB = 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Where a small file system is mounted, which no other process sees and which ends with this
    one; its size is set by `remount`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    new_mounts = 0x20000  # CLONE_NEWNS
    if ctypes.CDLL(None).unshare(new_mounts) != 0:
        pytest.skip("mounting needs root")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(disk: Path, how: str) -> None:
    """Change the mounted file system's size, or forbid writing."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def state(step: int) -> State:
    """About 600 KiB."""
    weights = {f"layer {i}": torch.full((5000,), float(step)) for i in range(10)}
    return State(step, dict.fromkeys(("model", "exp_avg", "exp_avg_sq"), weights), {})


def save(folder: Path, step: int, *, beside: bool = True) -> None:
    saver = Saver(folder, keep=2, beside=beside)
    saver.save(state(step))
    saver.wait()


def refusal(folder: Path, step: int) -> str:
    """What is said where the disk refuses; empty where it did not."""
    try:
        save(folder, step)
    except CheckpointError as error:
        return str(error)
    return ""


def require_old(folder: Path, step: int) -> None:
    found, notes = load_newest_state(folder)
    assert found is not None
    assert (found.step, notes) == (step, [])
    assert torch.equal(found.tensors["model"]["layer 0"].whole(), torch.full((5000,), float(step)))


@pytest.mark.parametrize("looks_first", [True, False])
def test_a_full_disk_keeps_the_checkpoint_before(
    disk: Path, monkeypatch: pytest.MonkeyPatch, looks_first: bool
) -> None:
    """At 20 sizes; also where the room is taken by others after we looked."""
    folder = disk / "run"
    save(folder, 1)
    if not looks_first:
        monkeypatch.setattr(saver_module, "require_space", lambda *arguments: None)
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // KIB + 60
    outcomes = {"refused": 0, "saved": 0}
    for extra in range(20, 820, 40):
        remount(disk, f"size={used + extra}k")
        said = refusal(folder, 2)
        if said:
            outcomes["refused"] += 1
            assert said.isprintable()
            pattern = r"room for [\d,]+ bytes; got [\d,]+ bytes free" if looks_first else (
                r"No space left on device \([\d,]+ bytes free\)"
            )  # fmt: skip
            assert re.search(pattern, said), said
            assert not list(folder.glob(".tmp-*")), "no half-written folder stays"
            require_old(folder, 1)
            continue
        outcomes["saved"] += 1
        require_old(folder, 2)
        for path in (folder / "step-000002").iterdir():
            path.unlink()
        (folder / "step-000002").rmdir()
        (folder / "latest").unlink()
        remount(disk, "size=16m")
        save(folder, 1)
    assert outcomes["refused"] >= 10
    assert outcomes["saved"] >= 2
    record("disk full at 20 sizes", looks_first=looks_first, **outcomes, lost=0)


def test_a_read_only_folder_keeps_the_checkpoint_before(disk: Path) -> None:
    folder = disk / "run"
    save(folder, 1)
    remount(disk, "ro")
    said = refusal(folder, 2)
    assert "Read-only file system" in said
    assert said.isprintable()
    require_old(folder, 1)
    (found, notes) = load_newest_state(folder)
    remount(disk, "rw")
    assert found is not None
    assert notes == []
    save(folder, 2)
    require_old(folder, 2)


def test_a_finished_model_that_does_not_fit_is_not_there(disk: Path) -> None:
    model = tiny_model("llama")
    before = disk / "before"
    write_folder(before, lambda aside: save_model(model, tokenizer(), aside))
    sizes = [path.stat().st_size for path in before.iterdir()]
    refused = 0
    for share in range(10):
        remount(disk, f"size={(sum(sizes) * (10 + share) // 10) // KIB + 4 * len(sizes)}k")
        said = ""
        try:
            write_folder(disk / "sft", lambda aside: save_model(model, tokenizer(), aside))
        except CheckpointError as error:
            said = str(error)
        if said:
            refused += 1
            assert said.isprintable()
            assert not (disk / "sft").exists()
            assert not list(disk.glob(".tmp-*"))
        assert is_whole(before)
    assert refused >= 8
    record("disk full while a model is saved", sizes=10, refused=refused, half_written=0)


def whole_steps(run: Path) -> dict[str, float]:
    """How far every stage's newest whole checkpoint is, verified and loaded; finished ones: inf."""
    steps = {}
    for stage in ("sft", "reward", "ppo"):
        found, notes = load_newest_state(run / "checkpoints" / stage)
        assert notes == [], "a checkpoint has its name and is not whole"
        if found is not None:
            steps[stage] = float(found.step)
            for tensors in found.tensors.values():
                assert all(bool(tensor.whole().isfinite().all()) for tensor in tensors.values())
        if (run / stage).exists():
            assert is_whole(run / stage)
            steps[stage] = inf
    return steps


def commanded(config: RunConfig, folder: Path) -> int:
    """The command that a user gives; its exit code. What it began to write is written or given up
    when this returns, as when its process ends."""
    path = folder / "given.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    code = main(["train", "--config", str(path)])
    for thread in threading.enumerate():
        if thread.name.startswith("save "):
            thread.join()
    return code


@pytest.mark.parametrize("sizes", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_a_run_whose_disk_is_full_goes_on_with_more_room(
    disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    sizes: int,
) -> None:
    """The whole run, from its first line to its report; then it is the run that had room."""
    model = save_tiny_model(tmp_path / "model")
    data = write_preferences(tmp_path / "prefs.jsonl", 60)
    whole = tiny_config(
        tmp_path / "whole", model, data, save_every=1, log__tensorboard=True,
        sft__max_steps=2, reward__max_steps=2, ppo__eval_prompts=2,
    )  # fmt: skip
    ran(whole)
    needed = sum(path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file())
    # Two of these beside the finished steps are more than fits: no size here is enough.
    actor = (tmp_path / "whole/ppo/actor/model.safetensors").stat().st_size
    most = needed + 2 * 5 * actor
    ours, run = replace(whole, output_dir=str(disk / "run")), disk / "run"
    kept: dict[str, float] = {}
    unlooked = 0
    with_checkpoints = 0
    for part in range(sizes):
        size = most * part // sizes
        remount(disk, f"size={max(16, size // KIB)}k")
        # By turns a checkpoint is what does not fit, or a finished step.
        every = 1 if part % 2 or size > needed else 0
        with monkeypatch.context() as patch:
            if part % 4 in (1, 2):  # others take the room after we looked
                patch.setattr(saver_module, "require_space", lambda *arguments: None)
                patch.setattr(saving_module, "require_space", lambda *arguments: None)
                patch.setattr(run_stages_module, "require_room", lambda *arguments: None)
                unlooked += 1
            capfd.readouterr()
            code = commanded(replace(ours, save_every=every), tmp_path)
        out, said = capfd.readouterr()
        (line,) = [line for line in said.splitlines() if line.startswith("tandem: ")]
        assert (code, "Traceback" in out + said) == (2, False), out + said
        assert re.search(r"No space left on device|must have room for ", line), line
        assert str(run) in line
        assert line.isprintable()
        assert not [p for p in disk.rglob(".*") if p.name != ".lock"], "no half-written file stays"
        now = whole_steps(run)
        assert all(now.get(stage, 0) >= step for stage, step in kept.items()), (kept, now)
        refused = re.search(r"checkpoints/(\w+)/step-(\d+)", line)
        if refused and int(refused[2]) > 1:
            assert now[refused[1]] == int(refused[2]) - 1, "the one before is intact"
        for stage, step in re.findall(r"^(\w+): continuing after step (\d+) \(check", out, re.M):
            assert kept[stage] == int(step)
        with_checkpoints += any(step < inf for step in now.values())
        kept = now
    assert kept["reward"] == inf, "there were refusals in every stage"
    assert with_checkpoints >= 1
    remount(disk, "size=64m")
    assert commanded(ours, tmp_path) == 0
    out = capfd.readouterr().out
    for stage, step in kept.items():
        how = "finished before" if step == inf else f"continuing after step {step:.0f} (checkpoint"
        assert f"{stage}: {how}" in out
    assert_equal_runs(run, tmp_path / "whole")
    record("disk full under a whole run", sizes=sizes, refused=sizes, unlooked=unlooked,
           with_checkpoints=with_checkpoints, equal=1)  # fmt: skip
