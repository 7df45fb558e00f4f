"""Processes of a case: how they end, what they said, how much they held."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import Stopped
from tandem.files import lock
from tandem.launch.failure import raising_stops
from tandem.plan.processes import PeakWatch, error_line, resident_peak, run_command, stop

_HOLD = "import time; held = bytearray({size}); held[::4096] = b'x' * len(held[::4096]); "
_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_command_that_ends_well(tmp_path: Path) -> None:
    ended = run_command(["--version"], tmp_path / "log.txt")
    assert (ended.exit_code, ended.error) == (0, "")
    assert (tmp_path / "log.txt").read_text().startswith("tandem ")
    assert 0 < ended.seconds < 60


def test_a_command_that_fails_is_known_by_its_own_line(tmp_path: Path) -> None:
    ended = run_command(["tran"], tmp_path / "log.txt")
    assert ended.exit_code == 2
    assert ended.error == "'tran' is not a command. Did you mean train?"


def test_a_command_has_the_lock_that_it_is_given(tmp_path: Path) -> None:
    """A stand-in for `tandem` would not show that: another process asks while it runs."""
    held = lock(tmp_path / "lock", inherited=True)
    assert held is not None
    found: list[bool] = []

    def asks() -> None:
        while not (tmp_path / "demo" / "command.txt").exists():
            time.sleep(0.01)
        held.close()
        again = lock(tmp_path / "lock", inherited=True)
        found.append(again is None)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=asks)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_command(["demo", "--output-dir", str(tmp_path / "demo")], tmp_path / "log", held)
    thread.join()
    assert found == [True]
    free = lock(tmp_path / "lock", inherited=True)
    assert free is not None
    free.close()


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("step 1\ntandem: data must be.\nTraceback\n", 2, "data must be."),
        ("one\n\nValueError: two\n", 1, "ValueError: two"),
        ("", 3, "exit code 3, without output"),
        ("begins\n", -9, "ended by SIGKILL; last: begins"),
        ("", -200, "ended by signal 200"),
    ],
)
def test_the_line_of_an_error(tmp_path: Path, text: str, code: int, line: str) -> None:
    (tmp_path / "log.txt").write_text(text)
    assert error_line(tmp_path / "log.txt", code) == line


@_linux
def test_the_peak_of_every_rank_is_seen_and_the_launcher_skipped() -> None:
    sizes = {0: 40 * 2**20, 1: 80 * 2**20}
    main = subprocess.Popen([sys.executable, "-c", _HOLD.format(size=2**28) + "time.sleep(60)"])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _HOLD.format(size=size) + "time.sleep(60)"],
            env={**os.environ, "SWEEP_MARK": "this", "RANK": str(rank)},
        )
        for rank, size in sizes.items()
    ]
    watch = PeakWatch("SWEEP_MARK=this", main.pid)
    with watch:
        until = time.monotonic() + 20
        while time.monotonic() < until and any(
            watch.peaks.get(rank, 0) < size for rank, size in sizes.items()
        ):
            time.sleep(0.05)
    for process in (main, *ranks):
        process.kill()
        process.wait()
    assert watch.peaks.keys() == {0, 1}
    for rank, size in sizes.items():
        assert size < watch.peaks[rank] < size + 30 * 2**20
    assert resident_peak(main.pid) == 0  # gone


@_linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_stops_the_command(tmp_path: Path, number: int) -> None:
    """The command would run for minutes; Ctrl-C or SIGTERM comes while it does."""
    log = tmp_path / "log.txt"
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), number))
    timer.start()
    start = time.monotonic()
    with raising_stops(""), pytest.raises((KeyboardInterrupt, Stopped)):
        run_command(["demo", "--output-dir", str(tmp_path / "demo")], log)
    assert time.monotonic() - start < 30
    assert not any(str(tmp_path).encode() in line for line in _command_lines())


def test_a_stop_while_the_command_starts_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is there, and not yet known by its number."""
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    over = threading.Event()
    another = threading.Thread(target=over.wait)  # which the system may give a signal to
    another.start()
    with raising_stops(""), pytest.raises(Stopped):
        run_command(["demo", "--output-dir", str(tmp_path / "demo")], tmp_path / "log")
    over.set()
    another.join()
    (process,) = started
    assert process.returncode is not None


def test_a_second_interruption_does_not_wait_for_the_command() -> None:
    """One that does not end at SIGTERM, which it says that it ignores."""
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ready', flush=True); time.sleep(600)"
    )
    deaf = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with deaf:
        assert deaf.stdout is not None
        assert deaf.stdout.readline() == b"ready\n"
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            stop(deaf)
        assert deaf.returncode == -signal.SIGKILL


def _command_lines() -> list[bytes]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and folder.name != str(os.getpid()):
            try:
                found.append((folder / "cmdline").read_bytes())
            except OSError:
                continue
    return found
