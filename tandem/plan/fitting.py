"""Coefficients >= 0 that explain what runs measured, as near as can be to what they were.

Kinds of work come together (every layer has products, bytes moved and small operations), so runs
tell sums of coefficients far better than each of them: many sets of coefficients explain them alike
well. Of these the one is taken that changes the present ones least, and none is changed where these
are as good. So a fit to runs that the present coefficients explain, or that they were fitted to,
leaves them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tandem.predict.record import Outcome

_NOISE = 0.03
"""A run's seconds are not known better than to this share."""
_STAYS = 1.08
"""How much more than what is allowed the squared errors of coefficients may be that are already
there: more than what rounding adds."""
_SMALLEST = 0.5
"""Coefficients below count as changed as much as this one is by the same difference."""
_HELD = {"products": 25.0, "first": 25.0}
"""Changes that count more. Products are measured by themselves, so a few runs of small models must
not explain everything by them. What a first step costs more (runs record every step's time) must
not pass for what each step costs."""
_STRONGEST, _WEAKEST, _HALVINGS = 1e3, 1e-5, 24
"""Pulls towards the present coefficients, in units of a run's relative error, and how often the
range between is halved."""

_Numbers = np.ndarray[Any, np.dtype[np.float64]]


def coefficients(
    runs: Sequence[Outcome], present: Mapping[str, float], power: float = 0.0
) -> dict[str, float]:
    """A phase's coefficients, by kind of work.

    Args:
        runs: whose seconds were measured.
        present: the coefficients so far; 1 of a kind that they lack.
        power: a run counts by its relative error times that power of its seconds.
    """
    names = sorted({name for run in runs for name in run.terms})
    seconds = np.array([run.cpu_seconds or run.measured_seconds or 1.0 for run in runs])
    target = seconds**power
    terms = np.array([[run.terms.get(name, 0.0) for name in names] for run in runs])
    matrix = terms * (target / seconds)[:, None]
    before = np.array([present.get(name, 1.0) for name in names])
    held = np.array([_HELD.get(name, 1.0) for name in names])

    def error(x: _Numbers) -> float:
        return float(((matrix @ x - target) ** 2).sum())

    best = non_negative(matrix, target)
    # Each coefficient that was free takes its share of the noise: the true ones' error is larger.
    left = max(1, len(runs) - int((best > 0).sum()))
    allowed = max(error(best) * len(runs) / left, _NOISE**2 * float((target**2).sum()))
    if error(before) <= _STAYS * allowed:
        return {name: present.get(name, 1.0) for name in names}
    found = _least_change(matrix, target, before, held, allowed)
    for digits in (3, 4, 6):
        rounded = np.array([float(f"{value:.{digits}g}") for value in found])
        if error(rounded) <= _STAYS * allowed:
            break
    return dict(zip(names, map(float, rounded), strict=True))


def _least_change(
    matrix: _Numbers, target: _Numbers, before: _Numbers, held: _Numbers, allowed: float
) -> _Numbers:
    """The x >= 0 nearest to `before` of all whose squared error is at most `allowed`."""
    weights = held / np.maximum(before, _SMALLEST)

    def pulled(pull: float) -> _Numbers:
        rows = np.vstack([matrix, np.diag(pull * weights)])
        return non_negative(rows, np.concatenate([target, pull * weights * before]))

    weak, strong = np.log(_WEAKEST), np.log(_STRONGEST)
    found = pulled(_WEAKEST)
    for _ in range(_HALVINGS):
        middle = (weak + strong) / 2
        tried = pulled(float(np.exp(middle)))
        if ((matrix @ tried - target) ** 2).sum() <= allowed:
            weak, found = middle, tried
        else:
            strong = middle
    return found


def non_negative(matrix: Any, target: Any) -> _Numbers:
    """The x >= 0 of least |matrix x - target|.

    Source: C. Lawson and R. Hanson, Solving Least Squares Problems, 1974, algorithm NNLS.
    """
    a, b = np.asarray(matrix, dtype=float), np.asarray(target, dtype=float)
    lengths = np.sqrt((a**2).sum(0))
    a = a / np.where(lengths > 0, lengths, 1.0)
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)
    enough = 1e-12 * np.sqrt((b**2).sum())
    for _ in range(10 * a.shape[1]):
        gain = np.where(free, 0.0, a.T @ (b - a @ x))
        if gain.max(initial=0.0) <= enough:
            break
        free[gain.argmax()] = True
        while True:
            best = np.zeros_like(x)
            best[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = best < 0
            if not below.any():
                break
            x = x + (x[below] / (x[below] - best[below])).min() * (best - x)
            free &= x > 1e-12
        x = best
    return x / np.where(lengths > 0, lengths, 1.0)
