"""How much sooner a step would be done with more cores, told on a machine with fewer.

    python bench/cores.py --cores 1 4 8 16 --shape smollm2 --algorithm grpo --dtype bf16

bench/README.md says what is counted and what is not.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import Costs, Stopwatch, in_child
from bench.ppo_sides import TandemSide, Work, start
from bench.report import Report, count, table
from bench.step3 import PHASES, work_of, work_parser
from tandem.engine.allocator import keep_freed_memory
from tandem.garbage import no_collection_of_old_objects
from tandem.metrics.timing import Phase
from tandem.ops import native

ENVIRONMENT = {
    # Threads that wait must not take the core from those that work.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "TANDEM_NATIVE": "on",
}


class Loops(Stopwatch):
    """A stopwatch whose wall seconds are those of a core for every thread.

    They are the main thread's CPU seconds, and for each loop of the C++ operations what its slowest
    part took longer than the main thread's own.
    """

    def __init__(self) -> None:
        super().__init__()
        library = native.kept_library()
        assert library is not None
        self._take = ctypes.CDLL(str(library)).tandem_take_measured
        self._measured = (ctypes.c_double * 3)()
        self.outside: dict[str, float] = {}

    @contextmanager
    def __call__(
        self, phase: str, *, tokens: float = 0, samples: float = 0, flops: float = 0
    ) -> Iterator[Phase]:
        """As a stopwatch; `outside` gets the seconds in which one thread alone has work."""
        self._take(self._measured)
        began = time.thread_time()
        with super().__call__(phase, tokens=tokens, samples=samples, flops=flops) as block:
            before = self._costs[phase].wall
            yield block
        main = time.thread_time() - began
        self._take(self._measured)
        _, slowest, own = self._measured
        self._costs[phase].wall = before + main + slowest - own
        self.outside[phase] = self.outside.get(phase, 0) + main - own


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure each number of cores in a process of its own, show; returns what --json writes."""
    options = _options(arguments)
    report = Report(options)
    os.environ.update(ENVIRONMENT)
    march = os.environ.get("TANDEM_MARCH") or "native"
    os.environ["TANDEM_MARCH"] = f"{march} -DTANDEM_MEASURE_LOOPS"
    work = work_of(options)
    rows = report.result["rows"] = {}
    for cores in dict.fromkeys(options.cores):
        rows[cores] = in_child(seconds_of, work, cores, options.rounds, options.keep_freed_memory)
        report.keep()
    least = min(rows)
    report.console.print(
        table(
            f"one {work.algorithm.upper()} step: Llama {options.shape}, {work.mode}, {work.dtype}",
            f"medians of {options.rounds} round(s)",
            ("phase",),
            ("cores", "CPU s", "s with a core each", f"of {least}", "one thread alone, s"),
            (
                (
                    phase if cores == least else "",
                    str(cores),
                    f"{row[phase]['cpu']:.3f}",
                    f"{row[phase]['wall']:.3f}",
                    f"{rows[least][phase]['wall'] / row[phase]['wall']:.2f}",
                    f"{row[phase]['outside']:.3f}",
                )
                for phase in PHASES
                for cores, row in rows.items()
            ),
        )
    )
    return report.end()


def seconds_of(work: Work, cores: int, rounds: int, keeps: bool) -> dict[str, dict[str, float]]:
    """Medians by phase of a step by as many threads, on one core: CPU seconds, those of the wall if
    each thread had a core, and those outside of loops."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    torch.set_num_threads(cores)
    if keeps:
        keep_freed_memory()
    if reason := native.why_not():
        raise RuntimeError(f"the C++ operations must be there; got: {reason}")
    watch = Loops()
    side = TandemSide(work, start(work), copies=False, watch=watch)
    found: list[tuple[Costs, dict[str, float]]] = []
    with no_collection_of_old_objects():
        for number in range(rounds + 1):
            side.run(number)
            outside, watch.outside = watch.outside, {}
            outside["total"] = sum(outside.values())
            found.append((watch.take(), outside))
    del found[0]  # pays for new memory
    return {
        phase: {
            "cpu": statistics.median(costs[phase].cpu for costs, _ in found),
            "wall": statistics.median(costs[phase].wall for costs, _ in found),
            "outside": statistics.median(outside[phase] for _, outside in found),
        }
        for phase in PHASES
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    flags = work_parser(__doc__, "")
    flags.add_argument("--cores", nargs="+", type=count, default=[1, 2, 4, 8, 16])
    flags.set_defaults(rounds=3)
    options = flags.parse_args(arguments)
    if options.device != "cpu":
        flags.error(f"--device must be cpu, whose cores are told; got {options.device}")
    if not hasattr(os, "sched_setaffinity"):
        flags.error("threads must be bound to one core, which this system does not do; use Linux")
    return options


if __name__ == "__main__":
    main()
