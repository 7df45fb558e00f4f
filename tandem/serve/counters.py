"""What the server counts, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from threading import Lock

_PREFIX = "tandem_"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Counters:
    """Counts by name and labels; safe to use from several threads."""

    def __init__(self) -> None:
        """All zero."""
        self._lock = Lock()
        self._counts: dict[str, Counter[tuple[tuple[str, str], ...]]] = {}
        self._help: dict[str, str] = {}
        self._histograms: dict[str, tuple[list[int], float]] = {}

    def add(self, name: str, about: str, amount: float = 1, **labels: str) -> None:
        """Count up; `about` is the help line of the metric."""
        with self._lock:
            self._help[name] = about
            key = tuple(sorted(labels.items()))
            self._counts.setdefault(name, Counter())[key] += amount  # type: ignore[assignment]

    def observe(self, name: str, about: str, seconds: float) -> None:
        """Add a duration to a histogram."""
        with self._lock:
            self._help[name] = about
            counts, total = self._histograms.get(name, ([0] * (len(_SECONDS) + 1), 0.0))
            for i, border in enumerate((*_SECONDS, float("inf"))):
                counts[i] += seconds <= border
            self._histograms[name] = counts, total + seconds

    def page(self, gauges: Mapping[str, tuple[str, Mapping[str, float]]]) -> str:
        """All counts, and the present state.

        Args:
            gauges: by name, the help line and values by the label `model` ("" for no label).
        """
        lines: list[str] = []
        with self._lock:
            for name, counts in sorted(self._counts.items()):
                lines += _head(name, self._help[name], "counter")
                for key, amount in sorted(counts.items()):
                    lines.append(f"{_PREFIX}{name}{_labels(dict(key))} {_number(amount)}")
            for name, (buckets, total) in sorted(self._histograms.items()):
                lines += _head(name, self._help[name], "histogram")
                for count, border in zip(buckets, (*map(str, _SECONDS), "+Inf"), strict=True):
                    lines.append(f"{_PREFIX}{name}_bucket{_labels({'le': border})} {count}")
                lines.append(f"{_PREFIX}{name}_sum {_number(total)}")
                lines.append(f"{_PREFIX}{name}_count {buckets[-1]}")
        for name, (about, values) in gauges.items():
            lines += _head(name, about, "gauge")
            for model, value in values.items():
                labels = {"model": model} if model else {}
                lines.append(f"{_PREFIX}{name}{_labels(labels)} {_number(value)}")
        return "\n".join(lines) + "\n"


def _head(name: str, about: str, kind: str) -> list[str]:
    return [f"# HELP {_PREFIX}{name} {about}", f"# TYPE {_PREFIX}{name} {kind}"]


def _number(value: float) -> str:
    """All digits: a rate is the difference of two large counts."""
    return str(int(value)) if value == int(value) else repr(value)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
