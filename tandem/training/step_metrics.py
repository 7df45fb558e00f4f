"""What a step's updates measure, put together to one value a step; figures as JSON has them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from tandem.engine.hybrid import RLHFEngine
from tandem.engine.state import follow_actor
from tandem.engine.update import Update
from tandem.metrics.timing import Phase
from tandem.types import Experience, TokenBatch


def spreads(experience: Experience) -> dict[str, list[float]]:
    """What a tracker shows as histograms: scores and lengths of answers, advantages and log-ratios
    to the reference of their tokens."""
    mask = experience.batch.response_mask
    shown = {
        "scores": experience.scores.tolist(),
        "lengths": mask.sum(dim=1).tolist(),
        "advantages": experience.advantages[mask].tolist(),
    }
    if experience.ref_logprobs is not None:
        shown["log_ratios"] = (experience.old_logprobs - experience.ref_logprobs)[mask].tolist()
    return shown


class Means:
    """Means over a step's updates, largest values, and counts, by metric name."""

    def __init__(self) -> None:
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._largest: dict[str, float] = {}
        self._counts: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, value: float) -> None:
        """One update's value of what is averaged."""
        self._values[name].append(value)

    def has(self, name: str) -> bool:
        """Whether an update had a value of what is averaged."""
        return name in self._values

    def maximum(self, name: str, value: float) -> None:
        """One update's value of what is largest over all."""
        self._largest[name] = max(value, self._largest.get(name, value))

    def latest(self, name: str, value: float) -> None:
        """One of which only the last value matters."""
        self._largest[name] = value

    def count(self, name: str, number: float = 1) -> None:
        """So many more of it."""
        self._counts[name] += number

    def means(self) -> dict[str, float]:
        """All of them, by name."""
        means = {name: sum(values) / len(values) for name, values in self._values.items()}
        return {**means, **self._largest, **self._counts}


def note_steps(engine: RLHFEngine, update: Update, log: Means) -> None:
    """Log the steps that an update took; average and reference follow the actor's."""
    for name, norm in update.grad_norms.items():
        log.add(f"{name}_grad_norm", norm)
    for name, value in update.scaling.items():
        log.latest(name, value)
    if "actor" in update.grad_norms:
        for name, number in {"updates": 1, **follow_actor(engine)}.items():
            log.count(name, number)


def count_rows(phase: Phase, batch: TokenBatch) -> None:
    """Add rows, and their tokens without padding, to what a phase has processed."""
    phase.samples += len(batch)
    phase.tokens += int(batch.on_host().attention_mask.sum())


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Those that JSON can represent."""
    return {name: value for name, value in figures.items() if math.isfinite(value)}
