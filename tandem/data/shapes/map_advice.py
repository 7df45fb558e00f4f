"""What column map would make a row readable: the advice for a row that has no known shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.data.excerpt import names
from tandem.data.rows import Row, RowProblem
from tandem.data.shapes.aliases import (
    CONTEXTS,
    DIALOGS,
    QUESTIONS,
    given_columns,
    is_conversation,
    prompt_column,
    says_something,
)
from tandem.data.shapes.answer_lists import LISTS
from tandem.data.shapes.mapped_row import COMPARED, MARKS, MappedRow
from tandem.data.shapes.two_answers import pair_of_names

_ROLES = {
    "question": "prompt",
    "instruction": "prompt",
    "answer": "completion",
    "output": "completion",
    "conversations": "messages",
}
"""Roles of the columns that some shapes have in place of a prompt, an answer, or both."""


def unknown_shape(
    row: Row,
    renamed: Row,
    columns: Mapping[str, str],
    needs: Sequence[str],
    lower: Mapping[str, str],
) -> RowProblem:
    """The problem of a row that has no known shape.

    Args:
        row: with the file's names. renamed: with mapped columns under their roles. columns: the
            user's column map. needs: the columns of each known shape, as the error says them.
        lower: role to column, of the shape that the row has with its columns in lower case.
    """
    if gap := _null_in_map(row, columns) or _gap_in_map(row, columns):
        return gap
    if lower:
        return _of_case(row, lower)
    example = (
        "Map its columns, as in FILE::prompt=question,completion=answer, or for pairs "
        "FILE::prompt=question,chosen=better,rejected=worse."
    )
    return RowProblem(
        "",
        names(row) + (f" with {', '.join(columns)} mapped" if columns else ""),
        f"have the columns of a known shape ({'; '.join(needs)})",
        example if columns else _map_of_two(row) or map_to_add(renamed) or example,
    )


def _of_case(row: Row, lower: Mapping[str, str]) -> RowProblem:
    """That a row's columns have a shape but for their case, or white space around them."""
    own = {name.strip().lower(): name for name in row}
    wide = " and without white space around them" if any(n != n.strip() for n in row) else ""
    mapped = ",".join(f"{_ROLES.get(role, role)}={own[column]}" for role, column in lower.items())
    if any(own.get(name) and says_something(row[own[name]]) for name in ("input", "history")):
        mapped = ""  # a map reads the prompt's column alone
    if wide:
        mapped = ""  # nobody would see the space in it
    return RowProblem(
        "",
        names(row),
        f"name its columns in lower case{wide} ({', '.join(lower.values())})",
        "Rename its columns." if not mapped else "",
        mapped,
    )


def map_to_add(row: Row) -> str:
    """Advice on the column map that may make a row readable; "" if none shows."""
    dialogs = [name for name in row if is_conversation(row[name])]
    likely = f"messages={dialogs[0]}" if len(dialogs) == 1 else ""
    if {"chosen", "rejected"} <= row.keys() or "completion" in row:
        heads = given_columns(row, (*DIALOGS, *QUESTIONS, *CONTEXTS)) or dialogs
        likely = f"prompt={heads[0]}" if heads else ""
    return f"Add ::{likely} to the file's name." if likely else ""


def _map_of_two(row: Row) -> str:
    """Advice on the column map of a row with two answers that does not say which is better; "" for
    any other row."""
    two = pair_of_names(name for name, value in row.items() if value is not None)
    if two is None:
        return ""
    columns = "preferred=COLUMN"
    if MappedRow(row, {}).prompt() is None:
        columns = f"prompt=COLUMN,answer_a={two[0]},answer_b={two[1]},{columns}"
    return (
        f"To compare {two[0]} and {two[1]}, add ::{columns} to the file's name, with the "
        "column that says which is better."
    )


def _null_in_map(row: Row, columns: Mapping[str, str]) -> RowProblem | None:
    """That a mapped column without which the row cannot be read is null; None if none is."""
    # A pair may lack its rejected answer.
    for role, column in sorted(columns.items(), key=lambda item: item[0] == "rejected"):
        if row[column] is None and role not in MARKS:
            return RowProblem(column, "null", f"have a value, mapped to the role {role}")
    return None


def _gap_in_map(row: Row, columns: Mapping[str, str]) -> RowProblem | None:
    """What a column map lacks that has some of the roles of a comparison; None of any other."""
    mapped = MappedRow(row, columns)
    if not columns.keys() <= {"prompt", *COMPARED, *MARKS}:
        return None
    roles = dict(columns)
    given = [name for name in row if name not in columns.values()]
    if "prompt" not in columns and row.get("prompt") is None:
        roles["prompt"] = prompt_column({name: row[name] for name in given}) or "COLUMN"
    if mapped.maps("answer_a", "answer_b", "preferred"):
        needs: tuple[str, ...] = ("answer_a", "answer_b", "preferred")
        found = pair_of_names(given) or ("COLUMN", "COLUMN")
    elif mapped.maps("answers", "scores"):
        needs = ("answers", "scores" if row.get("ranks") is None else "ranks")
        found = ([name for name in given if name in LISTS] or ["COLUMN"])[0], "COLUMN"
    else:
        return None
    for role, name in zip(needs, (*found, "COLUMN"), strict=False):
        if row.get(role) is None or role in columns:
            roles.setdefault(role, name)
    missing = [role for role in ("prompt", *needs) if role in roles and role not in columns]
    if not missing:
        return None
    in_order = dict.fromkeys(("prompt", *needs, *columns))
    written = ",".join(f"{role}={roles[role]}" for role in in_order if role in roles)
    return RowProblem(
        "",
        f"a map of {' and '.join(columns)}",
        f"have {' and '.join(missing)} mapped too",
        f"Write ::{written} after the file's name.",
    )
