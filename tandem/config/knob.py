"""What a knob is: a dataclass field with a range, whose help is the string below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from os.path import expanduser
from typing import Any

from tandem.errors import ConfigError

SUPERVISED = ("supervised", "pairs")
STEPS = (*SUPERVISED, "rl")
RL = ("train", "rl")
"""What a knob's `common` may list: the command train, families of stages, and the roles that they
train. A stage's own section is only on that stage's page (see `Stage.commons`)."""


class Unset:
    """The default of a knob that another one sets where nothing was given, before anybody reads
    it."""

    def __init__(self, in_words: str) -> None:
        """
        Args:
            in_words: the default, as help and reference show it.
        """
        self._in_words = in_words

    def __str__(self) -> str:
        return self._in_words


UNSET = Unset("the algorithm's")


def knob(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    common: bool | tuple[str, ...] = False,
    path: bool = False,
    choices: Callable[[], tuple[str, ...]] | None = None,
) -> Any:
    """A field with a range.

    Args:
        common: its flag is on the first help page, of all commands or of those listed.
        choices: the words that a list may hold, if the type does not say so.
        path: it names files; a leading `~` is the user's home folder (see `at_home`).
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    metadata = {
        "bounds": {k: v for k, v in bounds.items() if v is not None},
        "common": ("train", *STEPS) if common is True else common or (),
        "path": path,
        "choices": choices,
    }
    return field(default=default, metadata=metadata)


def at_home(section: Any) -> None:
    """Expand `~` in a section's path knobs, in place. Done only when a section is made, so that a
    run writes and reads the same path."""
    for f in fields(section):
        if f.metadata.get("path"):
            value = getattr(section, f.name)
            many = isinstance(value, tuple)
            whole = tuple(map(expanduser, value)) if many else expanduser(value)
            object.__setattr__(section, f.name, whole)  # sections are frozen once they are made


def require_sections(config: Any) -> None:
    """Refuse a section that is not its dataclass, whose values nobody would check.

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


def bounds_text(knob: Field[Any]) -> str:
    """A knob's range in words, such as ">= 0 and < 1"; empty if it has none."""
    symbols = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds: dict[str, float] = knob.metadata.get("bounds", {})
    return " and ".join(f"{symbols[name]} {bound:g}" for name, bound in bounds.items())
