"""What reward functions see of the data's rows: their columns, and the reference as `answer`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.rewards.binding import GIVEN

ANSWER = "answer"
"""The name of the reference answer for reward functions, and its column by default."""
_ELSEWHERE = ("reward_model.ground_truth", "reward_spec.ground_truth", "extra_info.answer")
"""Where rows made for verl and SkyRL have it, in the order in which they are tried."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ColumnAccount:
    """What becomes of rows' columns.

    names: what functions are given, sorted. num_rows, num_answers: all rows, and those with a
    reference answer. answers_at: from where `answer` is taken where the row has no such column
    itself, to the rows. left_out: columns with a name that functions are given anyway, to the rows.
    """

    names: tuple[str, ...]
    num_rows: int
    num_answers: int
    answers_at: Mapping[str, int]
    left_out: Mapping[str, int]

    def lines(self) -> list[str]:
        """What a user did not ask for, a line each."""
        return [
            f"reward functions get answer from {path} on {count:,} of {self.num_rows:,} rows, "
            "which have no column answer (--scoring.answer-column names another)"
            for path, count in self.answers_at.items()
        ] + [
            f"reward functions get {name} from Tandem: the data's column of that name, in "
            f"{count:,} of {self.num_rows:,} rows, is left out for them"
            for name, count in self.left_out.items()
        ]


def account_of(rows: Iterable[Row], answer_column: str = ANSWER) -> ColumnAccount:
    """What becomes of these rows' columns."""
    names: set[str] = set()
    answers_at: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    num_rows = num_answers = 0
    for row in rows:
        num_rows += 1
        names |= row.keys()
        left_out.update(name for name in GIVEN if name in row)
        path, answer = _reference(row, answer_column)
        if answer is None:
            continue
        num_answers += 1
        names.add(ANSWER)
        if path != answer_column:
            answers_at[path] += 1
    given = tuple(sorted(names - set(GIVEN)))
    return ColumnAccount(given, num_rows, num_answers, answers_at, left_out)


def columns_of(
    rows: Sequence[Row], answer_column: str = ANSWER, names: Iterable[str] = ()
) -> dict[str, list[Any]]:
    """The rows' columns as lists, with None where a row lacks one.

    Args:
        names: columns of other rows, which are given too.
    """
    every = {*names, *account_of(rows, answer_column).names}
    columns = {name: [row.get(name) for row in rows] for name in sorted(every)}
    if ANSWER in columns:
        columns[ANSWER] = [_reference(row, answer_column)[1] for row in rows]
    return columns


def _reference(row: Row, answer_column: str) -> tuple[str, Any]:
    """Where a row's reference answer is, and that answer; None if it has none."""
    places = (ANSWER, *_ELSEWHERE) if answer_column == ANSWER else (answer_column,)
    for path in places:
        if (value := _value_at(row, path)) is not None:
            return path, value
    return "", None


def _value_at(row: Any, path: str) -> Any:
    """A column's value, or what is nested in one: `reward_model.ground_truth`."""
    if not isinstance(row, Mapping):
        return None
    if path in row:
        return row[path]
    for end, character in enumerate(path):
        if character == "." and path[:end] in row:
            return _value_at(row[path[:end]], path[end + 1 :])
    return None
