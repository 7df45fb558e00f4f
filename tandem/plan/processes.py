"""One case's processes: started, watched for peak memory, and stopped with this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tandem.process import die_with_parent
from tandem.stopping import deferring

_MARK = "TANDEM_SWEEP_CASE"
_POLL_SECONDS, _SCAN_SECONDS = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a case's processes ended.

    exit_code: the command's; negative for a signal. seconds: wall time.
    peak_bytes: peak resident memory by rank; empty if it cannot be read.
    error: what went wrong, in one line; empty on success.
    """

    exit_code: int
    seconds: float
    peak_bytes: dict[int, int]
    error: str


def run_command(arguments: Sequence[str], log: Path, held: BinaryIO | None = None) -> Ended:
    """Run `tandem` with these arguments to its end, with its output in `log`.

    What stops this process stops it, once it has saved its step.

    Args:
        held: a lock that is also the command's, until that ends (`files.lock`).
    """
    mark = uuid.uuid4().hex
    start = time.monotonic()
    with log.open("wb") as file:
        process: subprocess.Popen[bytes] | None = None
        try:
            with deferring():  # until it is known which process a signal is to stop
                process = subprocess.Popen(
                    [sys.executable, "-m", "tandem", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, _MARK: mark},
                    pass_fds=() if held is None else (held.fileno(),),
                    preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
                )
            with PeakWatch(f"{_MARK}={mark}", process.pid) as watch:
                code = process.wait()
        except BaseException:
            if process is not None:
                stop(process)
            raise
    error = "" if code == 0 else error_line(log, code)
    return Ended(code, time.monotonic() - start, watch.peaks, error)


def error_line(log: Path, code: int) -> str:
    """A failed command's last line: Tandem's own error if there is one."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    ours = [line.removeprefix("tandem: ") for line in lines if line.startswith("tandem: ")]
    said = ours[-1:] or lines[-1:]
    if code < 0:
        return f"ended by {_signal_name(-code)}" + (f"; last: {said[0]}" if said else "")
    return said[0] if said else f"exit code {code}, without output"


class PeakWatch:
    """Records the peak resident memory of a command's ranks while they run (on Linux only).

    A run resets its own peak in each phase, so it is polled and the largest value kept.
    """

    def __init__(self, mark: str, main: int) -> None:
        """
        Args:
            mark: NAME=VALUE in the environment of the ranks and of no other process.
            main: the only rank if no process has a rank number.
        """
        self.peaks: dict[int, int] = {}
        self._mark, self._main = mark.encode(), main
        self._ranks: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakWatch:
        if sys.platform == "linux":
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if len(self.peaks) > 1:
            self.peaks.pop(-1, None)  # the launcher, which is not a rank
        self.peaks = {max(rank, 0): peak for rank, peak in sorted(self.peaks.items())}

    def _watch(self) -> None:
        scanned = 0.0
        while not self._over.wait(_POLL_SECONDS):
            if time.monotonic() - scanned > _SCAN_SECONDS:
                self._ranks = self._marked()
                scanned = time.monotonic()
            for process, rank in self._ranks.items():
                self.peaks[rank] = max(self.peaks.get(rank, 0), resident_peak(process))

    def _marked(self) -> dict[int, int]:
        """Process to rank of every process of the command that has one; -1 for the command's
        own."""
        found: dict[int, int] = {self._main: -1}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                words = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # another user's, or gone
                continue
            rank = next((word[5:] for word in words if word.startswith(b"RANK=")), None)
            if self._mark in words and rank is not None:
                found[int(folder.name)] = int(rank)
        return found


def resident_peak(process: int) -> int:
    """A process's VmHWM in bytes; 0 once it is gone."""
    try:
        text = Path(f"/proc/{process}/status").read_text("ascii", "replace")
    except OSError:
        return 0
    lines = (line for line in text.splitlines() if line.startswith("VmHWM:"))
    return next((int(line.split()[1]) * 1024 for line in lines), 0)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate; kill after 20 seconds, or when this process is asked to stop once more."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=20)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
