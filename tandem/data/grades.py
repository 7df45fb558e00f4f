"""Graded answers: a number beside an answer, and the rankings that the answers to a prompt make.

The answers to one prompt, turn by turn the same, in one data set are ranked by their grades; equal
grades are not compared. Grades of two data sets are never compared: their scales may differ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

from tandem.data.excerpt import describe
from tandem.data.rows import Row, RowProblem
from tandem.data.tools import bare
from tandem.message import Answer, Message
from tandem.types import Sample

Mode = Literal["auto", "pairs", "regression"]
"""How the reward model's stage learns graded answers (`reward.grades`)."""
COLUMNS = ("score", "rating", "stars", "overall_score", "helpfulness")
"""A grade beside an answer, under the names that public data sets have for it."""

ALONE = "graded or labelled, and no other answer to its prompt"
TIED = "graded or labelled, and all answers to its prompt have the same grade"
UNREAD_GRADE = "with a {} that is no finite number, not read as a grade"
MOST = 1e30
"""Squares and sums of such grades are finite."""
_OF_A_PAIR = "with a grade beside two answers, not read"
_SEVERAL = "{} may each be the grade, so none is: map one to grade"


def number_of(value: Any) -> float | None:
    """A grade as a number: of a number, a bool (1 or 0) or the same as text; None if it is none."""
    if not isinstance(value, bool | int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= MOST else None


def grade_columns(row: Row) -> list[str]:
    """The columns of a row that may hold its grade."""
    return [name for name in COLUMNS if row.get(name) not in (None, "")]


@dataclass(frozen=True, slots=True)
class Graded:
    """What a row says about its answer's grade: the number, the column that it is in, and what
    there is to note instead."""

    grade: float | None = None
    column: str = ""
    note: str = ""


def read_grade(row: Row, sample: Sample, columns: Mapping[str, str]) -> Graded:
    """The grade of a row that was read as `sample`.

    Args:
        row: with mapped columns under their roles. columns: the user's column map; beside one,
            other names than `grade` do not count.
    Raises:
        RowProblem: what was mapped to `grade` is no finite number.
    """
    if (sample.chosen is None) == (sample.rejected is None):
        return Graded(note=_OF_A_PAIR if sample.chosen is not None and row.get("grade") else "")
    found = ["grade"] if row.get("grade") not in (None, "") or "grade" in columns else []
    found = found or ([] if columns else grade_columns(row))
    if len(found) != 1:
        return Graded(note=_SEVERAL.format(" and ".join(found)) if found else "")
    (column,) = found
    grade = number_of(row[column])
    if grade is None and column in columns:
        raise RowProblem(column, describe(row[column]), "be a finite number")
    return Graded(grade, column, UNREAD_GRADE.format(column) if grade is None else "")


def answer_of(sample: Sample) -> Answer | None:
    """The only answer of a row that grades or labels it."""
    return sample.chosen if sample.chosen is not None else sample.rejected


def with_grade(sample: Sample, *, labels_are_grades: bool) -> Sample:
    """A labelled sample with its label as a grade of 1 or 0, if it has no other.

    Args:
        labels_are_grades: else it is read by its label alone, and has no grade.
    """
    if sample.label is None:
        return sample
    if not labels_are_grades:
        return replace(sample, grade=None)
    return sample if sample.grade is not None else replace(sample, grade=float(sample.label))


def as_answer(sample: Sample) -> Sample:
    """A graded sample with its answer in `chosen`, whatever the grade."""
    return replace(sample, chosen=answer_of(sample), rejected=None, label=None)


def lowest_imitated(
    samples: Iterable[Sample], lowest: float | None
) -> dict[str, tuple[float, bool]]:
    """The lowest grade that is imitated, by data set, and whether it is the mean of all.

    Args:
        samples: all of the data sets. lowest: for all of them; None: each one's mean.
    """
    grades: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.grade is not None:
            grades[sample.source.dataset].append(sample.grade)
    if lowest is not None:
        return dict.fromkeys(grades, (lowest, False))
    # The mean of equal numbers may come out a bit above them.
    means = {name: min(max(found), sum(found) / len(found)) for name, found in grades.items()}
    return {name: (mean, True) for name, mean in means.items()}


@dataclass
class Ranked:
    """What the graded answers of some samples make.

    rankings: by the number of the first of each one's samples. left: why others have no part in
    one, by number. ties: pairs of different answers in the rankings that are not compared. pairs:
    those that are. again: rows whose answer an earlier row has too; it has the mean of the grades.
    """

    rankings: dict[int, Sample] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    ties: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)

    @property
    def num_used(self) -> int:
        """Rows that have a part in a ranking."""
        return sum(len(ranking.sources) for ranking in self.rankings.values())


