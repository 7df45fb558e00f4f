"""The message of a bad row."""

from __future__ import annotations

from tandem.data.rows import BadRow, RowProblem
from tandem.errors import DataError
from tandem.types import Source


def test_the_message_has_place_field_rule_found_and_advice() -> None:
    problem = RowProblem("messages.role", "'asst' in turn 3", "be one of x, y", "Try x.")
    row = problem.at(Source("a", "f.jsonl", 7))
    assert isinstance(row.error(), DataError)
    assert str(row.error()) == (
        "f.jsonl:7: field messages.role must be one of x, y; found 'asst' in turn 3. Try x. "
        "Fix the row, or drop and count such rows with --on-bad-row drop; "
        "`tandem data check` lists them all."
    )
    assert row.reason == "messages.role must be one of x, y"
    assert str(problem) == "messages.role must be one of x, y; found 'asst' in turn 3. Try x."


def test_a_whole_row() -> None:
    row = BadRow(Source("a", "f", 1), "", "a list of 2", "be one JSON object")
    assert str(row.error()).startswith("f:1: the row must be one JSON object; found a list of 2. F")
    assert row.reason == "row must be one JSON object"
