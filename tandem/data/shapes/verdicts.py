"""Which of two answers a row calls better, in each of the ways that public data sets say it.

A number counts only where it can mean one thing: as the end of a column's name (0 and 1, or 1 and
2), by its sign where the column is HelpSteer's, or as a score of each answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.data.excerpt import describe
from tandem.data.grades import number_of
from tandem.data.rows import Row, RowProblem
from tandem.data.shapes.aliases import says_something
from tandem.data.shapes.mapped_row import MappedRow

TWO_ENDS = (("0", "1"), ("1", "2"), ("a", "b"), ("A", "B"))
"""How the names of two columns end that hold the two answers."""
_NAMES = ("preferred", "winner", "better_response_id", "better_answer_id")
"""Columns that name the better answer."""
_ALPACA_FARM, _PREFERENCE = ("output_1", "output_2"), "preference"
"""Its answers and its verdict; beside others a column of that name may have a sign."""
_SIGNED = ("preference_strength", "overall_preference")
"""HelpSteer's: below 0 the first answer is better, above 0 the second."""
FLAGS = ("winner_model_a", "winner_model_b", "winner_tie")
"""Kaggle's: the one that is 1."""
_SHP = ("human_ref_A", "human_ref_B")
_TIES = frozenset(
    ("tie", "tied", "tie (bothbad)", "bothbad", "both_bad", "both bad", "both_good", "both good")
) | {"both", "neither", "draw", "equal"}


@dataclass(frozen=True, slots=True)
class Two:
    """Two answers in a row: the keys that the row has them under, and the names that its file
    calls them by. is_mapped: whether one is so by the user's map."""

    keys: tuple[str, str]
    names: tuple[str, str]
    is_mapped: bool = False

    @property
    def ends(self) -> tuple[str, str]:
        """The number or letter that each name ends in, or ""."""
        first, second = self.names
        are_apart = first[:-1].casefold() == second[:-1].casefold()
        return _end(first, are_apart), _end(second, are_apart)

    def ends_in(self, *ends: str) -> bool:
        """Whether one name ends in each of two characters."""
        return sorted(self.ends) == sorted(ends)


def _end(name: str, are_apart: bool) -> str:
    """The last character, unless it is part of a word or a longer number, or a number behind
    another word than the other name's, as a model's version is."""
    last, before = name[-1:], name[-2:-1]
    if last.isdigit():
        return last if are_apart and not before.isdigit() else ""
    return last if are_apart or not before.isalpha() else ""


@dataclass(frozen=True, slots=True)
class Said:
    """The better answer (0, the first, or 1), or None and why the answers are not compared.

    understood: whether what the row says could be read; a tie could.
    """

    better: int | None
    note: str = ""
    understood: bool = True


@dataclass(frozen=True, slots=True)
class Way:
    """One way in which a row says which answer is better.

    keys: the row's columns that say it; names: those of its file. named: whether a column map may
    name its column as `preferred`. is_mapped: whether the user's does.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    read: Callable[[Row, Two, Way], Said]
    named: bool = False
    is_mapped: bool = False

    @property
    def column(self) -> str:
        """Its columns as one text."""
        *names, last = self.names
        return f"{', '.join(names)} and {last}" if names else last

    def says_something(self, row: Row) -> bool:
        """Whether one of its columns has a value."""
        return any(says_something(row.get(key)) for key in self.keys)


def ways_of(mapped: MappedRow, two: Two) -> list[Way]:
    """The ways in which the columns of a row may say which of two answers is better."""
    row = mapped.row
    if mapped.maps("preferred") or not mapped.finds:
        own = mapped.own("preferred")
        reads = by_sign if own in _SIGNED and two.ends_in("1", "2") else by_name
        if mapped.finds and two.names == _SHP and own == "labels":
            reads = by_shp
        way = Way(("preferred",), (own,), reads, named=True, is_mapped=mapped.maps("preferred"))
        return [way] if "preferred" in row else []
    if two.names == _SHP:  # its scores are Reddit's, of which the labels are made
        return [_way(("labels",), by_shp)] if "labels" in row and "history" in row else []
    found = [_way((name,), by_name, named=True) for name in _NAMES if name in row]
    if two.ends_in("1", "2"):
        found += [_way((name,), by_sign, named=True) for name in _SIGNED if name in row]
    scores = tuple(f"score_{end}" for end in two.ends)
    if all(name in row for name in scores):
        found.append(_way(scores, by_scores))
    if two.ends_in("a", "b") and all(name in row for name in FLAGS[:2]):
        found.append(_way(tuple(name for name in FLAGS if name in row), by_flags))
    is_told = any(way.says_something(row) for way in found)
    if not is_told and two.names == _ALPACA_FARM and says_something(row.get(_PREFERENCE)):
        return [_way((_PREFERENCE,), by_name, named=True)]
    return found


def _way(keys: tuple[str, ...], read: Callable[[Row, Two, Way], Said], named: bool = False) -> Way:
    return Way(keys, keys, read, named)


def saying(row: Row, ways: list[Way]) -> list[Way]:
    """Those of `ways` whose columns have a value in `row`; all of them if none has."""
    return [way for way in ways if way.says_something(row)] or ways


def read_verdict(row: Row, two: Two, ways: list[Way]) -> Said:
    """What the only one of `ways` says.

    Raises:
        RowProblem: the user mapped a column whose value cannot be read, or could mean either
            answer.
    """
    columns = ", ".join(way.column for way in ways)
    if len(ways) > 1:
        each = "may each say which answer is better, so none does: map one to preferred"
        return Said(None, f"{columns} {each}", understood=False)
    (way,) = ways
    if not way.says_something(row):
        return not_compared(f"two answers and no value in {columns}")
    return way.read(row, two, way)


def not_compared(why: str, *, understood: bool = True) -> Said:
    """Two answers that are not compared, with the note on it."""
    return Said(None, f"{why}, not compared: a prompt alone", understood)


def _tied(way: Way) -> Said:
    return not_compared(f"a tie by {way.column}")


def _unread(row: Row, way: Way, note: str, expected: str, advice: str = "") -> Said:
    """A value that cannot be read: the user's mistake where the user mapped it, else a note that
    does not quote it, so that the rows of one column count together.

    Raises:
        RowProblem: the column is mapped.
    """
    if way.is_mapped:
        found = ", ".join(describe(row[key]) for key in way.keys)
        raise RowProblem(way.names[0], found, expected, advice)
    return not_compared(note, understood=False)


def _number(row: Row, way: Way) -> float | None:
    """The number in a way's only column; None for a bool."""
    value = row[way.keys[0]]
    return None if isinstance(value, bool) else number_of(value)


