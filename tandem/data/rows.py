"""Rows before they have a shape: one read as written, one that cannot be read, and its message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.errors import DataError
from tandem.text import visible
from tandem.types import Source


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as its file has it: column name to value."""

    columns: Mapping[str, Any]
    source: Source


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used.

    field: the column (a dotted path inside it), or "" for the whole row.
    found, expected: what is there, and what `field` must do ("be one JSON object").
    advice: a sentence about this very row ("The nearest role is assistant."), or "".
    """

    source: Source
    field: str
    found: str
    expected: str
    advice: str = ""

    @property
    def reason(self) -> str:
        """What rows with the same trouble are counted under: nothing of the row's own text."""
        return f"{self.field or 'row'} must {self.expected}"

    def error(self) -> DataError:
        """The error that stops a run at this row."""
        where = f"field {visible(self.field)}" if self.field else "the row"
        advice = f"{self.advice} " if self.advice else ""
        return DataError(
            f"{visible(str(self.source))}: {where} must {self.expected}; found {self.found}. "
            f"{advice}"
            "Correct the row, or leave such rows out, counted, with --on-bad-row drop."
        )


class RowProblem(DataError):  # noqa: N818 - not yet an error: the place is still to be added
    """Why a row has no place in any shape. See BadRow for the fields."""

    def __init__(self, field: str, found: str, expected: str, advice: str = "") -> None:
        self.field = field
        self.found = found
        self.expected = expected
        self.advice = advice
        super().__init__(f"{field or 'the row'} must {expected}; found {found}. {advice}".strip())

    def at(self, source: Source) -> BadRow:
        """The same, with the place."""
        return BadRow(source, self.field, self.found, self.expected, self.advice)
