"""What a command is doing with many rows, on stderr, once it takes longer than a moment."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

from rich.cells import cell_len

from tandem.data.reading.formats import OnBlank, Rows
from tandem.data.reading.sources import DataSpec, read_rows
from tandem.text import visible

Item = TypeVar("Item")
_FIRST_SECONDS = 1.0
"""Before it says nothing by default, since short work needs no word."""
_TERMINAL_SECONDS, _LINE_SECONDS = 0.2, 10.0
"""Between two updates of a terminal's line, and between two lines elsewhere."""
_CLEAR = "\r\x1b[K"


class Progress:
    """One line that is rewritten in a terminal; elsewhere a line now and then.

    A context manager, which clears a terminal's line at its end.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        after: float = _FIRST_SECONDS,
    ) -> None:
        """
        Args:
            out: stderr by default. after: seconds before the first word.
        """
        self._out = out or sys.stderr
        self._clock = clock
        self._is_terminal = self._out.isatty()
        self._said = clock()
        self._next = self._said + after
        self._what = self._shown = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def begin(self, what: str, *, at_once: bool = False) -> None:
        """From now on it does `what`: said at once if asked, or a second after the last word."""
        self._what = what
        if self._shown:
            since = 0.0 if self._is_terminal else _FIRST_SECONDS
            self._next = min(self._next, self._said + since)
        self._say(f"{what} ...", is_new=at_once)

    def rows_of(self, spec: DataSpec, *, on_blank: OnBlank) -> Rows:
        """A data set's rows, counted as they are read."""
        self.begin(f"reading {visible(spec.path)}")
        return self.over(read_rows(spec, on_blank=on_blank))

    def over(self, items: Iterable[Item], total: int | None = None) -> Iterator[Item]:
        """The items, counted as they are asked for.

        Args:
            total: how many there will be, if that is known.
        """
        of = "" if total is None else f" of {total:,}"
        for number, item in enumerate(items):
            if number % 16 == 0:
                self._say(f"{self._what}: {number:,}{of} rows")
            yield item

    def clear(self) -> None:
        """Remove a terminal's line, before something else is printed."""
        if self._is_terminal and self._shown:
            self._out.write(_CLEAR)
            self._out.flush()

    def _say(self, line: str, *, is_new: bool = False) -> None:
        now = self._clock()
        if now < self._next and not is_new:
            return
        self._said = now
        self._next = now + (_TERMINAL_SECONDS if self._is_terminal else _LINE_SECONDS)
        self._shown = line
        self._out.write(f"{_CLEAR}{self._fitting(line)}" if self._is_terminal else f"{line}\n")
        self._out.flush()

    def _fitting(self, line: str) -> str:
        """The line as one of the terminal's, of which alone `_CLEAR` takes back; its end is kept,
        which counts."""
        try:
            width = os.get_terminal_size(self._out.fileno()).columns - 1
        except OSError:
            width = 0
        if width <= 1 or cell_len(line) <= width:
            return line
        while cell_len(line) > width - 1:
            line = line[1:]
        return f"…{line}"
