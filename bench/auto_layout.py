"""Does --auto-layout take a layout that fits, and nearly the fastest that does?

    python bench/auto_layout.py --work layouts

Every layout of a few runs is run once as a command, and its peak and its step's time are measured.
Then `--auto-layout` is asked for each run with six memory limits between the least and the greatest
peak that was measured, so that a layout exists for each, and one above. Its choice must have run
under the limit, within 15 % of the fastest layout that did.
A layout that has run is not run again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.grade_plan import GradeCase, case_config, machine_file, run_case
from tandem.config.schema import RunConfig
from tandem.memory.ways import size_text
from tandem.plan.auto_layout import choose_layout
from tandem.plan.layouts import Laid, layouts
from tandem.plan.plan_command import asked_of
from tandem.predict.hardware import read_hardware
from tandem.predict.record import WHOLE, read_outcomes

GOAL = 0.15
SHARES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 1.05)
"""Where the limits lie between the least and the greatest measured peak."""
LARGE = {"micro_batch_tokens": 4096, **{f"{s}.batch_size": 64 for s in ("sft", "reward", "dpo")},
         **{f"{s}.max_steps": 2 for s in ("sft", "reward", "dpo")},
         "ppo.prompts_per_step": 48, "ppo.minibatch_size": 48,
         "generation_batch_size": 48}  # fmt: skip
"""All answers at once, which is set and so kept: only layouts that have run can be compared."""
CASES = (
    GradeCase(stage="sft", model="llama-5m", name="large", knobs=LARGE),
    GradeCase(stage="reward", model="opt-7m", name="large", knobs=LARGE),
    GradeCase(stage="dpo", model="llama-2m", name="large", knobs=LARGE),
    GradeCase(stage="ppo", model="llama-2m", name="large", knobs=LARGE),
)


@dataclass(frozen=True, slots=True)
class Ran:
    """A layout that has run: what it is, its peak in bytes, CPU seconds of its step."""

    flags: str
    peak: float
    seconds: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what has not run, then show the table."""
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    flags.add_argument("--work", type=Path, required=True, help="where everything goes")
    flags.add_argument("--only", nargs="*", default=[], help="runs with one of these in their name")
    options = flags.parse_args(arguments)
    torch.set_num_threads(1)
    machine = machine_file(options.work)
    chosen = [c for c in CASES if not options.only or any(o in c.folder for o in options.only)]
    rows = [row for case in chosen for row in _rows_of(case, options.work, machine)]
    print("run                    limit      chosen: peak, s/step   fastest under it: s/step")
    print("\n".join(line for line, _ in rows))
    good = sum(is_good for _, is_good in rows)
    print(f"{good} of {len(rows)} run under the limit and within {GOAL:.0%} of the fastest")


def _rows_of(case: GradeCase, work: Path, machine: Path) -> list[tuple[str, bool]]:
    config = case_config(case, work, work / "layouts" / case.folder / "none")
    os.environ["TANDEM_MACHINE"] = str(machine)
    asked = asked_of(config, read_hardware(machine), case.ranks)
    found = layouts(config, asked.models, asked.rows, asked.hardware, case.ranks, trains_alike=True)
    ran = {laid.flags(): _ran(case, laid, work, machine) for laid in found}
    peaks = [one.peak for one in ran.values() if one is not None]
    least, most = min(peaks), max(peaks)
    return [
        _row(case, config, least + share * (most - least), ran)
        for share in SHARES
    ]  # fmt: skip


def _ran(case: GradeCase, laid: Laid, work: Path, machine: Path) -> Ran | None:
    """A layout run once; None if it failed."""
    name = laid.flags().replace("--", "").replace(" ", "-")
    where = work / "layouts" / case.folder / name
    if not read_outcomes(where):
        config: Any = replace(laid.config, output_dir=str(where))
        try:
            run_case(case, config, where, machine)
        except subprocess.CalledProcessError as error:
            print(f"{case.folder} {laid.flags()}: failed: {error.returncode}", flush=True)
            return None
    whole = next(o for o in read_outcomes(where) if o.phase == WHOLE)
    seconds = whole.cpu_seconds or whole.measured_seconds or 0.0
    print(
        f"{case.folder} {laid.flags()}: peak {size_text(whole.measured_bytes)} (predicted "
        f"{laid.peak / whole.measured_bytes - 1:+.0%}), {seconds:.3g} s a step",
        flush=True,
    )
    return Ran(laid.flags(), whole.measured_bytes, seconds)


def _row(
    case: GradeCase, config: RunConfig, limit: float, ran: dict[str, Ran | None]
) -> tuple[str, bool]:
    _, words = choose_layout(config, case.ranks, limit, lambda line: None)
    choice = ran.get(" ".join(words) or "as it is")
    under = [one for one in ran.values() if one is not None and one.peak <= limit]
    if choice is None:
        return f"{case.folder:22} {size_text(limit):10} chose one that failed: {words}", False
    fastest = min(under, key=lambda one: one.seconds)
    slower = choice.seconds / fastest.seconds - 1
    is_good = choice.peak <= limit and slower <= GOAL
    over = "" if choice.peak <= limit else " OVER"
    return (
        f"{case.folder:22} {size_text(limit):10} {choice.flags}: {size_text(choice.peak)}{over}, "
        f"{choice.seconds:.3g} s; {fastest.flags}: {fastest.seconds:.3g} s ({slower:+.0%})"
    ), is_good


if __name__ == "__main__":
    main()
