"""Folders are whole or not there; damage is found; the newest whole state is taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tandem.checkpoint.folder import MANIFEST, is_whole, read_facts, write_folder
from tandem.checkpoint.state import State, load_newest_state, save_state
from tandem.errors import CheckpointError


def state(step: int, value: float) -> State:
    tensors = {"actor": {"weight": torch.full((3,), value)}, "optimizer": {"n": torch.tensor(step)}}
    return State(step, tensors, {"kl_coef": value})


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    save_state(tmp_path, state(7, 0.1), keep=2)
    loaded, notes = load_newest_state(tmp_path)
    assert loaded is not None
    assert (loaded.step, loaded.numbers["kl_coef"], notes) == (7, 0.1, [])
    assert torch.equal(loaded.tensors["actor"]["weight"], torch.full((3,), 0.1))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        save_state(tmp_path, state(step, 1.0), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000011"]


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "remove", "manifest", "no manifest", "empty", "list"]
)
def test_any_damage_is_found_and_the_one_before_is_taken(tmp_path: Path, damage: str) -> None:
    save_state(tmp_path, state(1, 0.5), keep=2)
    save_state(tmp_path, state(2, 0.7), keep=2)
    folder = tmp_path / "step-000002"
    file = folder / "actor.safetensors"
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))
    elif damage == "truncate":
        os.truncate(file, 10)
    elif damage == "remove":
        file.unlink()
    elif damage == "manifest":
        (folder / MANIFEST).write_text('{"files"')
    elif damage == "no manifest":
        (folder / MANIFEST).unlink()
    else:
        files = "{}" if damage == "empty" else "[1]"
        (folder / MANIFEST).write_text(f'{{"files": {files}, "facts": {{}}}}')
    loaded, notes = load_newest_state(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    assert len(notes) == 1
    assert "step-000002" in notes[0]
    assert "Falling back" in notes[0]


def test_nothing_saved_is_no_state(tmp_path: Path) -> None:
    assert load_newest_state(tmp_path / "none") == (None, [])


def test_a_failure_while_writing_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder, lambda f: (f / "a").write_text("old") and None, {"n": 1})

    def fail(aside: Path) -> None:
        (aside / "a").write_text("new")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left on device \([\d,]+ bytes free\)"):
        write_folder(folder, fail, {"n": 2})
    assert read_facts(folder) == {"n": 1}
    assert (folder / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "sft"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"which would be lost\. Move it away"):
        write_folder(folder, lambda f: None)
    assert (folder / "thesis.tex").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder, lambda f: (f / "a").write_text("1") and None)
    write_folder(folder, lambda f: (f / "b").write_text("2") and None)
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "b"]
    assert is_whole(folder)
    assert not is_whole(tmp_path)
