"""What every bench test needs: torch's threads as they were, for commands set them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from bench import generation, harness, limits, step3


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


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
