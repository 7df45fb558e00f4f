"""A user's YAML file of a device, as `--hardware` takes it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tandem.errors import ConfigError

_RATES = ("TFLOP/s", 1, 100_000)
_UNITS: dict[str, tuple[str, float, float]] = {
    "bf16": _RATES,
    "fp32": _RATES,
    "memory": ("GB", 1, 2000),
    "bandwidth": ("GB/s", 10, 100_000),
    "link": ("GB/s", 0.1, 10_000),
    "network": ("GB/s", 0.01, 10_000),
    "disk": ("GB/s", 0.01, 1000),
    "price": ("dollars per hour and device", 0, 1000),
    "per_node": ("devices", 1, 1000),
    "count": ("devices", 1, 1_000_000),
}
"""Unit of each number, and the least and most that are taken: others are in another unit."""
NEEDED = ("bf16", "fp32", "memory", "bandwidth", "link", "network")
_WHOLE = ("per_node", "count")
_TEXTS = ("name",)


def read_values(path: Path) -> dict[str, Any]:
    """The names and values of a file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or _first_problem(error)
        raise ConfigError(f"--hardware {path} must be a YAML file; got: {why}.") from None
    if not isinstance(values, dict):
        got = " ".join(repr(values).split())[:80]
        raise ConfigError(f"--hardware {path} must hold names and numbers; got {got}.")
    return values


def _first_problem(error: Exception) -> str:
    """What is wrong and in which line, where YAML says it."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error).splitlines()[0]
    return f"{getattr(error, 'problem', '')}, line {mark.line + 1}"


def checked_entry(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A device as in the package's table, with its name and count.

    Raises:
        ConfigError: a name is unknown or missing, or a number is none or in another unit.
    """
    known = (*_UNITS, *_TEXTS)
    for name in map(str, values):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"--hardware {path} must hold {', '.join(known)}; got {name!r}. "
                f"{f'Did you mean {near[0]}?' if near else 'Remove it.'}"
            )
    if missing := [name for name in NEEDED if values.get(name) is None]:
        units = ", ".join(f"{name} in {_UNITS[name][0]}" for name in NEEDED)
        raise ConfigError(
            f"--hardware {path} must give {units}; got no {missing[0]}. The maker's data sheet "
            "has it; take dense rates."
        )
    found: dict[str, Any] = {"per_node": 8, "count": 1, "price": None, "name": path.stem}
    for name, value in values.items():
        if name in _UNITS and value is not None:
            found[name] = _number(name, value, path)
        elif name in _TEXTS:
            found[name] = str(value)
    return found


def _number(name: str, value: Any, path: Path) -> float:
    unit, least, most = _UNITS[name]
    try:  # YAML reads 9.9e2 as a number, 99e1 as text
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number <= most or (name in _WHOLE and number != int(number)):
        kind = "a whole number" if name in _WHOLE else "a number"
        raise ConfigError(
            f"--hardware {path}: {name} must be {kind} of {unit}, {least:,} to {most:,}; got "
            f"{value!r}. Write the number alone."
        )
    return int(number) if name in _WHOLE else number
