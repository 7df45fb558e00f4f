"""Hostile model folders: refused in one line or contained; no code runs, memory stays small.

Each is loaded in a process of its own, with the address space limited and every attempt to run
code, to start a process or to reach the network written down by an audit hook.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import sys
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tandem.data.render import Renderer
from tandem.errors import TandemError
from tandem.models.eos import load_stop_ids
from tandem.models.load import check_vocabulary, load_causal_lm, load_tokenizer
from tandem.models.scalar import load_scalar_model
from tests.battery.hostile_models import CANARY, CONTAINED, REFUSED
from tests.tiny import save_tiny_model

_ROOM_BYTES = 4 * 2**30
_MOST_GROWTH_BYTES = 400 * 2**20
_MOST_SECONDS = 120.0
_FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class",
              "socket.connect", "socket.getaddrinfo", "marshal.load")  # fmt: skip


@dataclass
class Outcome:
    """What loading one folder came to; `error` is the message, `crash` any other exception."""

    error: str = ""
    crash: str = ""
    growth_bytes: int = 0
    acts: list[str] = field(default_factory=list)


def _load_policy(folder: str) -> None:
    tokenizer = load_tokenizer(folder)
    Renderer(tokenizer, load_stop_ids(folder))
    check_vocabulary(load_causal_lm(folder), tokenizer)


def _load_scalar(folder: str) -> None:
    load_scalar_model(folder, seed=0)


_LOADERS = {"policy": _load_policy, "scalar": _load_scalar}


def _child(folder: str, loader: str, answer: Connection) -> None:
    outcome = Outcome()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        starts = event in ("subprocess.Popen", "os.posix_spawn")  # by both from Python 3.13 on
        tries_template = starts and "try_template" in str(arguments)
        if event in _FORBIDDEN and not tries_template:
            outcome.acts.append(f"{event} {arguments!r:.200}")

    sys.addaudithook(watch)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        _LOADERS[loader](folder)
    except TandemError as error:
        outcome.error = str(error)
    except BaseException as error:
        outcome.crash = f"{type(error).__name__}: {error}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    outcome.growth_bytes = 1024 * grown
    answer.send(outcome)


def load_apart(folder: Path, loader: str) -> Outcome:
    """Load `folder` in a forked process; fails where that hangs or dies."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(str(folder), loader, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(_MOST_SECONDS), f"{folder} ({loader}) hangs"
        return ours.recv()
    finally:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny_model(tmp_path_factory.mktemp("good") / "model"))


@pytest.fixture
def hostile(
    request: pytest.FixtureRequest, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A copy of the good folder, spoilt by the function that the parameter names."""
    monkeypatch.setenv(CANARY, str(tmp_path / "canary"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    ({**REFUSED, **CONTAINED})[request.param](folder)
    return folder


def _assert_contained(outcome: Outcome, folder: Path, files: set[str]) -> None:
    assert not outcome.crash, outcome.crash
    assert not outcome.acts
    assert outcome.error.isprintable(), f"not one printable line: {outcome.error!r}"
    assert outcome.growth_bytes < _MOST_GROWTH_BYTES
    assert not os.path.exists(os.environ[CANARY])
    assert {path.name for path in folder.parent.iterdir()} == files


_SHORT = {
    "pickled weights", "an index into a pickle", "an index out of the folder", "remote code",
    "a billion layers", "a vocabulary of 2^24", "weights that are NaN", "weights of integers",
    "attention from the hub", "a tokenizer of code", "a template that divides by zero",
    "stop tokens that are text", "offsets that overlap", "quantized by an unknown method",
}  # fmt: skip


@pytest.mark.parametrize(
    "hostile",
    [name if name in _SHORT else pytest.param(name, marks=pytest.mark.slow) for name in REFUSED],
    indirect=True,
)
def test_a_hostile_model_is_refused_in_one_line(hostile: Path) -> None:
    files = {path.name for path in hostile.parent.iterdir()}
    outcome = load_apart(hostile, "policy")
    _assert_contained(outcome, hostile, files)
    assert outcome.error, "it was loaded"
    assert " must " in outcome.error
    assert "; got" in outcome.error
    assert len(outcome.error) < 900
    _assert_contained(load_apart(hostile, "scalar"), hostile, files)


@pytest.mark.parametrize("hostile", CONTAINED, indirect=True)
def test_a_hostile_part_that_nothing_reads_does_nothing(hostile: Path) -> None:
    files = {path.name for path in hostile.parent.iterdir()}
    for loader in _LOADERS:
        outcome = load_apart(hostile, loader)
        _assert_contained(outcome, hostile, files)
        assert not outcome.error


def test_enough_of_them() -> None:
    assert len(REFUSED) + len(CONTAINED) >= 30
    assert set(REFUSED) >= _SHORT
