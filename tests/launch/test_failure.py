"""How a rank leaves word of its failure, and how one without a launcher says it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.errors import DataError, RankError, Stopped
from tandem.launch.failure import (
    Reports,
    complain,
    kind_of,
    leave_failure,
    place_of,
    raising_stops,
)
from tandem.process import is_launched


@pytest.fixture
def reports() -> Iterator[Reports]:
    """A launcher's pipe, with the rank's end open."""
    made = Reports()
    yield made
    os.close(made.write_end)
    made.close()


def test_a_launched_rank_tells_its_failure_and_leaves_its_traceback(
    reports: Reports,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("TANDEM_FAILURE_PIPE", str(reports.write_end))
    monkeypatch.setenv("TANDEM_LOG_FILE", str(log))
    monkeypatch.setenv("TANDEM_LAUNCHER", str(os.getppid()))
    assert reports.newest() is None
    assert complain("x must hold", 2, DataError("x must hold")) == 2
    os.write(reports.write_end, b'{"kind": "crash", "line')  # it is killed within another report
    reports.close()
    failure = reports.newest()
    assert failure is not None
    assert (failure.kind, failure.line, failure.code) == ("error", "x must hold", 2)
    assert "DataError: x must hold" in log.read_text()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TANDEM_LAUNCHER", "1234567")  # a process that a rank started
    assert not is_launched()


def test_a_stop_within_an_import_ends_the_process_with_the_line(tmp_path: Path) -> None:
    """Which would make an ImportError of it, as C extensions do."""
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
        "except BaseException as error:\n"
        "    raise ImportError('initialization failed') from error\n"
    )
    code = (
        "from tandem.launch.failure import raising_stops\n"
        "with raising_stops('The same command starts over.'):\n"
        "    import slow\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    line = "tandem: stopped by SIGTERM before it was done. The same command starts over.\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "", line)


def test_a_stop_within_a_finalizer_comes_after_it() -> None:
    """Where Python prints an exception, and goes on."""

    class Last:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):  # a handler runs between two of Python's instructions
                pass
            finalized.append(True)

    def finalize() -> None:
        Last()
        time.sleep(60)

    finalized: list[bool] = []
    with raising_stops(""), pytest.raises(Stopped):
        finalize()
    assert finalized == [True]


def test_without_a_launcher_the_line_is_printed_with_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complain("x must hold", 2) == 2
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert complain("x must hold", 130) == 130
    said = "tandem: x must hold\ntandem: rank 3 of 4: x must hold\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DataError("x"), "error"),
        (PermissionError("x"), "error"),
        (ConnectionResetError("x"), "crash"),
        (ValueError("x"), "crash"),
        (RankError("x"), "lost"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_kinds_of_failure(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


def test_a_full_disk_under_the_log_hides_no_failure(
    reports: Reports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    monkeypatch.setenv("TANDEM_FAILURE_PIPE", str(reports.write_end))
    monkeypatch.setenv("TANDEM_LOG_FILE", str(tmp_path / "log"))
    leave_failure("error", "disk full", 2, OSError("x" * 100_000))
    failure = reports.newest()
    assert failure is not None
    assert failure.line == "disk full"


def test_what_an_error_of_the_system_is_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what has no name, a working folder that was removed is told from the rest."""
    assert place_of(FileNotFoundError(2, "No such file or directory", "rows.jsonl")) == "rows.jsonl"
    assert place_of(FileNotFoundError(2, "No such file or directory")) == "a file"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert place_of(FileNotFoundError(2, "No such file or directory")) == "the working folder"
