"""Rows to `Sample`s, with what there is to count of how they were read.

`to_sample` finds a row's columns by the column map or by other names (`aliases`), makes a row that
compares answers one of a plain shape (`comparisons`), reads it by its shape (`plain`), and keeps
every column that the shape does not read, for reward functions. The column `answer` is kept even if
a shape reads it: rewards compare with it. So is one that an alias makes the answer, and those of
several answers that are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tandem.data.excerpt import names
from tandem.data.grades import read_grade
from tandem.data.rows import Row, RowProblem
from tandem.data.shapes.aliases import (
    find_aliases,
    find_marks,
    find_pair_names,
    several_answers,
    whole_prompt,
    with_input,
    with_lists,
)
from tandem.data.shapes.answer_lists import with_nested
from tandem.data.shapes.comparisons import Compared, named, read_compared
from tandem.data.shapes.dialogs import instruction_context
from tandem.data.shapes.exchanges import called, with_messages
from tandem.data.shapes.labels import is_labelled, is_verdict, margin_of, verdict
from tandem.data.shapes.map_advice import unknown_shape
from tandem.data.shapes.mapped_row import MARKS
from tandem.data.shapes.plain import (
    NEEDS,
    SHAPES,
    Shape,
    alpaca,
    messages,
    plain_text,
    preference,
    prompt_only,
    shape_of,
    sharegpt,
)
from tandem.data.shapes.unread import (
    column_notes,
    skipped_notes,
    turn_notes,
    unread_of,
)
from tandem.data.tools import tools_or_note
from tandem.data.turns import turns_of
from tandem.types import Sample, Source


@dataclass(frozen=True, slots=True)
class Shaped:
    """A sample and how it was read.

    shape: the shape's name, with the columns that were found under other names.
    notes: what is worth counting, each once per row. label_column, grade_column: where its label
    and its grade are from, or "". unread, lists, numbers: of a prompt alone, or with a chosen
        answer alone, as `unread_of`.
    """

    sample: Sample
    shape: str
    notes: tuple[str, ...] = ()
    label_column: str = ""
    grade_column: str = ""
    unread: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


@dataclass(slots=True)
class _Found:
    """A row's shape, and its columns by their roles.

    row: with values under their roles. columns: the user's map, without what comparisons read.
    aliases: roles that are in columns of other names. renamed: these, its marks, and what a
    comparison made of other columns, for errors. joined: the columns that the prompt is put
    together of. compared: how the row was read, if it compares answers.
    """

    shape: Shape
    row: dict[str, Any]
    columns: Mapping[str, str]
    aliases: dict[str, str]
    renamed: dict[str, str]
    joined: set[str]
    compared: Compared | None

    def places(self) -> Mapping[str, str]:
        """Role to the file's column, of roles that have another name there."""
        own = self.compared.own if self.compared is not None else {}
        return {**self.renamed, **self.columns, **own}

    def rest(self, row: Row, places: Mapping[str, str]) -> dict[str, Any]:
        """The file's columns that the shape does not read, or that reward functions want too."""
        kept = {"answer", "margin", self.aliases.get("completion", "answer")}
        kept |= {places.get("tools", "tools"), places.get("grade", "grade")}
        if not is_labelled(self.row):
            kept.add(places.get("label", "label"))
        if self.compared is None:
            roles = self.shape.needs + self.shape.may
        else:
            roles = ("prompt", "system")
            kept |= self.compared.kept
        read = self.joined.union(places.get(role, role) for role in roles) - kept
        return {name: value for name, value in row.items() if name not in read}


def to_sample(row: Row, source: Source, columns: Mapping[str, str] | None = None) -> Shaped:
    """The sample in `row`; `columns` maps roles to this row's column names.

    Raises:
        RowProblem: a mapped column is missing, no shape fits, or a value cannot be used.
    """
    found = _find(row, columns or {})
    shape, values, compared = found.shape, found.row, found.compared
    places = found.places()
    with _in_terms_of_the_row(places):
        sample = shape.read(values, source)
        graded = read_grade(values if "grade" in shape.may else {}, sample, found.columns)
        tools = values.get("tools") if "tools" in shape.may else None
        tools, no_tools = tools_or_note(tools, is_mapped="tools" in found.columns)
    rest = found.rest(row, places)
    sample = replace(sample, columns=rest, grade=graded.grade, tools=tools)
    if tools:
        rest = {name: rest[name] for name in rest if name != places.get("tools", "tools")}
    notes = (*_notes(values, shape, sample), *filter(None, (graded.note, no_tools)))
    if shape.read is not plain_text:
        notes += tuple(column_notes(rest))
    aliases = found.aliases
    if graded.grade is not None and graded.column != "grade":
        aliases = aliases | {"grade": graded.column}
    is_unread = shape.read is prompt_only and (compared is None or not compared.understood)
    is_half = shape.read is preference and sample.rejected is None
    return Shaped(
        sample,
        named(shape.name, aliases) if compared is None else compared.shape,
        notes if compared is None else compared.notes + notes,
        places.get("label", "label") if sample.label is not None else "",
        places.get(graded.column, graded.column),
        *(unread_of(rest) if is_unread or is_half else ()),
    )


