"""Evenly spaced rows of data sets, for a plan: it needs their number and how long rows are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from tandem.data.formats import OnBlank
from tandem.data.rows import BadRow, RawRow
from tandem.data.sources import DataSpec, parse_spec, read_rows

MOST = 6000
"""Rows that are kept of all data sets together."""
_OF_EMBEDDED = 4
"""Of the built-in data set only the first of so many parts is made: its rows are drawn one by one
alike, and to make all of them takes longer than the plan."""
Row = RawRow | BadRow
Item = TypeVar("Item")
Read = Callable[..., Iterator[Row]]


def sampled(names: Sequence[str], most: int = MOST) -> tuple[Read, int]:
    """What reads a sample of the data sets in place of `sources.read_rows`, and how many rows each
    of its rows stands for: 1 where all of them are few.

    Args:
        names: data sets as for `dataset.load_data`.
    Raises:
        ConfigError, DataError: as `parse_spec` and `read_rows`.
    """
    found = {spec.path: _thinned(spec, most) for spec in map(parse_spec, names)}
    every = max(step for _, step in found.values())
    while sum(len(kept[:: every // step]) for kept, step in found.values()) > most:
        every *= 2
    kept_of = {path: kept[:: every // step] for path, (kept, step) in found.items()}

    def read(spec: DataSpec, *, on_blank: OnBlank = lambda: None) -> Iterator[Row]:
        yield from kept_of[spec.path]

    return read, every


def _thinned(spec: DataSpec, most: int) -> tuple[list[Row], int]:
    """At most `most` rows, and how many each stands for: a power of two."""
    if spec.path == "embedded":
        from tandem.data.embedded.generator import NUM_ROWS

        return list(islice(read_rows(spec), NUM_ROWS // _OF_EMBEDDED)), _OF_EMBEDDED
    return thin(read_rows(spec), most)


def thin(rows: Iterable[Item], most: int) -> tuple[list[Item], int]:
    """Every first, every second, every fourth ... row, so that at most `most` are left; and how
    many rows each stands for."""
    kept: list[Item] = []
    every = 1
    for number, row in enumerate(rows):
        if number % every:
            continue
        kept.append(row)
        if len(kept) > most:
            del kept[1::2]
            every *= 2
    return kept, every
