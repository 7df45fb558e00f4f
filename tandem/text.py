"""Text from files, models and errors, made safe to print."""

from __future__ import annotations

import unicodedata

from tandem.errors import TandemError

# Not printable, but harmless to a terminal: spaces of other widths, unassigned and private-use code
# points; and the joiners of scripts and emoji.
_HARMLESS = ("Zs", "Cn", "Co")
_KEPT = "\n\t\u200c\u200d"


def visible(text: str) -> str:
    """`text` with every character that does not print (controls, bidi marks) escaped.

    Rows come from anywhere: an escape sequence in them must not move the cursor or set a window's
    title. A line break becomes the two characters of its escape.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def visible_lines(text: str) -> str:
    """As `visible`, but newlines, tabs, spaces of any width and the joiners of scripts and emoji
    stay.

    Example: visible_lines("a\\x1b[31m") is a, backslash, x1b[31m: it colors nothing.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_harmless(char) else ascii(char)[1:-1] for char in text)


def is_unicode(text: str) -> bool:
    """Whether it can be encoded: bytes of a command line that are not UTF-8 arrive as lone
    surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def counted(number: int, noun: str) -> str:
    """A number of things: 1 row, 1,024 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def class_name(given: object) -> str:
    """The name of an argument's class; a class in place of an object is called one."""
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


def one_line(error: BaseException) -> str:
    """An error's message in one printable line of at most 300 characters."""
    text = visible(" ".join(_message(error).split()) or type(error).__name__)
    return text if len(text) <= 300 else text[:297] + "..."


def cause_of(error: BaseException) -> str:
    """An error's message as part of a sentence: in one line, without the period at its end."""
    text = one_line(error)
    return text if text.endswith("...") else text.rstrip(".")


def ignore_line(line: str) -> None:
    """A `print_line` that shows nothing."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its class if it has none."""
    return next(iter(_message(error).strip().splitlines()), type(error).__name__)


def named_line(error: BaseException) -> str:
    """An exception as one line: its class, unless it is ours, and its message's first line."""
    line, name = first_line(error), type(error).__name__
    return line if isinstance(error, TandemError) or line == name else f"{name}: {line}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a foreign class whose __str__ fails
        return ""


def _is_harmless(char: str) -> bool:
    return char.isprintable() or char in _KEPT or unicodedata.category(char) in _HARMLESS
