"""Folders are whole or not there; damage is found; the newest whole state is taken."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.checkpoint import shard_files as checkpoint_pieces
from tandem.checkpoint.folder import (
    MANIFEST,
    read_facts,
    read_manifest,
    require_space,
    together,
    write_folder,
)
from tandem.checkpoint.saver import Saver
from tandem.checkpoint.state import (
    LATEST,
    State,
    load_newest_state,
    load_state_before,
    load_state_of,
    newest_numbers,
    number_of,
    numbered,
)
from tandem.errors import CheckpointError, NumericsError
from tandem.files import sync
from tandem.parallel.world import World
from tests.whole import is_whole


def state(step: int, value: float) -> State:
    tensors = {
        "actor": {"weight": torch.full((3,), value), "half": torch.ones(2, 3).bfloat16()},
        "optimizer": {"n": torch.tensor(step), "empty": torch.zeros(0, 4)},
    }
    return State(step, tensors, {"kl_coef": value})


def save(folder: Path, *states: State, keep: int = 2) -> None:
    saver = Saver(folder, keep=keep)
    for one in states:
        saver.save(one, {"made_from": "knobs"})
    saver.wait()


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, state(7, 0.1))
    loaded, notes = load_newest_state(tmp_path)
    assert loaded is not None
    assert (loaded.step, loaded.numbers["kl_coef"], notes) == (7, 0.1, [])
    for part, tensors in state(7, 0.1).tensors.items():
        assert set(loaded.tensors[part]) == set(tensors)
        for name, tensor in tensors.items():
            found = loaded.tensors[part][name].whole()
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
    facts = read_facts(tmp_path / "step-000007")
    assert facts["made_from"] == "knobs"
    assert newest_numbers(tmp_path) == {"kl_coef": 0.1}


def test_only_the_newest_are_kept_and_latest_names_the_last(tmp_path: Path) -> None:
    save(tmp_path, *(state(step, 1.0) for step in (9, 10, 11)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        LATEST, "step-000010", "step-000011",
    ]  # fmt: skip
    assert json.loads((tmp_path / LATEST).read_text())["folder"] == "step-000011"


def test_the_best_that_a_kept_state_names_is_kept_too(tmp_path: Path) -> None:
    """Also that of the one before the newest, which is taken if the newest is damaged."""
    steps = {0: 0, 2: 2, 4: 2, 6: 2, 8: 8}
    kept = {}
    for step, best in steps.items():
        save(tmp_path, replace(state(step, 1.0), best=best))
        kept[step] = [number_of(path) for path in numbered(tmp_path)]
    assert kept == {0: [0], 2: [0, 2], 4: [2, 4], 6: [2, 4, 6], 8: [2, 6, 8]}
    assert load_state_of(tmp_path, 2).step == 2
    file = tmp_path / "step-000002/actor.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"step-000002/actor\.safetensors must have"):
        load_state_of(tmp_path, 2)
    assert file.exists(), "not put aside: a copy may be brought back"
    with pytest.raises(CheckpointError, match="step-000004 must be there; got no such checkpoint"):
        load_state_of(tmp_path, 4)


def test_a_state_before_the_first_step_is_not_continued_from(tmp_path: Path) -> None:
    save(tmp_path, replace(state(0, 1.0), best=0))
    assert load_newest_state(tmp_path) == (None, [])
    assert load_state_before(tmp_path, 5)[0] is None
    assert newest_numbers(tmp_path) is None
    assert load_state_of(tmp_path, 0).step == 0


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "remove", "manifest", "no manifest", "empty", "list", "step"]
)
def test_any_damage_is_found_and_the_one_before_is_taken(tmp_path: Path, damage: str) -> None:
    save(tmp_path, state(1, 0.5), state(2, 0.7))
    folder = tmp_path / "step-000002"
    file, manifest = folder / "actor.safetensors", folder / MANIFEST
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))
    elif damage == "truncate":
        os.truncate(file, 10)
    elif damage == "remove":
        file.unlink()
    elif damage == "manifest":
        manifest.write_text('{"files"')
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "step":
        manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    else:
        said = "{}" if damage == "empty" else "[1]"
        manifest.write_text(f'{{"files": {said}, "facts": {{}}}}')
    loaded, notes = load_newest_state(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    assert "step-000002" in notes[-1]
    assert "Falling back to the checkpoint before it." in notes[-1]
    assert all("\n" not in note for note in notes)
    assert (tmp_path / "damaged-step-000002-0").is_dir(), "kept, but not tried again"
    save(tmp_path, state(2, 0.9))
    loaded, notes = load_newest_state(tmp_path)
    assert loaded is not None
    assert (loaded.step, notes) == (2, [])


def test_every_bit_of_the_manifest_and_the_pointer_counts(tmp_path: Path) -> None:
    save(tmp_path, state(1, 0.5))
    for path in (tmp_path / "step-000001" / MANIFEST, tmp_path / LATEST):
        sound = path.read_bytes()
        for bit in range(0, 8 * len(sound), 7):
            data = bytearray(sound)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bytes(data))
            if path.name == LATEST:
                loaded, notes = load_newest_state(tmp_path)
                assert loaded is not None
                assert len(notes) == 1, bit
            else:
                with pytest.raises(CheckpointError):
                    read_manifest(path.parent)
        path.write_bytes(sound)


def test_a_checkpoint_that_is_gone_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, state(1, 0.5), state(2, 0.5))
    (tmp_path / "step-000002").rename(tmp_path / "elsewhere")
    loaded, notes = load_newest_state(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    assert "step-000002 must be there, for latest names it" in notes[0]


def test_nothing_whole_says_that_it_starts_anew(tmp_path: Path) -> None:
    assert load_newest_state(tmp_path / "none") == (None, [])
    save(tmp_path, state(1, 0.5))
    (tmp_path / "step-000001" / "actor.safetensors").write_bytes(b"")
    loaded, notes = load_newest_state(tmp_path)
    assert loaded is None
    assert notes[-1].endswith("There is none before it: starting from the beginning.")


def test_what_changes_after_the_call_is_not_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    write = checkpoint_pieces.write_pieces

    def late(*arguments: object) -> list[str]:
        go_on.wait(10)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("tandem.checkpoint.saver.write_pieces", late)
    now = state(1, 0.5)
    saver = Saver(tmp_path, keep=2)
    saver.save(now)
    assert not (tmp_path / "step-000001").exists(), "the training does not wait"
    now.tensors["actor"]["weight"].fill_(9.0)
    go_on.set()
    saver.wait()
    loaded, _ = load_newest_state(tmp_path)
    assert loaded is not None
    assert torch.equal(loaded.tensors["actor"]["weight"].whole(), torch.full((3,), 0.5))


def test_who_leaves_the_folder_finishes_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next process finds one growing; what fails then is nobody's any more."""

    def slow(*arguments: object) -> list[str]:
        time.sleep(0.2)
        return write(*arguments)  # type: ignore[arg-type]

    write = checkpoint_pieces.write_pieces
    monkeypatch.setattr("tandem.checkpoint.saver.write_pieces", slow)
    saver = Saver(tmp_path, keep=2)
    saver.save(state(1, 0.5))
    saver.leave()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step-000001"]
    monkeypatch.setattr("tandem.checkpoint.saver.write_pieces", lambda *arguments: 1 / 0)
    saver.save(state(2, 0.5))
    saver.leave()
    saver.leave()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step-000001"]


