"""The cost of each phase of a step: seconds, tokens/s, samples/s, TFLOP/s, peak memory.

Example: `with phases("generate") as block: ...; block.tokens = num_sampled` around the work of a
phase, then `log.log(step, phases.metrics())`.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.metrics.names import find_metric


@dataclass(slots=True)
class Phase:
    """The work in one block. The counts may be set or increased until the block ends.

    tokens, samples: as defined by the metrics. flops: floating-point operations, not per second.
    """

    tokens: float = 0
    samples: float = 0
    flops: float = 0


@dataclass(slots=True)
class _Total:
    seconds: float = 0.0
    tokens: float = 0.0
    samples: float = 0.0
    flops: float = 0.0
    peak_bytes: int = 0


@dataclass(slots=True)
class Whole:
    """All blocks of a phase so far: how many, wall seconds, CPU seconds of this process, and the
    peak of its memory."""

    blocks: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0


class Phases:
    """A timer that adds up blocks by phase until `metrics` returns the sums.

    Blocks may nest (`step` around the others); an outer block's memory peak and FLOPs include those
    of the inner ones. On CUDA the device is synchronized at both ends of a block, so that it
    measures the work and not its launch.

    Attributes:
        whole: all blocks by phase, which `metrics` does not reset.
    """

    def __init__(self) -> None:
        self.whole: dict[str, Whole] = {}
        self._totals: dict[str, _Total] = {}
        self._open: list[_Total] = []

    @contextmanager
    def __call__(
        self, phase: str, *, tokens: float = 0, samples: float = 0, flops: float = 0
    ) -> Iterator[Phase]:
        """Time a block as `phase`, also if it raises.

        Raises:
            ConfigError: if `phase` is not one of PHASES.
        """
        find_metric(f"seconds/{phase}")
        total = self._totals.setdefault(phase, _Total())
        block = Phase(tokens, samples, flops)
        self._note_peak()
        reset_peak()
        self._open.append(total)
        cpu, start = time.process_time(), _now()
        try:
            yield block
        finally:
            seconds = _now() - start
            total.seconds += seconds
            total.tokens += block.tokens
            total.samples += block.samples
            total.flops += block.flops
            self._note_peak()
            whole = self.whole.setdefault(phase, Whole())
            whole.blocks += 1
            whole.seconds += seconds
            whole.cpu_seconds += time.process_time() - cpu
            whole.peak_bytes = max(whole.peak_bytes, total.peak_bytes)
            self._open.pop()
            for outer in self._open:
                outer.flops += block.flops

    def metrics(self) -> dict[str, float]:
        """The sums as metrics (`seconds/train`, ...), without rates whose count is 0; resets them.

        Call it outside every block.
        """
        values: dict[str, float] = {}
        for phase, total in self._totals.items():
            values[f"seconds/{phase}"] = total.seconds
            rates = {
                "tokens_per_second": total.tokens,
                "samples_per_second": total.samples,
                "tflops": total.flops / 1e12,
            }
            for name, count in rates.items():
                if count and total.seconds > 0:
                    values[f"{name}/{phase}"] = count / total.seconds
            values[f"peak_memory_bytes/{phase}"] = float(total.peak_bytes)
        self._totals = {}
        return values

    def _note_peak(self) -> None:
        """Record the peak for the outer blocks before an inner one resets it."""
        peak = peak_bytes() if self._open else 0
        for total in self._open:
            total.peak_bytes = max(total.peak_bytes, peak)


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _now() -> float:
    if _cuda_in_use():
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak() -> None:
    """Start a new measurement of the peak of memory, where the system can."""
    if _cuda_in_use():
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        try:
            # Writing 5 here resets the process's peak resident set on Linux.
            Path("/proc/self/clear_refs").write_text("5", "ascii")
        except OSError:
            # Some containers refuse; the peak is then that of the whole process.
            return


def peak_bytes() -> int:
    """The peak of memory since `reset_peak`: of torch's allocator on CUDA, else resident."""
    if _cuda_in_use():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text("utf-8", "replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Bytes on macOS, KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
