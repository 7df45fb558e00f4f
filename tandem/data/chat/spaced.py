"""Marks that a template writes around calls, found whatever white space a model writes there."""

from __future__ import annotations

import re

_SPACE = re.compile(r"\s*")
_MOST_SPACE = 16
"""Letters of white space within a mark that has only begun, beside as many as the mark has."""


class Spaced:
    """Text that is found whatever white space stands in and around it."""

    def __init__(
        self, text: str, *, behind_value: bool = False, before_value: bool = False
    ) -> None:
        """behind_value, before_value: white space on that side is an argument's, but for as much as
        the template writes there."""
        self.text = text.strip()
        self._pattern = re.compile(r"\s*".join(map(re.escape, text.split())))
        self._left = text[: len(text) - len(text.lstrip())] if behind_value else None
        self._right = text[len(text.rstrip()) :] if before_value else None

    def search(self, text: str, at: int) -> tuple[int, int] | None:
        """Where it is found first, with white space around it; None where it is empty, too."""
        found = self._pattern.search(text, at) if self.text else None
        if found is None:
            return None
        start, end = found.span()
        if self._left is None:
            start = at + len(text[at:start].rstrip())
        elif text.endswith(self._left, at, start):
            start -= len(self._left)
        if self._right is None:
            end = behind_space(text, end)
        elif text.startswith(self._right, end):
            end += len(self._right)
        return start, end

    def opens(self, text: str) -> int:
        """Where its first letters stand at the end of a text; the text's length if they do not."""
        whole = "".join(self.text.split())
        for start in range(max(0, len(text) - 2 * len(self.text) - _MOST_SPACE), len(text)):
            tail = "".join(text[start:].split())
            if tail and whole.startswith(tail):
                return start
        return len(text)

    def match(self, text: str, at: int) -> int | None:
        """Where it ends, if it stands here; None where it is empty, too."""
        at = behind_space(text, at)
        found = self._pattern.match(text, at) if self.text else None
        return behind_space(text, found.end()) if found else None


def behind_space(text: str, at: int) -> int:
    """Where white space that may stand here ends."""
    found = _SPACE.match(text, at)
    return found.end() if found else at
