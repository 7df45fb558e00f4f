"""What every bench needs: phases timed in wall and CPU seconds, rounds, ratios, memory, facts."""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from tandem.metrics.timing import Phase, Phases

MEGABYTE = 2**20


@dataclass(slots=True)
class Cost:
    """Seconds of one phase: on the clock, and of all the process's threads together."""

    wall: float = 0.0
    cpu: float = 0.0


class Stopwatch(Phases):
    """Times blocks by phase, for both sides alike; Tandem's trainer takes it as its `phases`.

    Example: `with watch("train"): ...`, then `watch.take()["train"].cpu`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._costs: defaultdict[str, Cost] = defaultdict(Cost)

    @contextmanager
    def __call__(
        self, phase: str, *, tokens: float = 0, samples: float = 0, flops: float = 0
    ) -> Iterator[Phase]:
        """Add the block's wall and CPU seconds to `phase`; the counts are not used."""
        wall, cpu = _now()
        try:
            yield Phase(tokens, samples, flops)
        finally:
            wall_end, cpu_end = _now()
            self._costs[phase].wall += wall_end - wall
            self._costs[phase].cpu += cpu_end - cpu

    def take(self) -> dict[str, Cost]:
        """The costs so far with their `total`, and start again from zero."""
        costs = dict(self._costs)
        costs["total"] = Cost(
            sum(cost.wall for cost in costs.values()), sum(cost.cpu for cost in costs.values())
        )
        self._costs.clear()
        return costs


def _now() -> tuple[float, float]:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def alternate(
    sides: Mapping[str, Callable[[], dict[str, Cost]]], rounds: int
) -> dict[str, list[dict[str, Cost]]]:
    """Run every side once a round, the order turned round each time; costs by side and round."""
    costs: dict[str, list[dict[str, Cost]]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        for name in order:
            costs[name].append(sides[name]())
        order.reverse()
    return costs


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times dearer one side is: median, least and most of the rounds' own ratios."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}-{self.most:.2f})"


def ratio(dear: Sequence[float], cheap: Sequence[float]) -> Ratio:
    """Each round's `dear / cheap`: both sides of a round have met the same machine."""
    rounds = [a / b for a, b in zip(dear, cheap, strict=True)]
    return Ratio(statistics.median(rounds), min(rounds), max(rounds))


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a process of its own, which has held nothing else.

    Raises:
        RuntimeError: the child died without an answer; its traceback is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, function, arguments))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        child.join()
        raise RuntimeError(
            f"{function.__name__} must answer from its process; got exit code {child.exitcode}. "
            "See the traceback above; exit code -9 means too little memory."
        ) from None
    finally:
        child.join()
        receiver.close()


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))
    sender.close()


def peak_resident_bytes() -> int:
    """The most memory that this process has had resident."""
    # Linux's ru_maxrss begins at what the parent had when it forked; VmHWM is the process's own.
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text("utf-8", "replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def facts() -> dict[str, Any]:
    """Machine, versions, command, commit and load: what a figure needs beside it."""
    root = Path(__file__).resolve().parents[1]
    cuda = torch.cuda.is_available()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "commit": _git(root, "rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git(root, "status", "--porcelain")),
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "cores_allowed": len(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
            "gpu": torch.cuda.get_device_name() if cuda else None,
            "platform": platform.platform(),
            "load_average": os.getloadavg(),
        },
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "allocator": {
            name: value
            for name, value in os.environ.items()
            if name == "LD_PRELOAD" or name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
        },
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _git(root: Path, *arguments: str) -> str:
    """What git says, or nothing where the bench is not in a repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
