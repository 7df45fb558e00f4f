"""Values of rows as short, printable, single-line text."""

from __future__ import annotations

from typing import Any

from tandem.text import visible


def excerpt(text: str, width: int = 60) -> str:
    """The first `width` characters of `text` in quotes, made visible."""
    dots = "..." if len(text) > width else ""
    return f"'{visible(text[:width])}{dots}'"


def describe(value: Any) -> str:
    """One line about any value of a row, in the terms of data files.

    Example: describe([1, 2]) is "a list of 2".
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return excerpt(value)
    if isinstance(value, int | float):
        return f"the number {visible(str(value))[:30]}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object with {names(value)}"
    return f"a {type(value).__name__}"


def names(columns: Any, limit: int = 8) -> str:
    """The names of a row's columns, at most `limit` of them.

    Example: names({"a": 1, "b": 2}) is "columns a, b".
    """
    found = [_shown(str(name)) for name in columns]
    if not found:
        return "no columns"
    more = f" and {len(found) - limit} more" if len(found) > limit else ""
    return f"columns {', '.join(found[:limit])}{more}"


def _shown(name: str) -> str:
    """A name of at most 30 characters, in quotes if white space at its ends would not be seen."""
    shown = visible(name)[:30]
    return shown if name == name.strip() else f"'{shown}'"
