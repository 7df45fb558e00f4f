"""Gradient norms that are far out of line with those before them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

_KEPT = 100
_FEWEST = 20
"""Norms without which nothing can be called out of line."""
_LEAST_DEVIATION = 0.1
"""Of a norm's logarithm: a very steady run is not stopped by a norm that is half as large again."""


class SpikeGuard:
    """Whether a norm is more than `sigma` standard deviations above the recent ones.

    Norms are compared by their logarithms, whose distribution is near a normal one, over the last
    100 finite ones, once there are 20. Those out of line count among them: where large norms are
    the rule, as with rows that a model which knows all others by heart gets wrong, they soon are
    no longer out of line. What clipping leaves whole never is.
    """

    def __init__(self, sigma: float, clip: float) -> None:
        """`sigma` 0 finds nothing out of line; `clip` is the norm that gradients are cut to."""
        self.sigma = sigma
        self._clip = clip
        self._logs: deque[float] = deque(maxlen=_KEPT)

    @property
    def limit(self) -> float:
        """The largest norm that is in line; infinite while too few are known."""
        if not self.sigma or len(self._logs) < _FEWEST:
            return math.inf
        mean = math.fsum(self._logs) / len(self._logs)
        variance = math.fsum((log - mean) ** 2 for log in self._logs) / len(self._logs)
        deviation = max(math.sqrt(variance), _LEAST_DEVIATION)
        return max(self._clip, math.exp(min(mean + self.sigma * deviation, 700.0)))

    def add(self, norm: float) -> None:
        """A step's finite norm; 0 says nothing."""
        if norm > 0:
            self._logs.append(math.log(norm))

    def history(self) -> list[float]:
        """What a later guard continues from."""
        return list(self._logs)

    def restore(self, history: Iterable[float]) -> None:
        """Continue from an earlier guard's `history`."""
        self._logs = deque(history, maxlen=_KEPT)
