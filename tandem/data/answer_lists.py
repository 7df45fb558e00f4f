"""Several answers to a prompt in one column, and their scores or ranks: beside them, or in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.data.excerpt import describe
from tandem.data.grades import number_of
from tandem.data.rows import RowProblem
from tandem.data.turns import first_role

Row = Mapping[str, Any]

LISTS = ("answers", "completions", "responses", "generations")
"""Columns that hold several answers."""
_SCORES = ("scores", "ratings", "rating")
"""Columns with a number for each of them, more is better."""
_TEXTS = ("response", "answer", "completion", "output", "generation", "text")
"""Where objects in such a list have the answer."""
_NUMBERS = ("overall_score", "score", "rating", "rank")
"""Where they have its score or its rank."""
_RANKS = ("ranks", "rank")
"""Numbers of which the least is the best."""

_BLANK = "with a blank answer, left out of the ranking"
_UNSCORED = "with an answer whose score is no number, left out of the ranking"
_AGAIN = "with the same answer twice, ranked once by the mean of its scores"


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


def find_list(row: Row, columns: Mapping[str, str], *, finds: bool) -> Listed | str | None:
    """The list of answers in `row`; what there is to note, if two columns may have the scores.

    Args:
        columns: the user's column map. finds: whether columns count that are not called by a role.
    Raises:
        RowProblem: what was mapped is no such list.
    """
    names = ["answers"] if "answers" in columns or not finds else list(LISTS)
    lists = [name for name in names if _are_answers(row.get(name))]
    if "answers" in columns and not lists:
        expected = "be a list of texts, or of objects with one text each"
        raise RowProblem(columns["answers"], describe(row.get("answers")), expected)
    if len(lists) != 1:
        return None
    (name,) = lists
    answers = row[name]
    if "scores" in columns:
        beside, inside = ["scores"], []
    else:
        beside = [n for n in (*_SCORES, "ranks") if isinstance(row.get(n), list | tuple)]
        beside = [n for n in beside if finds or n in ("scores", "ranks")]
        inside = [n for n in _NUMBERS if _has(answers, n)]
    key = _text_key(answers) if any(isinstance(answer, Mapping) for answer in answers) else ""
    if key is None or not (beside or inside):
        return None
    if len(beside) + len(inside) > 1:
        own = columns.get(name, name)
        numbers = ", ".join([*beside, *(f"{own}.{n}" for n in inside)])
        return f"{numbers} may each score the answers, so none does: map one to scores"
    return Listed(name, beside[0], key) if beside else Listed(name, name, key, inside[0])


def _are_answers(value: Any) -> bool:
    """Whether a column holds several answers: texts or objects, but no conversation."""
    if not isinstance(value, list | tuple) or first_role(value) is not None:
        return False
    given = [answer for answer in value if answer is not None]
    return all(isinstance(a, str) for a in given) or all(isinstance(a, Mapping) for a in given)


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


def order(row: Row, listed: Listed, columns: Mapping[str, str]) -> Ordered:
    """The answers in order of their scores. Equal scores have one rank.

    Raises:
        RowProblem: the scores are not as many as the answers, or an answer is no text.
    """
    answers = row[listed.answers]
    own = columns.get(listed.answers, listed.answers)
    if listed.score_key:
        scores = _each(answers, listed.score_key)
    else:
        scores = row[listed.scores]
        if not isinstance(scores, list | tuple) or len(scores) != len(answers):
            expected = f"be a list of {len(answers)} numbers, one for each of {own}"
            raise RowProblem(columns.get(listed.scores, listed.scores), describe(scores), expected)
    if not listed.text_key:
        return ordered(answers, scores, own, least_is_best=listed.are_ranks)
    texts, where = _each(answers, listed.text_key), f"{own}.{listed.text_key}"
    return ordered(texts, scores, where, least_is_best=listed.are_ranks)


def _each(answers: Sequence[Any], key: str) -> list[Any]:
    return [None if answer is None else answer.get(key) for answer in answers]


def ordered(
    answers: Sequence[Any], scores: Sequence[Any], field: str, *, least_is_best: bool = False
) -> Ordered:
    """Answers by their scores: those that are blank or have no number left out, the same one once.

    Raises:
        RowProblem: an answer is no text; `field` names the column in it.
    """
    notes: dict[str, None] = {}
    found: dict[str, list[float]] = defaultdict(list)
    texts: dict[str, str] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None and not isinstance(answer, str):
            raise RowProblem(field, describe(answer), "be text")
        number = number_of(score)
        if answer is None or not answer.strip():
            notes[_BLANK] = None
        elif number is None:
            notes[_UNSCORED] = None
        else:
            found[answer.strip()].append(number)
            texts.setdefault(answer.strip(), answer)
    if any(len(numbers) > 1 for numbers in found.values()):
        notes[_AGAIN] = None
    means = {text: sum(numbers) / len(numbers) for text, numbers in found.items()}
    sizes = sorted(set(means.values()), reverse=not least_is_best)
    ranks = {size: rank for rank, size in enumerate(sizes, start=1)}
    return Ordered(
        [texts[text] for text in means], [ranks[mean] for mean in means.values()], tuple(notes)
    )
