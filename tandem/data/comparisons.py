"""Rows that compare several answers, as public data sets have them, to rows of the plain shapes.

Two answers and which is better become `chosen` and `rejected`; a list of answers with scores or
ranks becomes `answers` and `ranks`; where nothing is compared (a tie, say), the prompt is left.
Nothing is guessed: a name counts only where it can mean one thing. docs/data.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.data.aliases import prompt_column
from tandem.data.answer_lists import LISTS, Ordered, find_list, order, ordered
from tandem.data.excerpt import excerpt
from tandem.data.rows import RowProblem
from tandem.data.two_answers import (
    PARTS,
    SUMMARIES,
    Pair,
    compare,
    find_pair,
    pair_of_names,
    shared_prompt,
)

Row = Mapping[str, Any]

NEEDS = ("prompt + answers + scores", "prompt + answer_a + answer_b + preferred")
"""What such rows need, as errors say it."""

_READ = ("answer_a", "answer_b", "preferred", "answers", "scores", "ranks")
"""The roles of a column map that are read here."""
FOUND_BESIDE = frozenset(("preferred", "scores"))
"""A column map of no more than these says where the verdict is; the rest is found by name."""
_TELLING = frozenset(PARTS) | frozenset(LISTS) | frozenset(SUMMARIES)
"""A row without any of these compares nothing."""
_BOTH = ("preference", "dialog preference")
_MESSAGE_OF_A_TREE = ("message_id", "parent_id", "role")


@dataclass(frozen=True, slots=True)
class Compared:
    """A row as one of the plain shapes has it, and how it was read.

    row: with `chosen` and `rejected`, with `answers` and `ranks`, or with none of them.
    shape: what `tandem data check` calls it. prompt: {"prompt": column} if that has another name.
    own: roles of `row` to the columns of the file, for errors. used: the file's columns that are
    used up. columns: the column map without what was read here.
    """

    row: dict[str, Any]
    shape: str
    prompt: dict[str, str] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    used: frozenset[str] = frozenset()
    columns: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_compared(
    row: Row, columns: Mapping[str, str], shape: str, aliases: Mapping[str, str]
) -> Compared | None:
    """A row that compares answers, or None if it compares none or does not say how.

    Args:
        row: with mapped columns under their roles. columns: the column map, role to column.
        shape: the plain shape of the row's own columns, or "". aliases: its roles under other
            names: a row with a single answer by one of them is that.
    Raises:
        RowProblem: a row that compares answers has a value that cannot be used, or a row is one
            message of a tree.
    """
    if shape in _BOTH:
        chosen, rejected = row["chosen"], row.get("rejected")
        if isinstance(chosen, str) and isinstance(rejected, str):  # of nearly all pairs
            return None
        if not (_is_texts(chosen) or _is_texts(rejected)):
            return None
        return _lists_of_both(_Reading(row, columns))
    if shape == "text":
        _refuse_message_of_a_tree(row, columns)
        return None
    if shape not in ("", "prompt", "ranked answers") or _TELLING.isdisjoint(row):
        return None
    if not aliases.keys() <= {"prompt"} or _has_either(row):
        return None
    question = row.get("question")
    if isinstance(question, Mapping) and isinstance(question.get("full_text"), str):  # WebGPT's
        row = {**row, "question": question["full_text"]}
    reading = _Reading(row, columns)
    if shape == "ranked answers":
        answers = row["answers"]
        of_objects = isinstance(answers, list | tuple) and isinstance(next(iter(answers), 0), dict)
        return _list_of_answers(reading) if of_objects else None
    pair = find_pair(row, columns, finds=reading.finds)
    made = _two_answers(reading, pair) if pair is not None else _list_of_answers(reading)
    mapped = {column for role, column in columns.items() if role in _READ}
    return made if made is not None and mapped <= made.used else None


def map_to_add(row: Row) -> str:
    """Advice on the column map of a row with two answers that does not say which is better; "" for
    any other row."""
    names = pair_of_names(name for name, value in row.items() if value is not None)
    if names is None:
        return ""
    columns = "preferred=COLUMN"
    if _Reading(row, {}).prompt() is None:
        columns = f"prompt=COLUMN,answer_a={names[0]},answer_b={names[1]},{columns}"
    return (
        f"To compare {names[0]} and {names[1]}, add ::{columns} to the file's name, with the "
        "column that says which is better."
    )


def _has_either(row: Row) -> bool:
    return row.get("chosen") is not None or row.get("rejected") is not None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], str)


def _texts(value: Any) -> list[Any]:
    """The answers of a column that has one or several, as texts; none of any other column."""
    if isinstance(value, str):
        return [value]
    return list(value) if _is_texts(value) else []


def _refuse_message_of_a_tree(row: Row, columns: Mapping[str, str]) -> None:
    """OASST's rows: each is one message, and the answers to it are other rows."""
    if not columns and all(name in row for name in _MESSAGE_OF_A_TREE):
        raise RowProblem(
            "",
            "one message of a tree (columns message_id, parent_id)",
            "hold a whole conversation, or a prompt with its answers",
            "First join each message with its replies into one row: prompt, answers, ranks. "
            "::text=text reads each message as plain text.",
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """A row that is read, with its column map."""

    row: Row
    columns: Mapping[str, str]

    @property
    def finds(self) -> bool:
        """Whether columns count that are not called by a role."""
        return self.columns.keys() <= FOUND_BESIDE

    def own(self, key: str) -> str:
        """The file's name of a column."""
        return self.columns.get(key, key)

    def prompt(self) -> dict[str, str] | None:
        """{"prompt": column} if the prompt has another name, {} if not; None if there is none."""
        if self.row.get("prompt") is not None:
            return {}
        head = prompt_column(self.row) if self.finds else ""
        if not head and self.finds and "human_ref_A" in self.row:  # SHP's
            head = "history" if isinstance(self.row.get("history"), str) else ""
        return {"prompt": head} if head else None

    def made(
        self,
        shape: str,
        prompt: dict[str, str],
        roles: Mapping[str, Any],
        *,
        used: Iterable[str],
        own: Mapping[str, str],
        notes: tuple[str, ...] = (),
    ) -> Compared:
        """The row with `roles` in place of the columns that are used up.

        A margin is left out: nobody says that it is the better answer's.
        """
        used = tuple(used)
        columns = {role: name for role, name in self.columns.items() if role not in _READ}
        left = {k: v for k, v in self.row.items() if k not in used and k != "margin"}
        return Compared(
            {**left, **roles},
            shape,
            prompt,
            {**columns, **prompt, **own},
            frozenset(map(self.own, used)),
            columns,
            notes,
        )


def named(shape: str, found: Mapping[str, str]) -> str:
    """A shape with the columns that have other names than their roles, as a column map."""
    if not found:
        return shape
    other = ",".join(f"{role}={name}" for role, name in found.items() if role != name)
    return f"{shape} with {other}" if other else shape


def _ranking(
    reading: _Reading,
    answers: Ordered,
    shape: str,
    prompt: dict[str, str],
    used: tuple[str, ...],
    numbers: str,
) -> Compared:
    """Answers by their ranks; a prompt alone if no two of them can be compared."""
    own = {"answers": reading.own(used[0])}
    if len(set(answers.ranks)) > 1:
        roles = {"answers": answers.texts, "ranks": answers.ranks}
        return reading.made(shape, prompt, roles, used=used, own=own, notes=answers.notes)
    note = f"no two answers in {own['answers']} differ in {numbers}, so none are compared"
    alone = named("prompt", prompt)
    notes = (*answers.notes, f"{note}: a prompt alone")
    return reading.made(alone, prompt, {}, used=used, own=own, notes=notes)


def _lists_of_both(reading: _Reading) -> Compared | None:
    """Lists of texts in chosen and rejected: each of the former is better than all others."""
    given = {role: _texts(reading.row.get(role)) for role in ("chosen", "rejected")}
    prompt = reading.prompt()
    if not all(given.values()) or prompt is None:
        return None
    sides = [ordered(texts, [0] * len(texts), reading.own(role)) for role, texts in given.items()]
    better, worse = ([text.strip() for text in side.texts] for side in sides)
    if both := [text for text in worse if text in better]:
        expected = f"have no answer that is in {reading.own('chosen')} too"
        raise RowProblem(reading.own("rejected"), excerpt(both[0]), expected)
    answers = Ordered(
        sides[0].texts + sides[1].texts,
        [1] * len(better) + [2] * len(worse),
        tuple(dict.fromkeys(sides[0].notes + sides[1].notes)),
    )
    shown = {**prompt, **{role: reading.own(role) for role in given}}
    shape = named("lists of chosen and rejected answers", shown)
    return _ranking(reading, answers, shape, prompt, tuple(given), "ranks")


def _list_of_answers(reading: _Reading) -> Compared | None:
    """A list of answers with their scores or ranks."""
    found = find_list(reading.row, reading.columns, finds=reading.finds)
    prompt = None if found is None else reading.prompt()
    if found is None or prompt is None:
        return None
    if isinstance(found, str):
        if "answers" in reading.columns:
            raise RowProblem(reading.own("answers"), found, "have its scores in one column")
        alone = named("prompt", prompt)
        return reading.made(alone, prompt, {}, used=(), own={}, notes=(found,))
    kind, role = ("ranked answers", "ranks") if found.are_ranks else ("scored answers", "scores")
    shown = {
        **prompt,
        "answers": ".".join(filter(None, (reading.own(found.answers), found.text_key))),
        role: ".".join(filter(None, (reading.own(found.scores), found.score_key))),
    }
    answers = order(reading.row, found, reading.columns)
    used = (found.answers, found.scores)
    return _ranking(reading, answers, named(kind, shown), prompt, used, role)


def _two_answers(reading: _Reading, pair: Pair) -> Compared | None:
    """Two answers: a pair, or a prompt alone."""
    prompt = {} if pair.prompt or pair.dialogs else reading.prompt()
    if prompt is None:
        return None
    used: tuple[str, ...] = (*pair.two.keys, *pair.used)
    used = (*used, *pair.ways[0].keys) if len(pair.ways) == 1 else ()
    made: dict[str, Any] = {"prompt": pair.prompt} if pair.prompt else {}
    own = {"prompt": pair.used[0]} if pair.prompt else {}
    outcome = compare(reading.row, pair)
    if outcome.better is None:
        if pair.dialogs:
            made, own = {"prompt": shared_prompt(pair)}, {"prompt": pair.two.names[0]}
        alone, notes = named("prompt", prompt), (outcome.note,)
        return reading.made(alone, prompt, made, used=used, own=own, notes=notes)
    better, worse = outcome.better, 1 - outcome.better
    made |= {"chosen": pair.values[better], "rejected": pair.values[worse]}
    own |= {"chosen": pair.two.names[better], "rejected": pair.two.names[worse]}
    shown = {**prompt, **pair.shown}
    shape = named("two answers", shown) + pair.by
    return reading.made(shape, prompt, made, used=used, own=own)
