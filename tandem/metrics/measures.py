"""The quantities that alarms compare with their thresholds.

A measure takes a history and a metric's name and returns a number, or None while it is unknown.
Each looks back over a fixed number of records, so checks stay cheap in a long run. Non-finite
values are excluded from means and medians.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tandem.metrics.records import Record

_START = 3
"""Records averaged as the start value, since a single one is noisy."""
_BEGINNING = 1000
"""Records among which the first held-out value is looked for: a run may have none."""


@dataclass(frozen=True, slots=True)
class History:
    """The first `end` of a stage's records."""

    records: Sequence[Record]
    end: int

    @property
    def record(self) -> Record:
        """The last one."""
        return self.records[self.end - 1]

    def newest(self, metric: str) -> Iterator[tuple[int, float]]:
        """(position, finite value) of the records that have `metric`, newest first."""
        for position in range(self.end - 1, -1, -1):
            value = self.records[position].values.get(metric, math.nan)
            if math.isfinite(value):
                yield position, value

    def last(self, metric: str, count: int) -> list[float]:
        """Up to `count` newest finite values, newest first."""
        return [value for _, value in itertools.islice(self.newest(metric), count)]

    def first(self, metric: str, count: int, among: int | None = None) -> list[float]:
        """Up to `count` oldest finite values, of the first `among` records or of all."""
        end = self.end if among is None else min(among, self.end)
        oldest = itertools.islice(self.records, end)
        values = (record.values.get(metric, math.nan) for record in oldest)
        return list(itertools.islice(filter(math.isfinite, values), count))


Measure = Callable[[History, str], float | None]


def now(history: History, metric: str) -> float | None:
    """The newest value."""
    return next(iter(history.last(metric, 1)), None)


def or_of_tokens(history: History, metric: str) -> float | None:
    """The newest value, or that of single tokens' rewards where they are learned from and it is
    larger: answers of equal sums still differ by their tokens."""
    value = now(history, metric)
    of_tokens = history.record.values.get("reward_token_std", 0.0)
    return value if value is None else max(value, of_tokens)


def mean_of_20(history: History, metric: str) -> float | None:
    """Mean of the newest 20 values."""
    values = history.last(metric, 20)
    return statistics.fmean(values) if len(values) == 20 else None


def mean_over_first_mean(history: History, metric: str) -> float | None:
    """Mean of the newest 20 values over the mean of the oldest 20, once there are 40."""
    if len(history.last(metric, 40)) < 40:
        return None
    start = statistics.fmean(history.first(metric, 20))
    return _ratio(statistics.fmean(history.last(metric, 20)), start)


def mean_over_beginning(history: History, metric: str) -> float | None:
    """Mean of the newest 5 values over the mean of the first three, or the first held-out value if
    that is higher: a few easy batches may come first. Needs 5 beside the first three."""
    values = history.last(metric, 5 + _START)
    if len(values) < 5 + _START:
        return None
    start = statistics.fmean(history.first(metric, _START))
    start = max([start, *history.first(f"heldout_{metric}", 1, among=_BEGINNING)])
    return _ratio(statistics.fmean(values[:5]), start)


def over_previous(history: History, metric: str) -> float | None:
    """The newest value over the previous one."""
    values = history.last(metric, 2)
    return _ratio(values[0], values[1]) if len(values) == 2 else None


def growth_in_10(history: History, metric: str) -> float | None:
    """The newest value over the one 10 records before, if that was at least 1."""
    values = history.last(metric, 11)
    return values[0] / values[10] if len(values) == 11 and values[10] >= 1 else None


def over_median(history: History, metric: str) -> float | None:
    """The newest value over the median of up to 50 before it; needs 10 of them."""
    newest, *before = history.last(metric, 51) or [0.0]
    return _ratio(newest, statistics.median(before)) if len(before) >= 10 else None


def over_start(history: History, metric: str) -> float | None:
    """The newest value over the mean of the first three."""
    start = _start(history, metric)
    return None if start is None else _ratio(history.last(metric, 1)[0], start)


def drop_from_start(history: History, metric: str) -> float | None:
    """The mean of the first three values minus the newest."""
    start = _start(history, metric)
    return None if start is None else start - history.last(metric, 1)[0]


def over_first(history: History, metric: str) -> float | None:
    """The newest value over the first."""
    first = history.first(metric, 1)
    return _ratio(history.last(metric, 1)[0], first[0]) if first else None


def training_minus_heldout(history: History, metric: str) -> float | None:
    """Mean of the newest 20 training values of a held-out metric, minus its newest value."""
    training = mean_of_20(history, metric.removeprefix("heldout_"))
    heldout = now(history, metric)
    return None if training is None or heldout is None else training - heldout


def num_non_finite(history: History, metric: str) -> float | None:
    """Values of the last record that are nan or infinite."""
    return float(sum(not math.isfinite(value) for value in history.record.values.values()))


_MOSTLY = 0.9


def over_longest(history: History, metric: str) -> float | None:
    """The last record's mean length over its longest; None where most answers ended by
    themselves, and are merely of one length."""
    values = history.record.values
    longest = values.get(f"{metric}_max")
    if longest is None or values.get("eos_rate", 0.0) > _MOSTLY:
        return None
    return _ratio(values[metric], longest)


def heldout_lost(history: History, metric: str) -> float | None:
    """How far a held-out metric is below its best while the training metric has risen since."""
    evaluations = list(history.newest(metric))
    if len(evaluations) < 2:
        return None
    training = metric.removeprefix("heldout_")
    best_at, best = max(evaluations, key=lambda evaluation: evaluation[1])
    then = History(history.records, best_at + 1).last(training, 5)
    recent = history.last(training, 5)
    if not then or statistics.fmean(recent) <= statistics.fmean(then):
        return None
    return best - evaluations[0][1]


_LOOKED_BACK = 300
_AT_ONCE = 5


def watched_lost(history: History, metric: str) -> float | None:
    """How far the mean of the newest 5 values is below the best such mean of the last 300 records,
    in standard errors by their changes from one to the next, while the reward that is learned from
    has risen since. Needs 10."""
    pairs = []
    for position in range(max(0, history.end - _LOOKED_BACK), history.end):
        values = history.records[position].values
        pair = values.get(metric, math.nan), values.get("reward_before_penalty", math.nan)
        if all(map(math.isfinite, pair)):
            pairs.append(pair)
    if len(pairs) < 2 * _AT_ONCE:
        return None
    means = [
        [statistics.fmean(part) for part in zip(*pairs[end - _AT_ONCE : end], strict=True)]
        for end in range(_AT_ONCE, len(pairs) + 1)
    ]
    (best, reward_then), (newest, reward_now) = max(means), means[-1]
    changes = [(after[0] - before[0]) ** 2 for before, after in itertools.pairwise(pairs)]
    # Of the difference of two means of 5, each value's variance half of a change's.
    error = math.sqrt(statistics.fmean(changes) / _AT_ONCE)
    return _ratio(best - newest, error) if reward_now > reward_then else None


def _start(history: History, metric: str) -> float | None:
    values = history.first(metric, _START + 1)
    return statistics.fmean(values[:_START]) if len(values) > _START else None


def _ratio(value: float, over: float) -> float | None:
    return value / over if over > 0 else None
