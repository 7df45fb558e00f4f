"""Several answers to a prompt in one column, and their scores or ranks: beside them, or in them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.data.excerpt import describe
from tandem.data.grades import number_of
from tandem.data.rows import Row, RowProblem
from tandem.data.shapes.mapped_row import MappedRow
from tandem.data.turns import first_role, text_of

LISTS = ("answers", "completions", "responses", "generations")
"""Columns that hold several answers."""
_SCORES = ("scores", "ratings", "rating")
"""Columns with a number for each of them, more is better."""
_TEXTS = ("response", "answer", "completion", "output", "generation", "text")
"""Where objects in such a list have the answer."""
_NUMBERS = ("overall_score", "score", "rating", "pm_score", "rank")
"""Where they have its score or its rank."""
_RANKS = ("ranks", "rank")
"""Numbers of which the least is the best."""

_BLANK = "with a blank answer, left out of the ranking"
_NO_TEXT = "with an answer that is no text, left out of the ranking"
_UNSCORED = "with an answer whose score is no number, left out of the ranking"
_AGAIN = "with the same answer twice, ranked once"
_NOT_AS_MANY = "{} has not one number for each of {}, not compared: a prompt alone"
_MESSAGES = "{} holds messages, and only texts can be ranked, not compared: a prompt alone"


@dataclass(frozen=True, slots=True)
class Listed:
    """Answers in a row and what their scores are in.

    answers, scores: the row's columns; both the same if the answers are objects that have the
    scores. text_key, score_key: the keys of such objects, or "".
    """

    answers: str
    scores: str
    text_key: str = ""
    score_key: str = ""

    @property
    def are_ranks(self) -> bool:
        """Whether the least number is the best."""
        return (self.score_key or self.scores) in _RANKS


@dataclass(frozen=True, slots=True)
class Ordered:
    """Different answers with their ranks, 1 the best, and what there is to note of others."""

    texts: list[str]
    ranks: list[int]
    notes: tuple[str, ...] = ()


def json_list(value: Any) -> list[Any] | None:
    """A list, or one that is saved as JSON text (a CSV cell, say); None for anything else that is
    no list, and for an empty one."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return list(value) if isinstance(value, list | tuple) and value else None


def with_parsed_lists(row: Row) -> Row:
    """`row`, with the lists of answers and of numbers read that are saved as JSON text."""
    texts = {n: row[n] for n in (*LISTS, *_SCORES, *_RANKS) if isinstance(row.get(n), str)}
    parsed = {name: json_list(text) for name, text in texts.items()}
    lists = {name: found for name, found in parsed.items() if found is not None}
    return {**row, **lists} if lists else row


def find_list(mapped: MappedRow) -> Listed | str | None:
    """The list of answers in a row; what there is to note, if it cannot be told how to rank them.

    Raises:
        RowProblem: what was mapped is no such list, or is not as long as the other.
    """
    row, finds = mapped.row, mapped.finds
    names = ["answers"] if mapped.maps("answers") or not finds else list(LISTS)
    lists = [name for name in names if _are_answers(row.get(name))]
    if mapped.maps("answers") and not lists:
        expected = "be a list of texts, or of objects with one text each"
        raise RowProblem(mapped.own("answers"), describe(row.get("answers")), expected)
    beside = _beside(mapped)
    of_messages = [name for name in names if _are_messages(row.get(name))]
    if beside and not lists and len(of_messages) == 1:
        return _MESSAGES.format(of_messages[0])
    if len(lists) != 1:
        return None
    (name,) = lists
    answers, own = row[name], mapped.own(name)
    are_objects = any(isinstance(answer, Mapping) for answer in answers)
    are_steps = name == "completions" and not are_objects and finds and not mapped.maps("scores")
    if are_steps and beside and beside[0] in _SCORES:
        return None  # more often a process reward model's steps than answers
    inside = [n for n in _NUMBERS if not mapped.maps("scores") and _has_number(answers, n)]
    key = _text_key(answers) if are_objects else ""
    if key is None or not (beside or inside):
        return None
    if len(beside) + len(inside) > 1:
        numbers = ", ".join([*beside, *(f"{own}.{n}" for n in inside)])
        found = f"{numbers} may each score the answers, so none does: map one to scores"
        if mapped.maps("answers"):
            raise RowProblem(own, found, "have its scores in one column")
        return found
    if not beside:
        return Listed(name, name, key, inside[0])
    scores = row[beside[0]]
    if isinstance(scores, list | tuple) and len(scores) == len(answers):
        return Listed(name, beside[0], key)
    own_scores = mapped.own(beside[0])
    if mapped.maps("scores", "answers"):
        expected = f"be a list of {len(answers)} numbers, one for each of {own}"
        raise RowProblem(own_scores, describe(scores), expected)
    return _NOT_AS_MANY.format(own_scores, own)


def _beside(mapped: MappedRow) -> list[str]:
    """The columns that may have the scores of answers in another: flat lists, or what is mapped."""
    if mapped.maps("scores"):
        return ["scores"]
    row, names = mapped.row, (*_SCORES, "ranks") if mapped.finds else ("scores", "ranks")
    flat = {name: row[name] for name in names if isinstance(row.get(name), list | tuple)}
    return [n for n, v in flat.items() if not any(isinstance(s, list | tuple | Mapping) for s in v)]


def has_column(row: Row, name: str) -> bool:
    """Whether a row has a column, or a list of objects with a key, as in answers.stars."""
    return name in row or _each_in(row, name) is not None


