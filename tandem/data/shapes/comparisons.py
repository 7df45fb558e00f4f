"""Rows that compare several answers, as public data sets have them, to rows of the plain shapes.

Two answers and which is better become `chosen` and `rejected`; a list of answers with scores or
ranks becomes `answers` and `ranks`; where nothing is compared (a tie, say), the prompt is left.
Nothing is guessed: a name counts only where it can mean one thing. docs/data.md has the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from tandem.data.excerpt import describe, excerpt, names
from tandem.data.rows import Row, RowProblem
from tandem.data.shapes.aliases import says_something
from tandem.data.shapes.answer_lists import (
    LISTS,
    Ordered,
    find_list,
    json_list,
    order,
    ordered,
    with_parsed_lists,
)
from tandem.data.shapes.mapped_row import COMPARED, MappedRow
from tandem.data.shapes.two_answers import (
    PARTS,
    SUMMARIES,
    Pair,
    compare,
    find_pair,
    shared_prompt,
)

_OF_ONE_ANSWER = ("label", "margin", "grade")
"""Roles that a comparison has no use for: nobody says that a margin is the better answer's."""
_TELLING = frozenset(PARTS) | frozenset(LISTS) | frozenset(SUMMARIES)
"""A row without any of these compares nothing."""
_BOTH = ("preference", "dialog preference")
_OWN = ("chosen", "rejected", "completion", "ranking")
"""Answers of a row's own."""
_QUESTION = re.compile(r"\s*\{.*(['\"])full_text\1\s*:", re.DOTALL)
"""The beginning of WebGPT's question, an object that was saved as text."""
_MESSAGE_OF_A_TREE = ("message_id", "parent_id", "role")


@dataclass(frozen=True, slots=True)
class Compared:
    """A row as one of the plain shapes has it, and how it was read.

    row: with `chosen` and `rejected`, with `answers` and `ranks`, or with none of them.
    plain: the name of the plain shape that it has. shape: what `tandem data check` calls it.
    prompt: {"prompt": column} if that has another name. own: roles of `row` to the columns of the
    file, for errors. kept: the file's columns that say what is compared and how, which reward
    functions may want too. understood: whether they did; a tie is understood. columns: the column
    map without what was read here.
    """

    row: dict[str, Any]
    plain: str
    shape: str
    prompt: dict[str, str] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    understood: bool = True
    columns: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_compared(
    row: Row, columns: Mapping[str, str], shape: str, aliases: Mapping[str, str]
) -> Compared | None:
    """A row that compares answers, or None if it compares none or does not say how.

    Args:
        row: with mapped columns under their roles. columns: the column map, role to column.
        shape: the plain shape of the row's own columns, or "". aliases: its roles under other
            names. A row with answers of its own, or a single one by one of them, is read as that.
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
        return _lists_of_both(MappedRow(row, columns))
    if shape == "text":
        _refuse_message_of_a_tree(row, columns)
        return None
    if shape == "prompt" and _is_tree(row["prompt"]):
        _refuse_a_tree("a tree of messages (an object with text and replies)", "")
    if shape not in ("", "prompt", "ranked answers") or _TELLING.isdisjoint(row):
        return None
    mapped = MappedRow(row, columns)
    has_own = any(row.get(name) is not None for name in _OWN)
    if not aliases.keys() <= {"prompt"} or (has_own and not mapped.maps(*COMPARED)):
        return None
    is_ranked = row.get("answers") is not None and row.get("ranks") is not None
    if is_ranked and not mapped.maps("answer_a", "answer_b", "preferred", "scores"):
        return None if _is_plain_ranking(row) else _list_of_answers(mapped)
    question = _webgpt_question(row.get("question")) if mapped.finds else row.get("question")
    if isinstance(question, Mapping) and "full_text" in question:  # WebGPT's
        is_text = isinstance(question["full_text"], str)
        asked = question["full_text"] if is_text else question
        mapped = MappedRow({**row, "question": asked}, columns)
        if not is_text and mapped.finds and mapped.prompt() is None:
            found = describe(question["full_text"])
            raise RowProblem("question.full_text", found, "be text")
    pair = find_pair(mapped)
    made = _two_answers(mapped, pair) if pair is not None else _list_of_answers(mapped)
    said = {column for role, column in columns.items() if role in COMPARED}
    return made if made is not None and said <= made.kept else None


def _webgpt_question(value: Any) -> Any:
    """A question, where it is WebGPT's object as text (a CSV cell, say), read from its JSON.

    Raises:
        RowProblem: such an object in another notation.
    """
    if not isinstance(value, str) or not _QUESTION.match(value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        found = f"an object in another notation, as Python prints it ({excerpt(value, 30)})"
        advice = "Write the column with json.dumps, or the rows as .jsonl or .parquet."
        raise RowProblem("question", found, "be text, or an object in JSON", advice) from None


def _is_plain_ranking(row: Row) -> bool:
    """Whether answers and ranks are as the plain shape has them, or wrong for any other too."""
    answers, ranks = row["answers"], row["ranks"]
    if json_list(answers) is None or json_list(ranks) is None:
        return True
    if isinstance(answers, str) or isinstance(ranks, str):
        return False
    are_texts = all(isinstance(answer, str) and answer.strip() for answer in answers)
    return are_texts and not any(isinstance(rank, float | str | None) for rank in ranks)


def _is_texts(value: Any) -> bool:
    """Whether a column has a list of texts, maybe with others that are null or wrong."""
    return isinstance(value, list | tuple) and any(isinstance(each, str) for each in value)


def _texts(value: Any) -> list[Any]:
    """The answers of a column that has one or several, as texts; none of any other column."""
    if isinstance(value, str):
        return [value]
    return list(value) if _is_texts(value) else []


def _refuse_message_of_a_tree(row: Row, columns: Mapping[str, str]) -> None:
    """OASST's rows: each is one message, and the answers to it are other rows."""
    if not columns and all(name in row for name in _MESSAGE_OF_A_TREE):
        found = "one message of a tree (columns message_id, parent_id)"
        _refuse_a_tree(found, " ::text=text reads each message as plain text.")


