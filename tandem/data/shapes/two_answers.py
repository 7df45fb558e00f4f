"""Two answers in one row, and which of them is better: found by their columns, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.data.excerpt import describe
from tandem.data.rows import Row, RowProblem
from tandem.data.shapes.aliases import says_something
from tandem.data.shapes.answer_lists import json_list
from tandem.data.shapes.dialogs import answer_of, whole_dialog
from tandem.data.shapes.mapped_row import MappedRow
from tandem.data.shapes.verdicts import (
    FLAGS,
    TWO_ENDS,
    Said,
    Two,
    Way,
    by_place,
    not_compared,
    read_verdict,
    saying,
    ways_of,
)
from tandem.data.tools import bare
from tandem.data.turns import (
    Turns,
    first_role,
    is_transcript,
    listed,
    text_of,
    transcript_turns,
    turns_of,
)
from tandem.message import Message

_DIALOG = "conversation"
_STEMS = ("answer", "response", "completion", "output", "generation", _DIALOG, "human_ref")
PARTS = {
    f"{stem}{mark}{end}": (f"{stem}{mark}", end)
    for stem in _STEMS
    for mark in ("_", "")
    for end in "0123456789abcdefABCDEF"
}
"""Names of one of several answers: what they have in common, and the number or letter."""
SUMMARIES = ("info", "summaries", "choice")
"""OpenAI's comparisons of summaries: what is summed up, the two, and the place of the better."""
_SUMMARIES = ("summaries", "summaries")
_EACH_SUMMARY = ("summaries[0]", "summaries[1]")
"""Counted from 0, as `choice` counts them."""
_KAGGLE = ("prompt", "response_a", "response_b")

_SAME = "{} and {} are the same answer"
_APART = "{} and {} differ before their last answers"
_UNREADABLE = "{} and {} cannot both be read as answers"
_NOT_AS_MANY = "{} has not one text for each turn of prompt"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers, and the columns that may say which is better.

    values: the answers, as `chosen` or `rejected` could have them. ways: how the row may say it.
    dialogs: their turns, if each is a whole dialog. prompt: the prompt, if it is made of other
    columns than it. used: those. note: why they cannot be compared, whatever the verdict.
    """

    two: Two
    values: tuple[Any, Any]
    ways: list[Way]
    dialogs: tuple[Turns, Turns] | None = None
    prompt: str = ""
    used: tuple[str, ...] = ()
    note: str = ""

    @property
    def shown(self) -> dict[str, str]:
        """The roles that a column map could give its columns, with their names."""
        if self.two.keys == _SUMMARIES:
            prompt = {"prompt": self.used[0]} if self.prompt else {}
            return {**prompt, "answers": self.two.keys[0]}
        roles = dict(zip(("answer_a", "answer_b"), self.two.names, strict=True))
        way = self.ways[0]
        return {**roles, "preferred": way.names[0]} if way.named else roles

    @property
    def by(self) -> str:
        """The columns of the verdict that no map could name."""
        return "" if "preferred" in self.shown else f" by {self.ways[0].column}"


def pair_of_names(names: Iterable[str]) -> tuple[str, str] | None:
    """The two of `names` that are called like two answers; None if there are others like them."""
    ends: dict[str, list[str]] = {}
    for name in names:
        if part := PARTS.get(name):
            ends.setdefault(part[0], []).append(part[1])
    several = [(stem, sorted(found)) for stem, found in ends.items() if len(found) > 1]
    if len(several) != 1:
        return None
    ((stem, found),) = several
    return (f"{stem}{found[0]}", f"{stem}{found[1]}") if tuple(found) in TWO_ENDS else None


def find_pair(mapped: MappedRow) -> Pair | None:
    """The two answers in a row; None if there are none, or nothing that may say which is better.

    Raises:
        RowProblem: they cannot be read, and are mapped or all that the row has. A row with a prompt
            beside them can be used, whatever they are.
    """
    row, finds = mapped.row, mapped.finds
    is_asked = mapped.prompt() is not None
    if finds and all(row.get(name) is not None for name in SUMMARIES[:2]):
        way = _choice(mapped)
        pair = _summaries(row, way, is_asked=is_asked) if way is not None else None
        if pair is not None or not is_asked:
            return pair
    given = [name for name, value in row.items() if value is not None]
    # A null is a blank answer, unless three columns could be the two.
    keys = (pair_of_names(given) or pair_of_names(row)) if finds else ("answer_a", "answer_b")
    if keys is None or not set(keys) <= row.keys():
        return None
    names = mapped.own(keys[0]), mapped.own(keys[1])
    two = Two(keys, names, is_mapped=mapped.maps(*keys))
    ways = saying(row, ways_of(mapped, two))
    values = row[keys[0]], row[keys[1]]
    is_blank = [_is_blank(value) for value in values]
    if not ways or (all(is_blank) and not any(way.says_something(row) for way in ways)):
        return None
    if finds and keys == _KAGGLE[1:] and all(name in row for name in FLAGS[:2]):
        asked = json_list(row.get("prompt"))
        if asked is not None and all(isinstance(turn, str | None) for turn in asked):
            return _kaggle(row, two, ways, asked)
    if any(is_blank):
        if not is_asked and (keys[0].startswith(_DIALOG) or any(map(_is_dialog, values))):
            raise _blank_problem(two, values)
        return Pair(two, values, ways)
    try:
        return _readable(row, two, values, ways, is_mapped=mapped.maps(*keys, "preferred"))
    except RowProblem:
        if two.is_mapped or not is_asked:
            raise
        return Pair(two, values, ways, note=_UNREADABLE.format(*two.names))


def _is_blank(value: Any) -> bool:
    """Whether an answer says nothing: null, no text, no turns, or a last turn without content."""
    if isinstance(value, list | tuple):
        return not value or _is_blank(value[-1])
    if isinstance(value, Mapping) and first_role(value) is not None:
        calls = value.get("tool_calls") or value.get("function_call")
        return not calls and _is_blank(value.get("value" if "from" in value else "content"))
    return value is None or (isinstance(value, str) and not value.strip())


def _blank_problem(two: Two, values: tuple[Any, Any]) -> RowProblem:
    """That the first of two answers, or else the second, is blank."""
    name, value = next((n, v) for n, v in zip(two.names, values, strict=True) if _is_blank(v))
    found = "no content in its last message" if isinstance(value, list | tuple) and value else ""
    return RowProblem(name, found or describe(value), "not be blank")


def _is_dialog(value: Any) -> bool:
    """Whether an answer is a whole dialog: messages from the user's on, or a transcript."""
    if isinstance(value, str):
        return is_transcript(value)
    return first_role(value) not in (None, "assistant")