def save_twice(saver: Saver) -> None:
    saver.save(state(2, 0.5))
    saver.save(state(3, 0.5))


@pytest.mark.parametrize("beside", [True, False])
def test_what_the_disk_refused_is_said_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    save(tmp_path, state(1, 0.5))

    def refuse(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    saver = Saver(tmp_path, keep=2, beside=beside)
    with monkeypatch.context() as patch:
        patch.setattr("tandem.checkpoint.saver.write_pieces", refuse)
        with pytest.raises(CheckpointError, match=r"got: Input/output error \([\d,]+ bytes free"):
            save_twice(saver)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step-000001"]
    saver.save(state(3, 0.5))
    saver.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == [LATEST, "step-000001", "step-000003"]


def test_too_little_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(
        CheckpointError, match=r"must have room for [\d,]+ bytes; got 1,000 bytes free"
    ):
        save(tmp_path, state(1, 0.5))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_value_that_is_not_finite_is_ever_saved(tmp_path: Path, value: float) -> None:
    with pytest.raises(NumericsError, match="others in actor/weight after step 3, which was not"):
        save(tmp_path, state(3, value))
    assert list(tmp_path.iterdir()) == []


def test_what_grows_beside_is_on_the_disk_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text("{}\n")
    synced: list[str] = []

    def noting(path: Path) -> None:
        synced.append(path.name)
        sync(path)

    monkeypatch.setattr("tandem.checkpoint.saver.sync", noting)
    monkeypatch.setattr("tandem.checkpoint.folder.sync", noting)
    saver = Saver(tmp_path / "checkpoints", keep=2)
    saver.save(state(1, 0.5), synced=[log, tmp_path / "missing"])
    saver.wait()
    assert synced.index(log.name) < synced.index(MANIFEST)


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "Free some space"), (errno.EDQUOT, "Free some space"),
     (errno.EACCES, "Make it writable"), (errno.EROFS, "Make it writable")],
)  # fmt: skip
def test_a_failure_while_writing_leaves_what_was_there(
    tmp_path: Path, code: int, advice: str
) -> None:
    folder = tmp_path / "model"
    write_folder(folder, lambda f: (f / "a").write_text("old") and None, {"n": 1})

    def fail(aside: Path) -> None:
        (aside / "a").write_text("new")
        raise OSError(code, os.strerror(code))

    says = rf"got: {os.strerror(code)} \([\d,]+ bytes free\). {advice} or choose another --output"
    with pytest.raises(CheckpointError, match=says):
        write_folder(folder, fail, {"n": 2})
    assert read_facts(folder) == {"n": 1}
    assert (folder / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_a_disk_that_refuses_a_model_names_the_folder_that_the_user_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Not the one beside it in which it is made."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))

    def write(aside: Path) -> None:
        require_space(aside / "actor", 1000, World())
        together(refuse, aside / "actor", World())

    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError) as told:
        write_folder(tmp_path / "sft", write)
    cause = "be writable; got: No space left on device (1,073,741,824 bytes free)"
    if free == 0:
        cause = "have room for 1,000 bytes; got 0 bytes free"
    advice = "Free some space or choose another --output-dir; what was saved before is intact."
    assert str(told.value) == f"{tmp_path / 'sft' / 'actor'} must {cause}. {advice}"


def test_what_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "sft"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"which would be lost\. Move it away"):
        write_folder(folder, lambda f: None)
    assert (folder / "thesis.tex").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]


@pytest.mark.parametrize("name", ["ppo", "ppo[1]", "*"])
def test_only_what_was_begun_of_the_same_folder_is_removed(tmp_path: Path, name: str) -> None:
    """`tandem export --output models/ppo` beside one into models/ppo-2."""
    own = [tmp_path / f".tmp-{name}-{rest}" for rest in ("17", "replaced-17")]
    others = [tmp_path / f".tmp-{other}-18" for other in ("ppo-2", "ppo1", "ppo-2-replaced", "p")]
    for folder in (*own, *others):
        folder.mkdir()
    write_folder(tmp_path / name, lambda aside: (aside / "a").touch())
    assert {path.name for path in tmp_path.iterdir()} == {name, *(path.name for path in others)}


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder, lambda f: (f / "a").write_text("1") and None)
    write_folder(folder, lambda f: (f / "b").write_text("2") and None)
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "b"]
    assert is_whole(folder)
    assert not is_whole(tmp_path)
