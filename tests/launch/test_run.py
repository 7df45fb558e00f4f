"""Ranks on one node: how they start, fail, hang and are stopped."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import ConfigError
from tandem.launch.flags import LaunchOptions
from tandem.launch.run import launch
from tests.launch.programs import EXCHANGES, PLAIN, Launched, is_alive, pids

TWO = LaunchOptions(num_gpus=2)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """A launch with the tests' environment and loggers as they were before."""
    for variable in ("TORCH_CPP_LOG_LEVEL", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(variable, os.environ.get(variable, "1"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    logger = logging.getLogger("torch.distributed.elastic")
    handlers, propagate = list(logger.handlers), logger.propagate
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield Launched(tmp_path)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    logger.handlers[:], logger.propagate = handlers, propagate


def test_two_ranks_exchange_on_the_loopback_alone(
    launched: Launched, capfd: pytest.CaptureFixture[str]
) -> None:
    launched.run(EXCHANGES, "well", TWO)
    assert launched.code == 0
    out, err = capfd.readouterr()
    assert "total 2, begun False" in out
    assert "listening ['0100007F']" in out
    assert err == ""
    assert len(launched.said) == 1
    assert "2 ranks here, on the CPU with gloo, OMP_NUM_THREADS 1" in launched.said[0]


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("raises", 1, "rank 1 on HOST: ValueError: boom. Log: LOG"),
        ("exits", 7, "rank 1 on HOST left with exit code 7: the last words. Log: LOG"),
        ("killed", 137, "rank 1 on HOST was killed by SIGKILL (out of memory, or by hand). Log: L"),
        ("shared", 2, "data must hold rows"),
        ("full", 2, "rows.json: No space left on device"),
    ],
)
def test_a_rank_that_fails_ends_all_with_one_line(
    launched: Launched, capfd: pytest.CaptureFixture[str], how: str, code: int, line: str
) -> None:
    launched.run(PLAIN, how, TWO)
    assert launched.code == code
    log = launched.folder / "logs" / "rank-1.log"
    expected = line.replace("HOST", socket.gethostname()).replace("LOG", str(log))
    assert launched.said[1].startswith(expected.removesuffix("L"))
    assert len(launched.said) == 2
    assert capfd.readouterr() == ("hello from 0\n", "")
    assert "hello from 1" in launched.log(1)
    if how == "raises":
        assert 'raise ValueError("boom")' in launched.log(1)
    if how not in ("shared", "full"):
        assert not any(is_alive(pid) for pid in pids(launched.folder, 2))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_are_stopped_while_python_starts_say_so(
    launched: Launched,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    popen = subprocess.Popen

    def stopped(command: list[str], **more: object) -> object:
        process: Any = popen(command, **more)  # type: ignore[call-overload]
        if "tandem.launch.worker" in command:
            process.send_signal(number)
        return process

    monkeypatch.setattr(subprocess, "Popen", stopped)
    launched.run(PLAIN, "well", TWO)
    assert launched.code == 128 + number
    assert f"stopped by {number.name}" in launched.said[-1]
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_hangs_is_named_with_the_collective_that_waited(launched: Launched) -> None:
    launched.run(EXCHANGES, "hangs", TWO)
    assert launched.code == 1
    said = launched.said[-1]
    assert said.startswith("rank 0 waited in all_reduce, called at program.py:")
    assert "(exchange) in the second exchange for rank 1, which has not responded for" in said
    assert "s and was last in program.py:" in said
    assert said.endswith(f"Log: {launched.folder}/logs/rank-0.log")
    assert "Traceback" in launched.log(0)


@pytest.mark.parametrize(
    ("number", "how", "code"),
    [
        (signal.SIGINT, "sleeps", 130),
        (signal.SIGTERM, "sleeps", 143),
        (signal.SIGTERM, "answers", 0),  # the ranks came to their end by themselves
    ],
)
def test_signals_reach_all_ranks(
    launched: Launched, number: signal.Signals, how: str, code: int
) -> None:
    def send() -> None:
        pids(launched.folder, 2)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    launched.run(PLAIN, how, TWO)
    assert launched.code == code
    assert [f"stopped by {number.name}" in line for line in launched.said[1:]] == [True] * (
        code > 0
    )
    assert not any(is_alive(pid) for pid in pids(launched.folder, 2))


def test_a_second_signal_ends_ranks_that_do_not_listen(launched: Launched) -> None:
    def send() -> None:
        ranks = pids(launched.folder, 2)
        os.kill(ranks[1], signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    started = time.monotonic()
    launched.run(PLAIN, "sleeps", TWO)
    assert launched.code == 143
    assert time.monotonic() - started < 30
    assert not any(is_alive(pid) for pid in pids(launched.folder, 2))


def test_what_cannot_be_launched_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="at most the GPUs of this machine; got 3, and there"):
            launch(["x.py"], LaunchOptions(num_gpus=3), log_folder=tmp_path, device=device)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match="there are none"):
        launch(["x.py"], TWO, log_folder=tmp_path, device="cuda")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match="--num-gpus must not be given under torchrun"):
        launch(["x.py"], TWO, log_folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_ignored_signal_stays_ignored(launched: Launched) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:

        def send() -> None:
            ranks = pids(launched.folder, 2)
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.3)
            os.kill(ranks[1], signal.SIGKILL)

        threading.Thread(target=send).start()
        launched.run(PLAIN, "sleeps", TWO)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert launched.code == 137
