"""The flags of `tandem train` on layouts, removed before the rest is read. Light: no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip


_LEAST = 2**20
"""Bytes: a smaller number is one of GiB without its unit."""


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """Whether a layout is to be chosen, and within how many bytes a rank (None: the device's)."""

    auto: bool = False
    limit: float | None = None


def take_layout_flags(argv: Sequence[str]) -> tuple[LayoutOptions, list[str]]:
    """`--auto-layout` and `--memory-limit SIZE`, and the rest of the command line.

    Raises:
        ConfigError: a limit that is no size, is given twice, or goes without --auto-layout.
    """
    rest: list[str] = []
    auto, limit = False, None
    words = iter(argv)
    for word in words:
        flag, has_value, value = word.partition("=")
        name = flag.replace("_", "-")
        if name == "--auto-layout" and not has_value:
            auto = True
        elif name == "--memory-limit":
            if limit is not None:
                raise ConfigError("--memory-limit must be given once; got it twice. Remove one.")
            limit = memory_bytes(value if has_value else next(words, ""))
        else:
            rest.append(word)
    if limit is not None and not auto:
        raise ConfigError("--memory-limit must go with --auto-layout; got it alone. Add that.")
    return LayoutOptions(auto, limit), rest


def memory_bytes(text: str) -> float:
    """A size such as 2GiB, 800MB or 1.5g.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", text.strip().lower())
    unit = match[2] if match else "?"
    factor = _UNITS.get(unit) or _UNITS.get(f"{unit}ib")
    size = 0.0 if match is None or factor is None else float(match[1]) * factor
    if size < _LEAST:
        raise ConfigError(
            f"--memory-limit must be a size such as 2GiB or 800MiB, at least 1MiB; got {text!r}."
        )
    return size


def layout_help() -> str:
    """The paragraph on layouts for the run commands' help."""
    return (
        "Layout:\n"
        "  --auto-layout\n"
        "      Take the fastest ZeRO stages, offload, micro-batches, checkpointing and\n"
        "      answers at once that fit; prints what it takes and why.\n"
        "  --memory-limit SIZE\n"
        "      With it: bytes that a rank may hold, as 2GiB. [the device's memory]"
    )
