"""Text from files, models and errors made safe to print."""

from __future__ import annotations

import unicodedata

from tandem.errors import TandemError

# What does not print but does nothing to a terminal: spaces of other widths, code points of a newer
# Unicode or of private use; and the joiners of scripts and emoji.
_HARMLESS = ("Zs", "Cn", "Co")
_KEPT = "\n\t\u200c\u200d"


def visible(text: str) -> str:
    """`text` with every character that does not print (controls, bidi marks) as its escape.

    Rows come from anywhere: an escape sequence among them must not move the cursor or set a
    window's title. A line break shows as the two characters of its escape.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def visible_lines(text: str) -> str:
    """Text of several lines for people: as `visible`, but newlines, tabs, spaces of any width and
    the joiners of scripts and emoji stay.

    Example: visible_lines("a\\x1b[31m") is a, backslash, x1b[31m: it colors nothing.
    """
    return "".join(char if _is_harmless(char) else ascii(char)[1:-1] for char in text)


def one_line(error: BaseException) -> str:
    """What an error says, in at most 300 characters of one line that prints."""
    text = visible(" ".join(_message(error).split()) or type(error).__name__)
    return text if len(text) <= 300 else text[:297] + "..."


def first_line(error: BaseException) -> str:
    """The first line of what an error says; its class where it says nothing."""
    return next(iter(_message(error).strip().splitlines()), type(error).__name__)


def named_line(error: BaseException) -> str:
    """An exception as one line: its class, unless it is ours, and the first line it says."""
    line, name = first_line(error), type(error).__name__
    return line if isinstance(error, TandemError) or line == name else f"{name}: {line}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an error of someone's own class, whose text is another mistake
        return ""


def _is_harmless(char: str) -> bool:
    return char.isprintable() or char in _KEPT or unicodedata.category(char) in _HARMLESS
