"""What a metric is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.config.stages import stage_of

STAGES = ("sft", "reward", "dpo", "ppo")
"""The stages that declare metrics, in the order a run may take them."""

PHASES = ("generate", "score", "train", "evaluate", "save", "step")
"""The timed parts of a step; `step` is the whole of it and contains the others."""


def declared_by(stage: str) -> str:
    """The stage whose metrics, alarms and panels a stage has: itself, if it declares any, else the
    first that learns from the same and leaves the same.

    Raises:
        ConfigError: there is no such stage.
    """
    if stage in STAGES:
        return stage
    record, known = stage_of(stage), map(stage_of, STAGES)
    kin = [s.name for s in known if (s.family, s.leaves) == (record.family, record.leaves)]
    return kin[0]


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