def with_nested(row: Row, columns: Mapping[str, str]) -> Row:
    """`row` with a column for each key of objects in a list that is mapped to a role of several
    answers, as in scores=answers.stars."""
    nested = {columns[role] for role in ("answers", "scores", "ranks") if role in columns}
    found = {name: _each_in(row, name) for name in nested if name not in row}
    lists = {name: values for name, values in found.items() if values is not None}
    return {**row, **lists} if lists else row


def _each_in(row: Row, name: str) -> list[Any] | None:
    column, dot, key = name.rpartition(".")
    objects = json_list(row.get(column)) if dot else None
    if objects is None or not _has(objects, key):
        return None
    return [each.get(key) if isinstance(each, Mapping) else None for each in objects]


def lists_of_numbers(columns: Row) -> tuple[str, ...]:
    """The columns that may be the scores of another's answers: lists of numbers, as many; and keys
    of objects in a list that have a number each."""
    lists = {name: value for name, value in columns.items() if isinstance(value, list | tuple)}
    sizes = {len(value) for value in lists.values() if len(value) > 1 and _are_answers(value)}
    beside = [
        name
        for name, value in lists.items()
        if len(value) in sizes and all(isinstance(each, int | float) for each in value)
    ]
    objects = {n: v for n, v in lists.items() if v and all(isinstance(o, Mapping) for o in v)}
    inside = [
        f"{name}.{key}"
        for name, value in objects.items()
        for key in value[0]
        if all(isinstance(each.get(key), int | float) for each in value)
    ]
    return (*beside, *inside)


def _are_messages(value: Any) -> bool:
    """Whether a column has several answers as messages, or as lists of them, of the assistant's."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(each, list | tuple | Mapping) and first_role(each) == "assistant"
               for each in value)  # fmt: skip


def _are_answers(value: Any) -> bool:
    """Whether a column holds several answers: texts or objects, but no conversation."""
    if not isinstance(value, list | tuple) or first_role(value) is not None:
        return False
    given = [answer for answer in value if answer is not None]
    return all(isinstance(a, str) for a in given) or all(isinstance(a, Mapping) for a in given)


def _has_number(answers: Sequence[Any], key: str) -> bool:
    """Whether objects have a key, and nothing nested under it."""
    given = [answer[key] for answer in answers if isinstance(answer, Mapping) and key in answer]
    return bool(given) and not any(isinstance(value, list | tuple | Mapping) for value in given)


def _has(answers: Sequence[Any], key: str) -> bool:
    return any(isinstance(answer, Mapping) and key in answer for answer in answers)


def _text_key(answers: Sequence[Any]) -> str | None:
    """The key of the objects' answers: the one that is called so, or their only text."""
    if known := [key for key in _TEXTS if _has(answers, key)]:
        return known[0] if len(known) == 1 else None
    texts = {
        key
        for answer in answers
        if isinstance(answer, Mapping)
        for key, value in answer.items()
        if isinstance(value, str) and key not in _NUMBERS
    }
    return texts.pop() if len(texts) == 1 else None


def order(mapped: MappedRow, listed: Listed) -> Ordered:
    """The answers in order of their scores. Equal scores have one rank.

    Raises:
        RowProblem: an answer in a column that was mapped is no text.
    """
    answers = mapped.row[listed.answers]
    scores = _each(answers, listed.score_key) if listed.score_key else mapped.row[listed.scores]
    texts = _each(answers, listed.text_key) if listed.text_key else answers
    return ordered(
        texts,
        scores,
        ".".join(filter(None, (mapped.own(listed.answers), listed.text_key))),
        least_is_best=listed.are_ranks,
        must_be_text=mapped.maps("answers"),
        by=" by the mean of its " + ("ranks" if listed.are_ranks else "scores"),
    )


def _each(answers: Sequence[Any], key: str) -> list[Any]:
    return [None if answer is None else answer.get(key) for answer in answers]


def ordered(
    answers: Sequence[Any],
    scores: Sequence[Any],
    field: str,
    *,
    least_is_best: bool = False,
    must_be_text: bool = True,
    by: str = "",
) -> Ordered:
    """Answers by their scores: those that are blank or have no number left out, the same one once.

    Args:
        field: the answers' column, for errors. must_be_text: else an answer that is no text is
            left out. by: how the note on the same answer twice says what it is ranked by.
    Raises:
        RowProblem: an answer is no text, or no valid Unicode.
    """
    notes: dict[str, None] = {}
    found: dict[str, list[float]] = defaultdict(list)
    texts: dict[str, str] = {}
    for answer, score in zip(answers, scores, strict=True):
        number = number_of(score)
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            notes[_BLANK] = None
        elif not isinstance(answer, str):
            if must_be_text:
                raise RowProblem(field, describe(answer), "be text")
            notes[_NO_TEXT] = None
        elif number is None:
            notes[_UNSCORED] = None
        else:
            found[text_of(answer, field).strip()].append(number)
            texts.setdefault(answer.strip(), answer)
    if any(len(numbers) > 1 for numbers in found.values()):
        notes[_AGAIN + by] = None
    means = {text: sum(numbers) / len(numbers) for text, numbers in found.items()}
    sizes = sorted(set(means.values()), reverse=not least_is_best)
    ranks = {size: rank for rank, size in enumerate(sizes, start=1)}
    return Ordered(
        [texts[text] for text in means], [ranks[mean] for mean in means.values()], tuple(notes)
    )
