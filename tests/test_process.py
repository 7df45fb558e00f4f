"""A process's memory as systems tell it; limits, which not every system takes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tandem import process

Limits = dict[int, tuple[int, int]]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """The limits that a process has; it takes others as long as they are within them."""
    now = {resource.RLIMIT_CPU: (resource.RLIM_INFINITY,) * 2, resource.RLIMIT_CORE: (50, 100)}

    def setrlimit(kind: int, wanted: tuple[int, int]) -> None:
        soft, hard = wanted
        if kind not in now or soft > hard or hard > now[kind][1] >= 0:
            raise ValueError("current limit exceeds maximum limit")
        now[kind] = wanted

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: now.get(kind, (-1, -1)))
    return now


def test_a_limit_is_lowered_and_never_past_what_is_allowed(held: Limits) -> None:
    process.lower_limit(resource.RLIMIT_CPU, 10, 11)
    process.lower_limit(resource.RLIMIT_CORE, 400)
    assert held == {resource.RLIMIT_CPU: (10, 11), resource.RLIMIT_CORE: (50, 100)}
    process.lower_limit(resource.RLIMIT_CORE, 0)
    assert held[resource.RLIMIT_CORE] == (0, 0)


def test_a_soft_limit_stays_below_the_hard_one_and_is_never_raised(held: Limits) -> None:
    held[resource.RLIMIT_CPU] = (-1, 8)
    process.lower_limit(resource.RLIMIT_CPU, 10, 11)
    assert held[resource.RLIMIT_CPU] == (7, 8), "the soft one tells what ended the process"
    held[resource.RLIMIT_CPU] = (3, -1)
    process.lower_limit(resource.RLIMIT_CPU, 10, 11)
    assert held[resource.RLIMIT_CPU] == (3, 11)


def test_a_system_that_takes_no_limit_on_memory_is_left_alone(held: Limits) -> None:
    process.lower_limit(resource.RLIMIT_AS, 2**30)
    assert resource.RLIMIT_AS not in held


def test_where_linux_tells_no_memory_ps_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=answers.pop(0))

    answers = ["  2048\n", "", "not a number"]
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(process, "_STATM", tmp_path / "statm")
    assert [process.resident_bytes() for _ in range(3)] == [2 * 2**20, 0, 0]
    assert asked[0] == ["ps", "-o", "rss=", "-p", str(os.getpid())]
    (tmp_path / "statm").write_text("900 300 100 0 0 0 0")
    assert process.resident_bytes() == 300 * os.sysconf("SC_PAGE_SIZE")


def test_a_forked_process_does_its_work_and_ends_even_if_that_raises(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "done").write_text(str(os.getppid()))
        raise ValueError("not to be seen by the code that forked")

    child = process.fork(work)
    assert os.waitpid(child, 0) == (child, 0)
    assert (tmp_path / "done").read_text() == str(os.getpid())


def test_a_forked_process_is_stopped_whatever_this_one_does_with_signals() -> None:
    """Its parent ignores Ctrl-C and holds it back here; the child must not inherit either."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        reading, writing = os.pipe()
        child = process.fork(lambda: (os.write(writing, b"."), time.sleep(60)))
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        os.read(reading, 1)
        os.kill(child, signal.SIGINT)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(reading)
        os.close(writing)
