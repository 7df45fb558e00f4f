"""What every figure is published with: CPU seconds, processor, versions, commit."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from tandem.errors import Stopped, TandemError
from tandem.ops.native import available


def cpu_seconds() -> float:
    """CPU seconds of this process and all its children, living and ended."""
    used = os.times()
    alive = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
            alive += times.user + times.system
        except psutil.Error:  # it has just ended, and is counted as such once it is waited for
            continue
    return used.user + used.system + used.children_user + used.children_system + alive


def setup() -> dict[str, Any]:
    """Processor, threads, versions and commit."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
    }


def processor() -> str:
    """As the kernel names it, with family and model, which tell generations of one name apart."""
    facts: dict[str, str] = {}
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    family, model = facts.get("cpu family", "?"), facts.get("model", "?")
    return f"{facts.get('model name', platform.machine())} (family {family}, model {model})"


def commit() -> str:
    """The short commit of this checkout, with `+` if files differ from it."""
    here = Path(__file__).parent
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip() or "unknown"


class Budget:
    """CPU seconds of a run over all its sessions; at the limit SIGTERM asks the run to stop.

    The seconds are kept in a file, so that a run that was killed goes on where it was. A second one
    beside it, `cpu.jsonl`, has them by the clock, so that a step of the run's log can be placed.
    Building the C++ operations, once for a machine, is not counted.
    """

    def __init__(self, file: Path, minutes: float) -> None:
        self.file = file
        self.limit = minutes * 60
        self.before = json.loads(file.read_text())["cpu_seconds"] if file.exists() else 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def spent(self) -> float:
        """CPU seconds so far, of this and earlier sessions."""
        return self.before + cpu_seconds()

    def start(self) -> None:
        """Begin to watch."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        before = cpu_seconds()
        available()
        self.before -= cpu_seconds() - before
        self._thread.start()

    def end(self) -> float:
        """Stop watching; the CPU seconds spent in all."""
        self._ended.set()
        self._thread.join()
        return self._write()

    def _write(self) -> float:
        spent = self.spent
        beside = self.file.with_suffix(".tmp")
        beside.write_text(json.dumps({"cpu_seconds": round(spent, 1), "limit": self.limit}))
        os.replace(beside, self.file)
        append_line(self.file.with_name("cpu.jsonl"), {"time": time.time(), "cpu_seconds": spent})
        return spent

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            if self._write() > self.limit:
                os.kill(os.getpid(), signal.SIGTERM)
                return


def append_line(file: Path, record: dict[str, Any]) -> None:
    """One JSON line at the end of a file, in one write: a kill leaves no half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab", buffering=0) as lines:
        lines.write((json.dumps(record) + "\n").encode())


def command(main: Callable[[], None]) -> None:
    """Run a script's main; what its user can do something about is one line and an exit code."""
    try:
        main()
    except TandemError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        told = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(told.partition("\n")[0], file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        print(f"{stopped}. The same command continues.", file=sys.stderr)
        sys.exit(stopped.exit_code)


def now() -> str:
    """UTC, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())