def _readable(
    row: Row, two: Two, values: tuple[Any, Any], ways: list[Way], *, is_mapped: bool
) -> Pair | None:
    """The pair of two values that are not blank; None if neither is an answer.

    Args:
        is_mapped: whether the user mapped them or what says which is better: they are answers.
    Raises:
        RowProblem: one of them is no answer, or they are messages that cannot be read.
    """
    are_dialogs = two.keys[0].startswith(_DIALOG)
    read = [
        listed(value, name, may_be_text=not are_dialogs)
        for value, name in zip(values, two.names, strict=True)
    ]
    if are_dialogs or all(first_role(value) is not None for value in read):
        values = read[0], read[1]
    others = [
        (value, name)
        for value, name in zip(values, two.names, strict=True)
        if not isinstance(value, str) and first_role(value) is None
    ]
    if len(others) == len(values) and not is_mapped:
        return None
    if others:
        raise _no_answer(*others[0], is_dialog=are_dialogs)
    dialogs = _dialogs(row, two, values, are_dialogs=are_dialogs)
    return None if are_dialogs and dialogs is None else Pair(two, values, ways, dialogs)


def _no_answer(value: Any, field: str, *, is_dialog: bool) -> RowProblem:
    """Why a value that is neither text nor begins with a message is no answer."""
    turns = [value] if isinstance(value, dict) else value
    are_messages = isinstance(turns, list | tuple) and any(isinstance(t, dict) for t in turns)
    if is_dialog or are_messages:
        try:
            turns_of(turns, field)
        except RowProblem as problem:
            return problem
    return RowProblem(field, describe(value), "be text or messages")


def _dialogs(
    row: Row, two: Two, values: tuple[Any, Any], *, are_dialogs: bool
) -> tuple[Turns, Turns] | None:
    """The turns of answers that are whole dialogs: messages from the user's on, or transcripts."""
    if all(isinstance(value, str) for value in values):
        if row.get("prompt") is None and all(map(is_transcript, values)):
            first, second = map(transcript_turns, values, two.names)
            return first, second
        return None
    if not are_dialogs and any(first_role(value) in (None, "assistant") for value in values):
        return None
    first, second = map(turns_of, values, two.names)
    return first, second


def compare(row: Row, pair: Pair, prompt: Turns | None) -> Said:
    """Which of two answers is better. A tie is none, and two that are the same or that do not
    answer the same turns are not compared.

    Args:
        prompt: the turns that are answered; None if each answer is a whole dialog.
    Raises:
        RowProblem: the verdict or an answer cannot be read, and is mapped.
    """
    said = read_verdict(row, pair.two, pair.ways)
    if said.better is None:
        return said
    if pair.note:
        return not_compared(pair.note, understood=False)
    names = pair.two.names
    blank = [name for name, value in zip(names, pair.values, strict=True) if _is_blank(value)]
    if blank and pair.two.is_mapped:
        raise _blank_problem(pair.two, pair.values)
    if blank:
        return not_compared(f"{' and '.join(blank)} {'are' if len(blank) > 1 else 'is'} blank")
    try:
        if prompt is None and pair.dialogs is not None:
            first, second = pair.dialogs
        else:
            both = zip(pair.values, names, strict=True)
            first, second = (whole_dialog(prompt or (), value, name) for value, name in both)
        answers = {bare(answer_of(first, names[0])), bare(answer_of(second, names[1]))}
    except RowProblem:
        if pair.two.is_mapped:
            raise
        return not_compared(_UNREADABLE.format(*names), understood=False)
    if first[:-1] != second[:-1]:
        return not_compared(_APART.format(*names))
    return said if len(answers) > 1 else not_compared(_SAME.format(*names))


