"""Outliers among gradient norms."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

_KEPT = 100
_FEWEST = 20
"""Norms that are needed before any is an outlier."""
_LEAST_DEVIATION = 0.1
"""Least standard deviation of a norm's logarithm: a steady run may have a norm 1.5 times larger."""


class SpikeGuard:
    """Whether a norm is more than `sigma` standard deviations above the recent ones.

    Norms are compared by their logarithms, which are nearly normally distributed, over the last 100
    finite ones, from 20 on. Outliers are counted too: where large norms are common, as with rows
    that a model gets wrong which knows all others by heart, they stop being outliers. A norm that
    is not clipped never is one.
    """

    def __init__(self, sigma: float, clip: float) -> None:
        """`sigma` 0 finds no outliers; `clip` is the norm that gradients are clipped to."""
        self.sigma = sigma
        self._clip = clip
        self._logs: deque[float] = deque(maxlen=_KEPT)

    @property
    def limit(self) -> float:
        """The largest norm that is no outlier; infinite while too few are known."""
        if not self.sigma or len(self._logs) < _FEWEST:
            return math.inf
        mean = math.fsum(self._logs) / len(self._logs)
        variance = math.fsum((log - mean) ** 2 for log in self._logs) / len(self._logs)
        deviation = max(math.sqrt(variance), _LEAST_DEVIATION)
        return max(self._clip, math.exp(min(mean + self.sigma * deviation, 700.0)))

    def add(self, norm: float) -> None:
        """Add a step's finite norm; 0 is ignored."""
        if norm > 0:
            self._logs.append(math.log(norm))

    def history(self) -> list[float]:
        """The state, for `restore`."""
        return list(self._logs)

    def restore(self, history: Iterable[float]) -> None:
        """Continue from an earlier guard's `history`."""
        self._logs = deque(history, maxlen=_KEPT)
