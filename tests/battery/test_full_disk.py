"""Disks that are too small or read-only: one line, and what was there before is intact."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.checkpoint import saver as saver_module
from tandem.checkpoint.folder import is_whole, write_folder
from tandem.checkpoint.saver import Saver
from tandem.checkpoint.state import State, load_newest_state
from tandem.errors import CheckpointError
from tandem.models.save import save_model
from tests.battery.figures import record
from tests.models.families import tiny_model, tokenizer
from tests.tiny import save_tiny_model, tiny_config, write_preferences
from tests.training.runs import assert_equal_runs, ran

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


@pytest.mark.parametrize("sizes", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_a_run_whose_disk_is_full_goes_on_with_more_room(
    disk: Path, tmp_path: Path, sizes: int
) -> None:
    """The whole run, from its first line to its report; then it is the run that had room."""
    model = save_tiny_model(tmp_path / "model")
    data = write_preferences(tmp_path / "prefs.jsonl", 60)
    whole = tiny_config(tmp_path / "whole", model, data, save_every=1)
    ran(whole)
    ours = replace(whole, output_dir=str(disk / "run"))
    needed = sum(path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file())
    for part in range(sizes):
        remount(disk, f"size={max(16, needed * part // sizes // KIB)}k")
        # By turns a checkpoint is what does not fit, or a finished step.
        now = replace(ours, save_every=(part + 1) % 2)
        with pytest.raises(
            (CheckpointError, OSError), match=r"No space left|must have room"
        ) as full:
            ran(now)
        assert str(full.value).isprintable()
    assert not list(disk.rglob(".tmp-*"))
    remount(disk, "size=64m")
    ran(ours)
    assert_equal_runs(disk / "run", tmp_path / "whole")
    record("disk full under a whole run", sizes=sizes, refused=sizes, equal=1)