def by_name(row: Row, two: Two, way: Way) -> Said:
    """The answer's column, its letter, its number, or a word for a tie."""
    value, number = row[way.keys[0]], _number(row, way)
    numbers = next((ends for ends in TWO_ENDS[:2] if two.ends_in(*ends)), ())
    words = _words(two)
    if number is not None:
        for end in numbers:
            if number == int(end):
                return Said(two.ends.index(end))
    elif isinstance(value, str):
        word = value.strip().casefold()
        if word in _TIES:
            return _tied(way)
        if word in words:
            return Said(words[word])
    either = [f"{end} ({two.names[two.ends.index(end)]})" for end in numbers]
    either += [f"{letter} ({two.names[words[letter]]})" for letter in ("a", "b")]
    note = f"{way.column} names neither answer and no tie (a, b, a column's name, tie)"
    advice = ""
    if number is not None:
        note = (
            f"numbers in {way.column} could mean either answer (write a, b or tie, or map another "
            "column to preferred)"
        )
        advice = "Other numbers could mean either answer: write a, b or tie in their place."
    expected = f"name the better answer: {', '.join(either)}, its column's name, or tie"
    return _unread(row, way, note, expected, advice)


def _words(two: Two) -> dict[str, int]:
    """What the words for an answer mean. The letters are those of the columns, if these have them;
    else the first and the second."""
    ends = [end.casefold() for end in two.ends]
    letters = ends if sorted(ends) == ["a", "b"] else ["a", "b"]
    words = {letter: place for place, letter in enumerate(letters)}
    words |= {f"model_{letter}": place for letter, place in words.items()}
    return words | {name.casefold(): place for place, name in enumerate(two.names)}


def by_sign(row: Row, two: Two, way: Way) -> Said:
    """HelpSteer's -3 to 3."""
    number = _number(row, way)
    first, second = (two.names[two.ends.index(end)] for end in ("1", "2"))
    if number is None:
        expected = f"be a number, below 0 where {first} is better, above 0 where {second} is"
        return _unread(row, way, f"{way.column} is no number", expected)
    return Said(two.ends.index("1" if number < 0 else "2")) if number else _tied(way)


def by_scores(row: Row, two: Two, way: Way) -> Said:
    """A score of each answer, more is better."""
    first, second = (number_of(row[key]) for key in way.keys)
    if first is None or second is None:
        return not_compared(f"{way.column} are not both numbers")
    return _tied(way) if first == second else Said(int(second > first))


def by_flags(row: Row, two: Two, way: Way) -> Said:
    """A column for each outcome, of which one is 1."""
    flags = [number_of(row[key]) for key in way.keys]
    if flags.count(1) != 1 or flags.count(0) != len(flags) - 1:
        expected = f"be 1 in one of {', '.join(way.names)}, 0 elsewhere"
        return _unread(row, way, f"{way.column} are not 1 in one place and 0 elsewhere", expected)
    outcome = way.keys[flags.index(1.0)]
    return _tied(way) if outcome == FLAGS[2] else Said(two.ends.index(outcome[-1]))


def by_shp(row: Row, two: Two, way: Way) -> Said:
    """SHP's labels: 1, the first is better; 0, the second."""
    number = _number(row, way)
    if number not in (0, 1):
        expected = f"be 1 ({two.names[0]} is better) or 0 ({two.names[1]} is)"
        return _unread(row, way, f"{way.column} is neither 1 nor 0", expected)
    return Said(1 - int(number))


def by_place(row: Row, two: Two, way: Way) -> Said:
    """The place of the better answer in their list, from 0."""
    number = _number(row, way)
    if number not in (0, 1):
        expected = f"be the place of the better one of {two.keys[0]}, 0 or 1"
        return _unread(row, way, f"{way.column} is neither 0 nor 1", expected)
    return Said(int(number))
