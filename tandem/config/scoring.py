"""The knobs of reward functions: how they are run, combined and tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.config.knob import knob


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """How reward functions are run, combined and tested."""

    deadline_seconds: float = knob(5.0, gt=0)
    """Longest that a reward function may take for one answer; then its worker process is killed
    and replaced, and the answer counts as failed."""
    workers: int = knob(0, ge=0)
    """Processes that score answers side by side; 0: one per core, at most 16. More of them pay
    where a reward function waits for a service."""
    memory_gb: float = knob(4.0, ge=0)
    """Memory in GiB that a worker process may map beyond what the function's imports take; 0 sets
    no limit."""
    on_none: Literal["drop", "zero"] = knob("drop")
    """An answer for which every reward is None: leave it out of the update, or score it 0."""
    on_failure: Literal["none", "zero", "stop"] = knob("none")
    """An answer on which a reward function fails (it raises, takes too long, dies, returns no
    number): its reward is None, or 0, or the run stops. Failures are counted either way."""
    combine: Literal["sum", "group"] = knob("sum")
    """Several rewards make one score: their weighted sum, or the weighted sum of each normalized
    first within the answers to one prompt (GDPO, arXiv:2601.05242)."""
    self_test: bool = knob(True)
    """Before the first step, check on a few rows that each reward function scores the reference
    answer above an empty one and above another row's; stop if it does not."""
    answer_column: str = knob("answer")
    """The column with a row's reference answer; reward functions get it as `answer`."""
