"""Files written tensor by tensor are safetensors files; replaced ones are old or new."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tandem import files, tensor_files
from tandem.errors import ModelError
from tandem.metrics.records import read_metrics
from tandem.models.folder import read_headers
from tandem.tensor_files import Spec, TensorFile, open_tensors

TENSORS = {
    "bytes": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(3, 5).bfloat16(),
    "turned": torch.randn(4, 6).t(),
    "count": torch.tensor(5),
    "none": torch.zeros(0, 3),
    "truth": torch.tensor([True, False, True]),
    "double": torch.randn(2, dtype=torch.float64),
}


def test_any_order_and_type_comes_back(tmp_path: Path) -> None:
    specs = {name: Spec.of(tensor) for name, tensor in TENSORS.items()}
    with TensorFile(tmp_path / "ours", specs, {"format": "pt"}) as file:
        for name in reversed(TENSORS):
            file.put(name, TENSORS[name])
    found = load_file(tmp_path / "ours")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "ours", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    save_file({n: t.contiguous() for n, t in TENSORS.items()}, tmp_path / "theirs")
    assert abs((tmp_path / "ours").stat().st_size - (tmp_path / "theirs").stat().st_size) < 64


def test_a_tensor_that_is_left_out_or_other_than_said_is_no_file(tmp_path: Path) -> None:
    specs = {"a": Spec(torch.float32, (2,))}
    file = TensorFile(tmp_path / "file", specs)
    with pytest.raises(AssertionError):
        file.put("a", torch.zeros(3))
    with pytest.raises(AssertionError), file:
        pass
    file.close()
    with pytest.raises(FileExistsError):
        TensorFile(tmp_path / "file", specs)


def test_replacing_leaves_the_old_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "latest"
    files.replace(path, b"old")

    def refuse(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", refuse)
        with pytest.raises(OSError, match="Input"):
            files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["latest"]
    files.replace(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_lock_is_held_against_other_processes_until_this_one_ends(tmp_path: Path) -> None:
    command = (
        "import pathlib, sys, time; from tandem.files import lock; "
        "held = lock(pathlib.Path(sys.argv[1])); print(held is not None, flush=True); "
        "time.sleep(60)"
    )
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", command, str(path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert files.lock(path) is None
        other.kill()
    held = files.lock(path)
    assert held is not None
    held.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has a disk that is full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as full:
        files.append(path, b"a line\n")
    assert full.value.filename == str(path)


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    """A process that runs, and a name of another kind, are left alone."""
    killed = """
import os, signal, sys
from pathlib import Path
from tandem import files
files.os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
files.replace(Path(sys.argv[1]), b"new")
"""
    path = tmp_path / "data.json"
    path.write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", killed, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".data.json.*"))) == 1
    others = [f".report.html.{os.getpid()}", ".lock", ".notes.2024x", f".huge.json.{10**30}"]
    others.append(f".env.{2**31 - 2}")  # of no process that can be, but no file of a run's
    for name in others:
        (tmp_path / name).touch()
    files.remove_left(tmp_path, (".json", ".html"))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, "data.json"])
    assert path.read_bytes() == b"old"


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system does not name it: a disk that fails, a file system that has gone."""

    def fails(path: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "metrics.jsonl"
    path.touch()
    monkeypatch.setattr(Path, "read_bytes", fails)
    for read in (files.read, read_metrics_file):
        with pytest.raises(OSError, match="Input/output error") as raised:
            read(path)
        assert raised.value.filename == str(path)


def read_metrics_file(path: Path) -> object:
    return read_metrics(path.parent)


def test_a_file_that_torch_cannot_open_is_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch opens the file once more, and raises errors of its own."""
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")

    def fails(path: Path, framework: str) -> object:
        raise RuntimeError(f"unable to open file <{path}> in read-only mode: Too many open files")

    monkeypatch.setattr(tensor_files, "safe_open", fails)
    with pytest.raises(OSError, match="Too many open files") as raised:
        open_tensors(tmp_path / "model.safetensors")
    assert raised.value.filename == str(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"safetensors files; got: .*Too many open files"):
        read_headers(tmp_path)


def test_a_run_of_another_node_is_told_from_no_run(tmp_path: Path) -> None:
    assert "(with config.yaml); it is not." in files.not_a_run(str(tmp_path))
    (tmp_path / "command.txt").touch()
    assert "the folder of the run's first node has it" in files.not_a_run(str(tmp_path))