def shared_prompt(pair: Pair) -> Turns:
    """The turns that two dialogs begin with alike, up to the last that is not the assistant's;
    without system turns, if those are not the same.

    Raises:
        RowProblem: they begin with different turns.
    """
    first, second = pair.dialogs or ((), ())
    systems = [[turn for turn in turns if turn.role == "system"] for turns in (first, second)]
    if systems[0] != systems[1]:
        first, second = (
            tuple(turn for turn in turns if turn.role != "system") for turns in (first, second)
        )
    length = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    while length and first[length - 1].role == "assistant":
        length -= 1
    if not any(turn.role != "system" for turn in first[:length]):
        asked = [turn for turn in second if turn.role != "system"]
        found = describe(asked[0].content) if asked else "no turn"
        raise RowProblem(pair.two.names[1], found, f"begin with the turn that {pair.two.names[0]} "
                         "begins with")  # fmt: skip
    return first[:length]


def _choice(mapped: MappedRow) -> Way | None:
    """What says which of two summaries is better."""
    is_mapped = mapped.columns.get("preferred") == "choice"
    if not is_mapped and ("choice" not in mapped.row or mapped.maps("preferred")):
        return None
    return Way(
        ("preferred" if is_mapped else "choice",), ("choice",), by_place, is_mapped=is_mapped
    )


def _summaries(row: Row, way: Way, *, is_asked: bool) -> Pair | None:
    """A post or an article with two summaries, its prompt as in arXiv 2009.01325, table 10, or the
    row's own; None if that has other columns beside it.

    Raises:
        RowProblem: it has no prompt of its own, and there are no two summaries, or of nothing.
    """
    info, summaries = row["info"], row["summaries"]
    are_two = isinstance(summaries, list | tuple) and len(summaries) == 2
    if is_asked and not (isinstance(info, Mapping) and are_two):
        return None
    prompt = "" if is_asked else _post(info)
    if not are_two:
        raise RowProblem("summaries", describe(summaries), "be a list of two objects with text")
    # What has no key text is no text.
    first, second = (each.get("text", each) if isinstance(each, Mapping) else each
                     for each in summaries)  # fmt: skip
    two, used = Two(_SUMMARIES, _EACH_SUMMARY), () if is_asked else ("info",)
    if isinstance(first, str | None) and isinstance(second, str | None):
        return Pair(two, (first, second), [way], prompt=prompt, used=used)
    note = _UNREADABLE.format(*two.names)
    return Pair(two, ("", ""), [way], prompt=prompt, used=used, note=note)


def _post(info: Any) -> str:
    """What is summed up, as a prompt.

    Raises:
        RowProblem: it is no text.
    """
    if not isinstance(info, Mapping):
        raise RowProblem("info", describe(info), "be an object with a post or an article")
    if says_something(info.get("post")):
        heads = {"subreddit": "SUBREDDIT: r/", "title": "TITLE: ", "post": "POST: "}
    elif says_something(info.get("article")):
        heads = {"article": "Article:\n\n"}
    else:
        raise RowProblem("info", describe(info), "have a post or an article")
    given = (key for key in heads if says_something(info.get(key)))
    said = (heads[key] + text_of(info[key], f"info.{key}") for key in given)
    return "\n\n".join([*said, "TL;DR:"])


def _kaggle(row: Row, two: Two, ways: list[Way], asked: list[str | None]) -> Pair:
    """The dialogs of Kaggle's arena rows, whose three columns are lists of turns in JSON.

    Raises:
        RowProblem: a turn of the prompt is blank.
    """
    turns = [Message("user", text_of(turn, "prompt")) for turn in asked]
    dialogs: list[Turns] = []
    for name in two.names:
        given = json_list(row[name])
        if given is None or len(given) != len(asked) or not all(map(_is_said, given)):
            start = (turns[0],)  # what no answer precedes
            note = _NOT_AS_MANY.format(name)
            return Pair(two, ("", ""), ways, (start, start), used=_KAGGLE[:1], note=note)
        said = [Message("assistant", text) for text in given]
        dialogs.append(tuple(turn for both in zip(turns, said, strict=True) for turn in both))
    first, second = dialogs
    values = [turn.as_dict() for turn in first], [turn.as_dict() for turn in second]
    return Pair(two, values, ways, (first, second), used=_KAGGLE[:1])


def _is_said(text: Any) -> bool:
    return isinstance(text, str) and bool(text.strip())
