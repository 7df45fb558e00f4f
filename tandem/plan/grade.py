"""Predictions graded: the errors of runs, and constants fitted to them."""

from __future__ import annotations

import copy
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.predict.constants import MEBIBYTE, SHIPPED, own_section, section_for
from tandem.predict.record import (
    EVALUATE,
    OF_A_STEP,
    PREDICTIONS_FILE,
    WHOLE,
    Outcome,
    read_outcomes,
)
from tandem.yaml_text import shipped_table

MEMORY_GOAL, TIME_GOAL = 0.10, 0.25
_FITTED = ("load", *OF_A_STEP, EVALUATE)
_PULL, _HELD = 0.02, {"products": 0.5, "first": 0.5}
"""How strongly a coefficient is held where it was, in units of a run's relative error. Products are
measured by themselves, so a few runs of small models must not explain everything by them. What a
first step costs more (runs record every step's time) must not pass for what each step costs."""
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
    """The package's constants, and beside them those of the CPUs that runs were made on, each kind
    of processor fitted to its runs: least squares of the relative errors, no coefficient below 0.

    Raises:
        ConfigError: no run has predictions on a CPU.
    """
    found = [o for o in outcomes_of(folders) if o.hardware.startswith("this machine")]
    known: dict[str, Any] = shipped_table(SHIPPED)
    fitted: dict[str, Any] = {}
    for machine in sorted({o.hardware for o in found}):
        section = copy.deepcopy(known[section_for(known, "cpu", machine)])
        if _fit(section, [o for o in found if o.hardware == machine]):
            processor = re.sub(r"^this machine \((.*)\)$", r"\1", machine)
            section["fitted_on"] += f" on {processor}"
            fitted[own_section(known, machine)] = section
    if not fitted:
        raise ConfigError("--refit must get runs timed on a CPU whose speed was known; got none.")
    return known | fitted


def _fit(section: dict[str, Any], found: Sequence[Outcome]) -> bool:
    """Fit a section to one machine's runs; False where none of them was timed."""
    timed = [o for o in found if (o.cpu_seconds or o.measured_seconds) and o.terms]
    for phase in _FITTED:
        if rows := [o for o in timed if o.phase == phase]:
            section[phase] |= _coefficients(rows, section[phase], _LONG.get(phase, 0.0))
    wholes = [o for o in found if o.phase == WHOLE]
    section["fitted_on"] = f"{len(wholes)} runs"
    slack = section["slack_mib"]
    if single := [_missing(o) for o in wholes if o.ranks == 1]:
        slack["step"] = round(max(0.0, slack["step"] + _upper(single)), 1)
        if several := [_missing(o) for o in wholes if o.ranks > 1]:
            beside = _upper(several) - _upper(single)
            slack["per_rank"] = round(max(0.0, slack["per_rank"] + beside), 1)
    return bool(timed)


def _upper(missing: Sequence[float]) -> float:
    """What two thirds of the runs do with: too low a prediction costs a run, too high a layout."""
    return sorted(missing)[2 * (len(missing) - 1) // 3]


def _missing(outcome: Outcome) -> float:
    """MiB by which a prediction is too low."""
    return (outcome.measured_bytes - outcome.predicted_bytes) / MEBIBYTE


def _coefficients(
    rows: Sequence[Outcome], start: Mapping[str, float], power: float
) -> dict[str, float]:
    """Coefficients >= 0 for which terms times coefficients come nearest to the seconds measured,
    in relative error times that power of the seconds. A weak pull to where they were keeps terms
    that hardly matter in place."""
    names = sorted({name for row in rows for name in row.terms})
    matrix, target = [], []
    for row in rows:
        seconds = row.cpu_seconds or row.measured_seconds or 1.0
        counts = seconds**power
        matrix.append([counts * row.terms.get(name, 0.0) / seconds for name in names])
        target.append(counts)
    for number, name in enumerate(names):
        before = start.get(name, 1.0)
        pull = _HELD.get(name, _PULL) if name in start else _PULL
        matrix.append([pull / max(before, 0.5) * (i == number) for i in range(len(names))])
        target.append(pull * (before > 0))
    found = non_negative(matrix, target)
    return {name: float(f"{value:.3g}") for name, value in zip(names, found, strict=True)}


def non_negative(matrix: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """x >= 0 of least |matrix x - target|, by coordinate descent."""
    columns = list(zip(*matrix, strict=True))
    x = [0.0] * len(columns)
    residual = [-value for value in target]
    squares = [sum(value * value for value in column) for column in columns]
    for _ in range(3000):
        moved = 0.0
        for number, column in enumerate(columns):
            if squares[number] == 0:
                continue
            gradient = sum(a * r for a, r in zip(column, residual, strict=True))
            new = max(0.0, x[number] - gradient / squares[number])
            step, x[number] = new - x[number], new
            if step:
                residual = [r + step * a for a, r in zip(column, residual, strict=True)]
            moved = max(moved, abs(step) * math.sqrt(squares[number]))
        if moved < 1e-9:
            break
    return x
