"""What a knob is: a dataclass field with a range, whose help is the string below it."""

from __future__ import annotations

from dataclasses import MISSING, field, fields
from typing import Any

from tandem.errors import ConfigError

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


def require_sections(config: Any) -> None:
    """Refuse a section that is no section's dataclass: nobody would check what is in it.

    Raises:
        ConfigError: naming the section and what to write.
    """
    for f in fields(config):
        section: Any = f.default_factory
        value = getattr(config, f.name)
        if section is not MISSING and not isinstance(value, section):
            raise ConfigError(
                f"{type(config).__name__}.{f.name} must be a {section.__name__}; got {value!r}. "
                f"Write {section.__name__}(...), or build_config({{{f.name!r}: {{...}}}}), which "
                "takes mappings."
            )
