"""Predictions graded: the errors of runs, and constants fitted to them."""

from __future__ import annotations

import copy
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.plan.fitting import coefficients
from tandem.predict.constants import MEBIBYTE, own_section, section_for, sections_in_use
from tandem.predict.record import (
    EVALUATE,
    OF_A_STEP,
    PREDICTIONS_FILE,
    WHOLE,
    Outcome,
    read_outcomes,
)
from tandem.text import counted

MEMORY_GOAL, TIME_GOAL = 0.10, 0.25
_FITTED = ("load", *OF_A_STEP, EVALUATE)
_LONG = {"load": 0.5}
"""By how much of a power of its seconds a run counts more. Small models load in tenths of a second,
twice as long in one run as in the next; where users wait, large ones are loaded."""


def outcomes_of(folders: Iterable[Path]) -> list[Outcome]:
    """Of runs' folders, each named by its own.

    Raises:
        ConfigError: no folder has any.
    """
    found = [
        replace(outcome, case=folder.name)
        for folder in folders
        if folder.is_dir()
        for outcome in read_outcomes(folder)
    ]
    if not found:
        raise ConfigError(
            f"--grade and --refit must get runs with {PREDICTIONS_FILE}; got none. Give folders of "
            "runs that have finished a stage."
        )
    return found


def grade_table(folders: Sequence[Path]) -> str:
    """Every run's errors, and how many are within the goals.

    Raises:
        ConfigError: no folder has predictions.
    """
    found = outcomes_of(folders)
    lines = [f"{'run':38} {'stage':10} {'measured':>9} {'memory':>7} {'net':>7}  time by phase"]
    for whole, phases in _stages(found):
        times = ", ".join(
            f"{o.phase} {o.time_error:+.0%}" for o in phases if math.isfinite(o.time_error)
        )
        lines.append(
            f"{whole.case:38} {whole.stage:10} {whole.measured_bytes / MEBIBYTE:5.0f} MiB "
            f"{whole.memory_error:+7.1%} {net_error(whole):+7.0%}  {times}"
        )
    return "\n".join([*lines, *summary(found)])


def grade_values(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The same for programs: by run and stage what was measured, the errors of memory (of the whole
    process, and of the models' part by the formula alone) and of every phase's time, as shares;
    None where there is no measurement.

    Raises:
        ConfigError: no folder has predictions.
    """
    return [
        {
            "run": whole.case,
            "stage": whole.stage,
            "measured_bytes": _finite(whole.measured_bytes),
            "memory_error": _finite(whole.memory_error),
            "net_error": _finite(net_error(whole)),
            "time_errors": {o.phase: _finite(o.time_error) for o in phases},
        }
        for whole, phases in _stages(outcomes_of(folders))
    ]


def _stages(found: Sequence[Outcome]) -> list[tuple[Outcome, list[Outcome]]]:
    """Each run's stages: the whole, and the phases that constants are fitted to."""

    def phases(whole: Outcome) -> list[Outcome]:
        same = [o for o in found if (o.case, o.stage) == (whole.case, whole.stage)]
        return [o for o in same if o.phase in _FITTED]

    return [(outcome, phases(outcome)) for outcome in found if outcome.phase == WHOLE]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def net_error(outcome: Outcome) -> float:
    """The error of what the run's models add to its process, by the formula alone."""
    measured = outcome.measured_bytes - outcome.process_bytes
    if measured <= 0 or not outcome.live_bytes:
        return math.nan
    return outcome.live_bytes / measured - 1


def summary(found: Sequence[Outcome]) -> list[str]:
    """How many predictions are within the goals."""
    memory = [o.memory_error for o in found if o.phase == WHOLE and math.isfinite(o.memory_error)]
    lines = []
    if memory:
        good = sum(abs(error) <= MEMORY_GOAL for error in memory)
        lines.append(
            f"peak memory: {good} of {len(memory)} within {MEMORY_GOAL:.0%}, the lowest "
            f"{min(memory):+.1%}, the highest {max(memory):+.1%}"
        )
    for name, phases in (
        ("a step's phase", OF_A_STEP),
        ("loading", ("load",)),
        ("evaluations", (EVALUATE,)),
    ):
        times = [o.time_error for o in found if o.phase in phases and math.isfinite(o.time_error)]
        if times:
            good = sum(abs(error) <= TIME_GOAL for error in times)
            lines.append(
                f"time of {name}: {good} of {len(times)} within {TIME_GOAL:.0%}, median of the "
                f"errors {statistics.median(map(abs, times)):.0%}"
            )
    return lines


def refit(folders: Sequence[Path]) -> dict[str, Any]:
    """The constants in use, and beside them those of the CPUs that runs were made on, each kind of
    processor fitted to its runs: least squares of the relative errors, no coefficient below 0, none
    changed that needs no change.

    Raises:
        ConfigError: no run has predictions on a CPU, or the constants in use cannot be read.
    """
    found = [o for o in outcomes_of(folders) if o.hardware.startswith("this machine")]
    known = sections_in_use()
    fitted: dict[str, Any] = {}
    for machine in sorted({o.hardware for o in found}):
        own, before = own_section(known, machine), known[section_for(known, "cpu", machine)]
        section = copy.deepcopy(before)
        runs = [o for o in found if o.hardware == machine]
        if _fit(section, runs):
            if section != before or own not in known:
                number = counted(sum(o.phase == WHOLE for o in runs), "run")
                processor = re.sub(r"^this machine \((.*)\)$", r"\1", machine)
                section["fitted_on"] = f"{number} on {processor}"
            fitted[own] = section
    if not fitted:
        raise ConfigError("--refit must get runs timed on a CPU whose speed was known; got none.")
    return known | fitted


def _fit(section: dict[str, Any], found: Sequence[Outcome]) -> bool:
    """Fit a section to one machine's runs; False where none of them was timed."""
    timed = [o for o in found if (o.cpu_seconds or o.measured_seconds) and o.terms]
    for phase in _FITTED:
        if runs := [o for o in timed if o.phase == phase]:
            section[phase] |= coefficients(runs, section[phase], _LONG.get(phase, 0.0))
    wholes = [o for o in found if o.phase == WHOLE]
    slack = section["slack_mib"]
    alone = [_slack_needed(o, slack["step"]) for o in wholes if o.ranks == 1]
    both = slack["step"] + slack["per_rank"]
    beside = [_slack_needed(o, both) for o in wholes if o.ranks > 1]
    if alone:
        slack["step"] = round(max(0.0, _upper(alone)), 1)
    if alone and beside:
        slack["per_rank"] = round(max(0.0, _upper(beside) - slack["step"]), 1)
    return bool(timed)


def _upper(needed: Sequence[float]) -> float:
    """What two thirds of the runs do with: too low a prediction costs a run, too high a layout."""
    return sorted(needed)[2 * (len(needed) - 1) // 3]


def _slack_needed(outcome: Outcome, predicted_with: float) -> float:
    """MiB beside the formula with which a prediction is right.

    Args:
        predicted_with: MiB of them in the prediction, where the record does not say it.
    """
    had = predicted_with * MEBIBYTE if outcome.slack_bytes is None else outcome.slack_bytes
    return (outcome.measured_bytes - outcome.predicted_bytes + had) / MEBIBYTE