def rank(samples: Mapping[int, Sample]) -> Ranked:
    """Rank the graded ones of numbered samples by prompt and data set."""
    groups: dict[tuple[str, tuple[Message, ...], str], list[int]] = defaultdict(list)
    for number, sample in samples.items():
        if sample.grade is not None:
            groups[sample.source.dataset, sample.prompt, sample.tools].append(number)
    made = Ranked()
    for (name, _, _), numbers in groups.items():
        alike: dict[Answer, list[Sample]] = defaultdict(list)
        for number in numbers:
            alike[bare(answer_of(samples[number]) or "")].append(samples[number])
        means = {
            text: sum(sample.grade or 0.0 for sample in found) / len(found)
            for text, found in alike.items()
        }
        if len(set(means.values())) < 2:
            made.left |= dict.fromkeys(numbers, ALONE if len(means) < 2 else TIED)
            continue
        made.rankings[numbers[0]] = _ranking(alike, means)
        equal = Counter(means.values())
        tied = sum(count * (count - 1) // 2 for count in equal.values())
        made.ties[name] += tied
        made.pairs[name] += len(means) * (len(means) - 1) // 2 - tied
        made.again[name] += len(numbers) - len(means)
    return made


def rankings_of(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, graded answers as the rankings that they make; those without a part are left."""
    rankings = rank(dict(enumerate(samples))).rankings
    found = []
    for number, sample in enumerate(samples):
        if number in rankings:
            found.append(rankings[number])
        elif sample.grade is None:
            found.append(sample)
    return found


def chosen_mode(
    mode: Mode, made: Ranked, num_graded: int, num_others: int
) -> Literal["pairs", "regression"]:
    """How graded answers are learned. num_others: pairs and rankings that are there as such."""
    if mode != "auto":
        return mode
    return "pairs" if num_others or 2 * made.num_used >= num_graded else "regression"


def _ranking(alike: Mapping[Answer, Sequence[Sample]], means: Mapping[Answer, float]) -> Sample:
    """That of the samples that say each answer, in the order in which they came."""
    ordered = sorted(means, key=lambda text: -means[text])  # stable: equal ones as they came
    places = {grade: place for place, grade in enumerate(sorted(set(means.values()))[::-1], 1)}
    first = next(iter(alike.values()))[0]
    answers = [answer_of(alike[text][0]) or "" for text in ordered]
    return Sample(
        first.source,
        first.prompt,
        answers[0],
        answers[-1],
        ranking=tuple(
            (places[means[text]], said) for text, said in zip(ordered, answers, strict=True)
        ),
        grades=tuple(means[text] for text in ordered),
        rows=tuple(tuple(sample.source for sample in alike[text]) for text in ordered),
        tools=first.tools,
    )


def below(sample: Sample, lowest: Mapping[str, tuple[float, bool]]) -> str:
    """Which grade a graded answer must have to be imitated, if its own is lower; "" if it is not.

    A label decides before a grade.
    """
    if sample.grade is None or sample.label is not None:
        return ""
    bound, is_mean = lowest.get(sample.source.dataset, (-inf, False))
    if sample.grade >= bound:
        return ""
    return f"{bound:.6g} (the mean)" if is_mean else f"{bound:.6g}"
