"""What the alarms measure on a stage's records.

A measure looks at the history up to one record and returns the quantity that a rule compares, or
None while it cannot be known. Each looks back a fixed number of records, so a check stays cheap
in a long run. Non-finite values never count towards a mean or median.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tandem.metrics.records import Record

Measure = Callable[["History"], float | None]

_START = 3
"""Records that make up "the start": one alone would be noise."""


@dataclass(frozen=True, slots=True)
class History:
    """The records of `stage` among the first `end` of `records`; `step` is that of the last."""

    stage: str
    records: Sequence[Record]
    end: int

    @property
    def step(self) -> int:
        """Step of the last record."""
        return self.records[self.end - 1].step

    def is_known(self, metric: str) -> bool:
        """Whether the last record has a finite value of `metric` (`*`: whatever it has)."""
        return metric == "*" or self._value(self.end - 1, metric) is not None

    def newest(self, metric: str) -> Iterator[tuple[int, float]]:
        """(position, finite value) of the records that carry `metric`, newest first."""
        for position in range(self.end - 1, -1, -1):
            value = self._value(position, metric)
            if value is not None:
                yield position, value

    def last(self, metric: str, count: int) -> list[float]:
        """Up to `count` newest values, newest first."""
        return [value for _, value in itertools.islice(self.newest(metric), count)]

    def first(self, metric: str, count: int) -> list[float]:
        """Up to `count` oldest values."""
        values = (self._value(position, metric) for position in range(self.end))
        return list(itertools.islice((v for v in values if v is not None), count))

    def ends_with(self, metric: str, count: int) -> list[int]:
        """Ends of the `count` newest histories whose last record carries `metric` (`*`: any)."""
        positions = (
            position
            for position in range(self.end - 1, -1, -1)
            if self.records[position].stage == self.stage
            and (metric == "*" or metric in self.records[position].values)
        )
        return [position + 1 for position in itertools.islice(positions, count)]

    def _value(self, position: int, metric: str) -> float | None:
        record = self.records[position]
        value = record.values.get(metric) if record.stage == self.stage else None
        return value if value is not None and math.isfinite(value) else None


def now(metric: str) -> Measure:
    """The newest value."""

    def measure(history: History) -> float | None:
        return next(iter(history.last(metric, 1)), None)

    return measure


def mean_of(metric: str, count: int) -> Measure:
    """Mean of the newest `count` values."""

    def measure(history: History) -> float | None:
        values = history.last(metric, count)
        return statistics.fmean(values) if len(values) == count else None

    return measure


def recent_over_first(metric: str, count: int) -> Measure:
    """Mean of the newest `count` values over the mean of the oldest `count`, apart in time."""

    def measure(history: History) -> float | None:
        if len(history.last(metric, 2 * count)) < 2 * count:
            return None
        start = statistics.fmean(history.first(metric, count))
        return _ratio(statistics.fmean(history.last(metric, count)), start)

    return measure


def step_up(metric: str) -> Measure:
    """The newest value over the one before."""

    def measure(history: History) -> float | None:
        values = history.last(metric, 2)
        return _ratio(values[0], values[1]) if len(values) == 2 else None

    return measure


def growth(metric: str, distance: int, floor: float) -> Measure:
    """The newest value over the one `distance` records before, if that was at least `floor`."""

    def measure(history: History) -> float | None:
        values = history.last(metric, distance + 1)
        if len(values) <= distance or values[-1] < floor:
            return None
        return values[0] / values[-1]

    return measure


def over_median(metric: str, count: int) -> Measure:
    """The newest value over the median of up to `count` before it; needs 10 of them."""

    def measure(history: History) -> float | None:
        newest, *before = history.last(metric, count + 1) or [0.0]
        return _ratio(newest, statistics.median(before)) if len(before) >= 10 else None

    return measure


def share_of_start(metric: str) -> Measure:
    """The newest value over the mean of the first three."""

    def measure(history: History) -> float | None:
        start = _start(history, metric)
        return None if start is None else _ratio(history.last(metric, 1)[0], start)

    return measure


def drop_from_start(metric: str) -> Measure:
    """The mean of the first three values minus the newest."""

    def measure(history: History) -> float | None:
        start = _start(history, metric)
        return None if start is None else start - history.last(metric, 1)[0]

    return measure


def accuracy_gap(count: int) -> Measure:
    """Training accuracy (mean of the newest `count`) minus held-out accuracy."""
    training = mean_of("accuracy", count)

    def measure(history: History) -> float | None:
        accuracy, heldout = training(history), history.last("heldout_accuracy", 1)
        return accuracy - heldout[0] if accuracy is not None and heldout else None

    return measure


def num_non_finite(history: History) -> float | None:
    """Values of the last record that are nan or infinite."""
    values = history.records[history.end - 1].values.values()
    return float(sum(not math.isfinite(value) for value in values))


def length_against_longest(history: History) -> float | None:
    """Mean over longest answer of the last record."""
    values = history.records[history.end - 1].values
    mean, longest = values.get("response_tokens"), values.get("response_tokens_max")
    return _ratio(mean, longest) if mean is not None and longest is not None else None


def heldout_reward_lost(history: History) -> float | None:
    """How far the held-out reward is below its best, while the training reward went up since."""
    evaluations = list(history.newest("heldout_reward"))
    if len(evaluations) < 2:
        return None
    best_at, best = max(evaluations, key=lambda evaluation: evaluation[1])
    then = History(history.stage, history.records, best_at + 1).last("reward", 5)
    recent = history.last("reward", 5)
    if not then or statistics.fmean(recent) <= statistics.fmean(then):
        return None
    return best - evaluations[0][1]


def forgetting(history: History) -> float | None:
    """The held-out perplexity of mixture text over its first value."""
    first = history.first("heldout_ptx_perplexity", 1)
    return _ratio(history.last("heldout_ptx_perplexity", 1)[0], first[0]) if first else None


def _start(history: History, metric: str) -> float | None:
    values = history.first(metric, _START + 1)
    return statistics.fmean(values[:_START]) if len(values) > _START else None


def _ratio(value: float, over: float) -> float | None:
    return value / over if over > 0 else None