def _find(row: Row, columns: Mapping[str, str]) -> _Found:
    """The shape of a row, and its values under the names of their roles.

    Raises:
        RowProblem: as `to_sample`.
    """
    row = with_nested(row, columns) if columns else row
    _require_mapped(row, columns)
    values = {name: value for name, value in row.items() if name not in columns.values()}
    values |= {role: row[column] for role, column in columns.items()}
    whole = values if columns else with_input(values)
    joined = {"input"} if whole is not values else set[str]()
    with _in_terms_of_the_row(columns):
        values = with_messages(with_lists(whole))
    shape = shape_of(values, columns)
    own = shape.name if shape is not None else ""
    values, answers = (values, {}) if columns else _answers_by_other_names(values, own)
    if "chosen" in answers:
        shape = shape_of(values, columns)
        own = shape.name if shape is not None else ""
    aliases = {} if columns else find_aliases(values, own) | answers
    compared = _compared(values, columns, own, aliases)
    if compared is not None:
        values, columns, aliases = compared.row, compared.columns, dict(compared.prompt)
    renamed = aliases | find_marks(values)
    moved = {role: values[column] for role, column in renamed.items()}
    if "prompt" in aliases:
        moved["prompt"], parts = whole_prompt(values, aliases["prompt"])
        joined |= parts
    values |= moved
    if compared is not None:
        shape = next(shape for shape in SHAPES if shape.name == compared.plain)
        shape = shape if shape.fits(values, columns) else None
        renamed |= compared.own
    elif aliases:  # marks are of any shape
        shape = shape_of(values, columns)
    if shape is None:
        raise unknown_shape(row, values, columns, NEEDS, {} if columns else _in_lower_case(row))
    if shape.read is alpaca and (about := instruction_context(values)):
        joined.add(about)
    # A column that nobody mapped may be called so and mean something else.
    if "label" in columns or ("label" in shape.may and is_verdict(values.get("label"))):
        with _in_terms_of_the_row(columns):
            values["label"] = verdict(values["label"])
    return _Found(shape, values, columns, aliases, renamed, joined, compared)


def _answers_by_other_names(
    values: dict[str, Any], shape: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """A row with a pair under its roles or an answer of calls as a turn, and role to column."""
    if pair := find_pair_names(values, shape):
        return with_lists(values | {role: values[name] for role, name in pair.items()}), pair
    if shape in ("", "prompt") and (turns := called(values)):
        return {**values, "answers": turns}, {"completion": "answers"}
    return values, {}


def _in_lower_case(row: Row) -> dict[str, str]:
    """Role to column of what makes a plain shape of a row with its columns in lower case, without
    white space around them; {} if nothing does, or that is not all that is wrong."""
    lower = {name.strip().lower(): value for name, value in row.items()}
    if len(lower) < len(row):
        return {}
    shape = shape_of(lower, {})
    aliases = find_aliases(lower, shape.name if shape is not None else "")
    if aliases:
        shape = shape_of(lower | {role: lower[name] for role, name in aliases.items()}, {})
    if shape is None:
        return {}
    given = aliases.keys() | {role for role, value in lower.items() if value is not None}
    roles = (role for role in (*shape.needs, "rejected", "system") if role in given)
    return {role: aliases.get(role, role) for role in dict.fromkeys(roles)}


def _require_mapped(row: Row, columns: Mapping[str, str]) -> None:
    for role, column in columns.items():
        if column not in row:
            weight = re.search(r":[\d.]+$", column)
            advice = f"A weight goes before the map: FILE{weight[0]}::..." if weight else ""
            raise RowProblem(column, names(row), f"exist, mapped to the role {role}", advice)


def _compared(
    row: Row, columns: Mapping[str, str], shape: str, found: Mapping[str, str]
) -> Compared | None:
    """`read_compared`, with the shape that the row has whatever marks are mapped."""
    if columns and not columns.keys().isdisjoint(MARKS):
        others = {role: n for role, n in columns.items() if role not in MARKS}
        own = shape_of(row, others)
        shape = own.name if own is not None else ""
        found = found if others else find_aliases(row, shape)
    return read_compared(row, columns, shape, found)


@contextmanager
def _in_terms_of_the_row(places: Mapping[str, str]) -> Iterator[None]:
    """Problems with the names that the row's columns have; `places` maps roles to them."""
    try:
        yield
    except RowProblem as problem:
        role, dot, rest = problem.field.partition(".")
        field = f"{places.get(role, role)}{dot}{rest}"
        raise RowProblem(field, problem.found, problem.expected, problem.advice) from None


def _notes(row: Row, shape: Shape, sample: Sample) -> list[str]:
    """What was skipped in a row that is used, or what else it has."""
    notes = []
    if "margin" in shape.may and margin_of(row):
        notes.append("with a margin, which the reward model's loss reads")
    if "label" in shape.may and row.get("label") is not None and not is_labelled(row):
        notes.append("with a label that is neither true (1) nor false (0), not read as good or bad")
    if any(not turn.learned for turn in sample.prompt):
        notes.append("turns marked weight 0, train or loss false are shown, not learned")
    if shape.read in (messages, sharegpt):
        notes += skipped_notes(turns_of(row[shape.needs[0]], shape.needs[0]))
    if shape.read is prompt_only and (several := several_answers(row)):
        notes.append(f"{several} may each be the answer, so neither is: map one to completion")
    if shape.read is not plain_text:
        notes += turn_notes(row[name] for name in shape.needs + shape.may if name in row)
    return notes
