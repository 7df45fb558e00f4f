"""Rows before they have a shape: one read as written, one that cannot be read, and its message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.errors import DataError
from tandem.text import visible
from tandem.types import Source

Row = Mapping[str, Any]
"""Column name to value."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as its file has it: column name to value.

    is_of_table: it is from an Arrow table, all structs of which have the same keys, null where a
        row did not give one.
    """

    columns: Row
    source: Source
    is_of_table: bool = False


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used.

    field: the column (or a dotted path inside it); "" for the whole row.
    found, expected: what it is, and what it must do ("be one JSON object").
    advice: a sentence about this row ("The nearest role is assistant."), or "".
    map: a column map that makes it readable, and with it all rows like it; or "".
    """

    source: Source
    field: str
    found: str
    expected: str
    advice: str = ""
    map: str = ""

    @property
    def reason(self) -> str:
        """The name of the problem, without the row's own text, to count rows by."""
        return f"{self.field or 'row'} must {self.expected}"

    def error(self) -> DataError:
        """The error for this row."""
        where = f"field {visible(self.field)}" if self.field else "the row"
        told = f"{visible(str(self.source))}: {where} must {self.expected}; found {self.found}."
        if self.map:  # the other rows are no better
            return DataError(f"{told} Map them: {visible(self.source.path)}::{self.map}")
        advice = f"{self.advice} " if self.advice else ""
        return DataError(
            f"{told} {advice}Fix the row, or drop and count such rows with --on-bad-row drop; "
            "`tandem data check` lists them all."
        )


class RowProblem(DataError):  # noqa: N818 - an error only once it has a place
    """Why a row cannot be used. See BadRow for the fields."""

    def __init__(
        self, field: str, found: str, expected: str, advice: str = "", map_: str = ""
    ) -> None:
        self.field = field
        self.found = found
        self.expected = expected
        self.advice = advice
        self.map = map_
        super().__init__(f"{field or 'the row'} must {expected}; found {found}. {advice}".strip())

    def at(self, source: Source) -> BadRow:
        """The same with a place."""
        return BadRow(source, self.field, self.found, self.expected, self.advice, self.map)
