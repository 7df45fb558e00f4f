"""What a metric is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STAGES = ("sft", "reward", "dpo", "ppo")
"""The stages that log, in the order a run may take them."""

PHASES = ("generate", "score", "train", "evaluate", "save", "step")
"""The timed parts of a step; `step` is the whole of it and contains the others."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number that a stage logs.

    name: as in metrics.jsonl. A name that ends in `/*` declares a family: `seconds/*` allows
        `seconds/train`; `members` says which endings there are (empty: any, as data set names).
    unit: what 1 means. `share` is a fraction of 1, `ratio` has no unit.
    stages: who logs it, of STAGES.
    meaning: one sentence, with the denominator where there is one.
    source: paper or system that the definition follows, if any.
    healthy: what it looks like in a run that goes well.
    better: which way is good, where one is always good.
    """

    name: str
    unit: str
    stages: tuple[str, ...]
    meaning: str
    source: str | None = None
    healthy: str = ""
    better: Literal["higher", "lower", ""] = ""
    members: tuple[str, ...] = ()
