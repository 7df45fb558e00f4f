"""Two answers in one row, and which of them is better: found by their columns, and compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.data.excerpt import describe
from tandem.data.rows import RowProblem
from tandem.data.turns import (
    Turns,
    first_role,
    is_transcript,
    listed,
    text_of,
    transcript_turns,
    turns_of,
)
from tandem.data.verdicts import (
    FLAGS,
    TWO_ENDS,
    Said,
    Two,
    Way,
    by_place,
    read_verdict,
    saying,
    ways_of,
)

Row = Mapping[str, Any]

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
_KAGGLE = ("prompt", "response_a", "response_b")

_SAME = "{} and {} are the same answer, not compared: a prompt alone"
_APART = "{} and {} differ before their last answers, not compared: a prompt alone"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers, and the columns that may say which is better.

    values: the answers, as `chosen` or `rejected` could have them. ways: how the row may say it.
    dialogs: their turns, if each is a whole dialog. prompt: the prompt, if it is made of other
    columns than it. used: those.
    """

    two: Two
    values: tuple[Any, Any]
    ways: list[Way]
    dialogs: tuple[Turns, Turns] | None = None
    prompt: str = ""
    used: tuple[str, ...] = ()

    @property
    def shown(self) -> dict[str, str]:
        """The roles that a column map could give its columns, with their names."""
        if self.prompt:
            return {"prompt": self.used[0], "answers": self.two.names[0]}
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


def find_pair(row: Row, columns: Mapping[str, str], *, finds: bool) -> Pair | None:
    """The two answers in `row`; None if there are none, or nothing that may say which is better.

    Args:
        columns: the user's column map. finds: whether columns count that are not called by a role.
    Raises:
        RowProblem: they cannot be read.
    """
    if finds and all(row.get(name) is not None for name in SUMMARIES[:2]) and "choice" in row:
        return _summaries(row)
    given = [name for name, value in row.items() if value is not None]
    keys = pair_of_names(given) if finds else ("answer_a", "answer_b")
    if keys is None or not set(keys) <= set(given):
        return None
    two = Two(keys, (columns.get(keys[0], keys[0]), columns.get(keys[1], keys[1])))
    ways = saying(row, ways_of(row, two, columns, finds=finds))
    if not ways:
        return None
    values = row[keys[0]], row[keys[1]]
    is_kaggles = finds and keys == _KAGGLE[1:] and all(name in row for name in FLAGS[:2])
    if is_kaggles and (both := _kaggle(row)):
        first, second = map(turns_of, both, keys)
        return Pair(two, both, ways, (first, second), used=_KAGGLE[:1])
    are_dialogs = keys[0].startswith(_DIALOG)
    read = [
        listed(value, name, may_be_text=not are_dialogs)
        for value, name in zip(values, two.names, strict=True)
    ]
    if are_dialogs or all(first_role(value) is not None for value in read):
        values = read[0], read[1]
    if not all(isinstance(value, str) or first_role(value) for value in values):
        return None
    dialogs = _dialogs(row, two, values, are_dialogs=are_dialogs)
    return None if are_dialogs and dialogs is None else Pair(two, values, ways, dialogs)


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


def compare(row: Row, pair: Pair) -> Said:
    """Which of two answers is better. A tie is none, and two that are the same or that do not
    answer the same turns are not compared.

    Raises:
        RowProblem: the verdict or an answer cannot be read.
    """
    said = read_verdict(row, pair.two, pair.ways)
    if said.better is None:
        return said
    if pair.dialogs is not None and pair.dialogs[0][:-1] != pair.dialogs[1][:-1]:
        return Said(None, _APART.format(*pair.two.names))
    texts = {_last_text(v, name) for v, name in zip(pair.values, pair.two.names, strict=True)}
    if len(texts) == 1:
        return Said(None, _SAME.format(*pair.two.names))
    return said


def shared_prompt(pair: Pair) -> Turns:
    """The turns that two dialogs begin with alike, up to the last that is not the assistant's.

    Raises:
        RowProblem: they begin with different turns.
    """
    first, second = pair.dialogs or ((), ())
    length = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    while length and first[length - 1].role == "assistant":
        length -= 1
    if not length:
        found = describe(second[0].content) if second else "no turn"
        raise RowProblem(pair.two.names[1], found, f"begin with the turn that {pair.two.names[0]} "
                         "begins with")  # fmt: skip
    return first[:length]


def _last_text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return text_of(value, name).strip()
    return turns_of([value] if isinstance(value, Mapping) else value, name)[-1].content.strip()


def _summaries(row: Row) -> Pair | None:
    """A post or an article with two summaries, its prompt as in arXiv 2009.01325, table 10."""
    info, summaries = row["info"], row["summaries"]
    if not isinstance(info, Mapping) or not isinstance(summaries, list | tuple):
        return None
    texts = [each.get("text") if isinstance(each, Mapping) else each for each in summaries]
    if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        raise RowProblem("summaries", describe(summaries), "be a list of two objects with text")
    post = [
        (head, info[key])
        for head, key in (("SUBREDDIT: r/", "subreddit"), ("TITLE: ", "title"), ("POST: ", "post"))
        if info.get(key)
    ]
    if not info.get("post"):
        post = [("Article:\n\n", info["article"])] if info.get("article") else []
    if not post:
        raise RowProblem("info", describe(info), "have a post or an article")
    prompt = "\n\n".join([*(head + text_of(text, "info") for head, text in post), "TL;DR:"])
    two = Two(("summaries", "summaries"), ("summaries", "summaries"))
    way = Way(("choice",), ("choice",), by_place)
    return Pair(two, (texts[0], texts[1]), [way], prompt=prompt, used=("info",))


def _kaggle(row: Row) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
    """The dialogs of Kaggle's arena rows, whose three columns are lists of turns in JSON; None if
    none of them is.

    Raises:
        RowProblem: there are not as many answers as turns of the prompt.
    """
    asked, *answers = (_json_list(row.get(name)) for name in _KAGGLE)
    if asked is None:
        return None
    dialogs = []
    for name, given in zip(_KAGGLE[1:], answers, strict=True):
        if given is None or len(given) != len(asked):
            expected = f"be a JSON list of {len(asked)} answers, one for each turn of prompt"
            raise RowProblem(name, describe(row[name] if given is None else given), expected)
        roles = ("user", "assistant")
        turns = [turn for both in zip(asked, given, strict=True) for turn in both]
        dialogs.append([{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)])
    return dialogs[0], dialogs[1]


def _json_list(value: Any) -> list[Any] | None:
    """A list of texts, or such a list in JSON; None for anything else."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or not value:
        return None
    return value if all(isinstance(each, str | None) for each in value) else None
