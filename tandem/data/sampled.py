"""Evenly spaced rows of data sets, for a plan: it needs their number and how long rows are.

Of graded answers evenly spaced blocks of rows are taken: answers to one prompt, which may be
compared, mostly follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

from tandem.data.grades import grade_columns
from tandem.data.reading.formats import OnBlank
from tandem.data.reading.parts import EMBEDDED
from tandem.data.reading.sources import DataSpec, parse_spec, read_rows
from tandem.data.rows import BadRow, RawRow

MOST = 6000
"""Rows that are kept of all data sets together."""
_OF_EMBEDDED = 4
"""Parts of the built-in data set, of which only the first is made: its rows are drawn one by one
alike, and to make all of them takes longer than the plan."""
_BLOCK = 16
"""Rows of a block of graded answers."""
Row = RawRow | BadRow
Item = TypeVar("Item")
Read = Callable[..., Iterator[Row]]


def sampled(names: Sequence[str], most: int = MOST) -> tuple[Read, int]:
    """What reads a sample of the data sets in place of `sources.read_rows`, and how many rows each
    of its rows stands for: 1 where all of them are few.

    Args:
        names: data sets as for `dataset.load_data`.
        most: rows of all data sets together; of more data sets than that, one row each.
    Raises:
        ConfigError, DataError: as `parse_spec` and `read_rows`.
    """
    specs = {spec.path: spec for spec in map(parse_spec, names)}
    # The first block of each data set is always kept: so large, they are `most` together.
    most, largest = max(most, len(specs)), max(1, most // len(specs))
    found = {path: _thinned(spec, most, largest) for path, spec in specs.items()}
    every = max(kept.every for kept in found.values())
    while sum(len(kept.thinned(every)) for kept in found.values()) > most:
        every *= 2
    rows = {path: kept.thinned(every) for path, kept in found.items()}

    def read(spec: DataSpec, *, on_blank: OnBlank = lambda: None) -> Iterator[Row]:
        yield from rows[spec.path]

    return read, every


@dataclass(frozen=True, slots=True)
class _Kept:
    """Rows of a data set, each for `every`, a power of two, of its own; taken in blocks."""

    rows: Sequence[Row]
    every: int
    block: int

    def thinned(self, every: int) -> list[Row]:
        """Those of which each stands for `every`."""
        return _blocks(self.rows, every // self.every, self.block)


def _thinned(spec: DataSpec, most: int, largest: int) -> _Kept:
    """At most `most` rows, but for the built-in data set's; in blocks of at most `largest`."""
    rows = read_rows(spec)
    first = list(islice(rows, 1))
    block = min(largest, _block(spec, first))
    if spec.path == EMBEDDED:
        from tandem.data.embedded.generator import NUM_ROWS

        some = islice(chain(first, rows), NUM_ROWS // _OF_EMBEDDED)
        return _Kept(list(some), _OF_EMBEDDED, block)
    return _Kept(*thin(chain(first, rows), most, block), block)


def _block(spec: DataSpec, rows: Sequence[Row]) -> int:
    """How many rows in a row are taken: several if the first has a grade."""
    first = rows[0] if rows else None
    if not isinstance(first, RawRow):
        return 1
    has_grade = "grade" in spec.columns or "grade" in first.columns or grade_columns(first.columns)
    return _BLOCK if has_grade else 1


def thin(rows: Iterable[Item], most: int, block: int = 1) -> tuple[list[Item], int]:
    """Every first, every second, every fourth ... row, so that at most `most` are left; and how
    many rows each stands for.

    Args:
        block: rows that stay together: every n-th block is taken whole. It must be at most
            `most`: the first block is always kept.
    """
    kept: list[Item] = []
    every = 1
    for number, row in enumerate(rows):
        if number // block % every:
            continue
        kept.append(row)
        if len(kept) > most:
            kept = _blocks(kept, 2, block)
            every *= 2
    return kept, every


def _blocks(rows: Sequence[Item], every: int, block: int) -> list[Item]:
    """Every n-th block of rows."""
    return [row for number, row in enumerate(rows) if number // block % every == 0]
