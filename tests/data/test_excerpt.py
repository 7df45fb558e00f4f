"""Nothing from a row acts on a terminal or breaks a line."""

from __future__ import annotations

import datetime

import pytest

from tandem.data.excerpt import describe, excerpt, names


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (3, "the number 3"),
        ("a\n", r"'a\n'"),
        ([1], "a list of 1"),
        ({"a": 1, "b": 2}, "an object with columns a, b"),
        ({}, "an object with no columns"),
        (datetime.date(2024, 1, 1), "a date"),
    ],
)
def test_values_are_described_in_words(value: object, words: str) -> None:
    assert describe(value) == words


def test_names_are_limited() -> None:
    assert names([str(i) for i in range(10)], limit=3) == "columns 0, 1, 2 and 7 more"


def test_long_text_is_cut() -> None:
    assert excerpt("x" * 100) == "'" + "x" * 60 + "...'"
