"""What every bench test needs: torch's threads and transformers' log level as they were, for
commands set them."""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.utils import logging as hf_logging

from bench import generation, harness, limits, serve, step3
from tandem import cli


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    level = hf_logging.get_verbosity()
    yield
    hf_logging.set_verbosity(level)


@cache
def _rate(dtype: str) -> float:
    return limits.gemm_rate(dtype, repeats=1)


@pytest.fixture(autouse=True)
def _rate_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's best rate, which takes seconds: only its place in a table is looked at."""
    for bench in (generation, step3):
        monkeypatch.setattr(bench, "gemm_rate", _rate)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of the harness are forks: where what they hold does not matter, which is what a new
    interpreter's many seconds are for."""
    get_context = multiprocessing.get_context
    monkeypatch.setattr(harness.multiprocessing, "get_context", lambda _: get_context("fork"))


class _Command:
    """`subprocess.Popen` of `python -m tandem`, as a fork."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], **_: Any) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=_run, args=(words,))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        self._process.join()


def _run(words: Sequence[str]) -> None:
    assert list(words[1:3]) == ["-m", "tandem"]
    cli.main(list(words[3:]))


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of `bench.serve` are forks, which have imported what they need."""
    ours = SimpleNamespace(**{**vars(subprocess), "Popen": _Command})
    monkeypatch.setattr(serve, "subprocess", ours)
