"""What a knob is: a dataclass field with a range, whose help is the string below it."""

from __future__ import annotations

from dataclasses import field
from typing import Any

SUPERVISED = ("sft", "reward", "dpo")
STEPS = (*SUPERVISED, "ppo")
RL = ("train", "ppo")
"""Commands, to be listed as a knob's `common`."""


def knob(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    common: bool | tuple[str, ...] = False,
) -> Any:
    """A field with a range; `common` puts its flag on the first help page, of all commands or of
    those it lists."""
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    listed = ("train", *STEPS) if common is True else common or ()
    metadata = {"bounds": {k: v for k, v in bounds.items() if v is not None}, "common": listed}
    return field(default=default, metadata=metadata)