def _is_tree(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and {"text", "replies"} <= prompt.keys()


def _refuse_a_tree(found: str, more: str) -> NoReturn:
    raise RowProblem(
        "",
        found,
        "hold a whole conversation, or a prompt with its answers",
        f"First join each message with its replies into one row: prompt, answers, ranks.{more}",
    )


def _made(
    mapped: MappedRow,
    prompt: dict[str, str],
    keys: Iterable[str],
    kind: str = "prompt",
    roles: Mapping[str, Any] | None = None,
    *,
    shown: Mapping[str, str] | None = None,
    by: str = "",
    own: Mapping[str, str] | None = None,
    notes: tuple[str, ...] = (),
    understood: bool = True,
    replaced: Iterable[str] = (),
) -> Compared:
    """The row with `roles` in place of its own answers; a prompt alone without them.

    Args:
        prompt: as it comes from `MappedRow.prompt`. keys: the columns that were looked at.
        kind, shown, by: what the row was read as, with the columns that a map could name, and the
            others that say which answer is better.
        own: roles to the columns of the file. replaced: columns that the prompt is made of.
    """
    roles = roles or {}
    keys, of_one = tuple(keys), [n for n in _OF_ONE_ANSWER if n in mapped.columns]
    unread = {*_OWN, *keys, *replaced, *of_one, "margin"}
    row = {**{k: v for k, v in mapped.row.items() if k not in unread}, **roles}
    plain = "ranked answers" if "ranks" in roles else "prompt"
    if "chosen" in roles:
        is_asked = prompt or row.get("prompt") is not None
        plain = "preference" if is_asked else "dialog preference"
    read = {*COMPARED, *keys, *of_one}
    columns = {role: name for role, name in mapped.columns.items() if role not in read}
    said = [name for name in of_one if says_something(mapped.row.get(name))]
    return Compared(
        row,
        plain,
        named(kind, {**prompt, **(shown or {})}) + by,
        prompt,
        {**columns, **prompt, **(own or {})},
        frozenset(map(mapped.own, keys)),
        understood,
        columns,
        (*notes, *(f"with a {name} beside several answers, not read" for name in said)),
    )


def named(shape: str, found: Mapping[str, str]) -> str:
    """A shape with the columns that have other names than their roles, as a column map."""
    if not found:
        return shape
    other = ",".join(f"{role}={name}" for role, name in found.items() if role != name)
    return f"{shape} with {other}" if other else shape


def _ranking(
    mapped: MappedRow,
    answers: Ordered,
    prompt: dict[str, str],
    keys: tuple[str, str],
    kind: str,
    shown: Mapping[str, str],
    numbers: str,
) -> Compared:
    """Answers by their ranks; a prompt alone if no two of them can be compared."""
    own = {"answers": mapped.own(keys[0])}
    if len(set(answers.ranks)) > 1:
        roles = {"answers": answers.texts, "ranks": answers.ranks}
        return _made(mapped, prompt, keys, kind, roles, shown=shown, own=own, notes=answers.notes)
    note = f"no two answers in {own['answers']} differ in {numbers}, so none are compared"
    return _made(mapped, prompt, keys, own=own, notes=(*answers.notes, f"{note}: a prompt alone"))


def _lists_of_both(mapped: MappedRow) -> Compared:
    """Lists of texts in chosen and rejected: each of the former is better than all others. One of
    them is such a list.

    Raises:
        RowProblem: the other is neither that nor text, or they cannot be compared.
    """
    given = {role: _texts(mapped.row.get(role)) for role in ("chosen", "rejected")}
    for role, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if not given[role]:
            expected = f"be text or a list of texts, as {mapped.own(other)} is"
            raise RowProblem(mapped.own(role), describe(mapped.row.get(role)), expected)
    prompt = mapped.prompt()
    if prompt is None:
        roles = {"prompt": "COLUMN"} | {role: mapped.own(role) for role in given}
        raise RowProblem(
            "prompt",
            names(mapped.row),
            "exist beside lists of chosen and rejected answers",
            f"Write ::{','.join(f'{role}={name}' for role, name in roles.items())} after the "
            "file's name.",
        )
    sides = [ordered(texts, [0] * len(texts), mapped.own(role)) for role, texts in given.items()]
    better, worse = ([text.strip() for text in side.texts] for side in sides)
    if both := [text for text in worse if text in better]:
        expected = f"have no answer that is in {mapped.own('chosen')} too"
        raise RowProblem(mapped.own("rejected"), excerpt(both[0]), expected)
    answers = Ordered(
        sides[0].texts + sides[1].texts,
        [1] * len(better) + [2] * len(worse),
        tuple(dict.fromkeys(sides[0].notes + sides[1].notes)),
    )
    shown = {role: mapped.own(role) for role in given}
    kind = "lists of chosen and rejected answers"
    return _ranking(mapped, answers, prompt, ("chosen", "rejected"), kind, shown, "ranks")


def _list_of_answers(mapped: MappedRow) -> Compared | None:
    """A list of answers with their scores or ranks."""
    parsed = replace(mapped, row=with_parsed_lists(mapped.row))
    found = find_list(parsed)
    prompt = None if found is None else mapped.prompt()
    if found is None or prompt is None:
        return None
    if isinstance(found, str):
        keys = [role for role in mapped.columns if role in COMPARED]
        return _made(mapped, prompt, keys, notes=(found,), understood=False)
    kind, role = ("ranked answers", "ranks") if found.are_ranks else ("scored answers", "scores")
    shown = {
        "answers": ".".join(filter(None, (mapped.own(found.answers), found.text_key))),
        role: ".".join(filter(None, (mapped.own(found.scores), found.score_key))),
    }
    both = (found.answers, found.scores)
    return _ranking(mapped, order(parsed, found), prompt, both, kind, shown, role)


def _two_answers(mapped: MappedRow, pair: Pair) -> Compared | None:
    """Two answers: a pair, or a prompt alone."""
    prompt = {} if pair.prompt or pair.dialogs else mapped.prompt()
    if prompt is None:
        return None
    keys = (*pair.two.keys, *(key for way in pair.ways for key in way.keys))
    made: dict[str, Any] = {"prompt": pair.prompt} if pair.prompt else {}
    own = {"prompt": pair.used[0]} if pair.prompt else {}
    asked = mapped.prompt() if not pair.used else None
    is_whole = pair.dialogs is not None and asked != {}
    # Texts need no turns before them, and a prompt made of other columns has only texts beside it.
    are_texts = bool(pair.prompt) or all(isinstance(value, str) for value in pair.values)
    turns = None if is_whole else () if are_texts else mapped.turns(prompt)
    outcome = compare(mapped.row, pair, turns)
    if outcome.better is None:
        if is_whole and asked is None:
            made = {"prompt": shared_prompt(pair)}
            own = {"prompt": (*pair.used, pair.two.names[0])[0]}
        return _made(
            mapped,
            prompt if asked is None else asked,
            keys,
            roles=made,
            own=own,
            notes=(outcome.note,),
            understood=outcome.understood,
            replaced=pair.used,
        )
    better, worse = outcome.better, 1 - outcome.better
    made |= {"chosen": pair.values[better], "rejected": pair.values[worse]}
    own |= {"chosen": pair.two.names[better], "rejected": pair.two.names[worse]}
    return _made(
        mapped,
        prompt,
        keys,
        "two answers",
        made,
        shown=pair.shown,
        by=pair.by,
        own=own,
        replaced=pair.used,
    )
