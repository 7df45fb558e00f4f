"""What a knob is: a dataclass field with a range, whose help is the string below it."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def knob(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    common: bool = False,
) -> Any:
    """A field with a range; `common` puts its flag on the first help page."""
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    metadata = {"bounds": {k: v for k, v in bounds.items() if v is not None}, "common": common}
    return field(default=default, metadata=metadata)
