"""Nothing from a row acts on a terminal or breaks a line."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.data.excerpt import describe, excerpt, names, visible


@given(st.text())
def test_visible_text_prints(text: str) -> None:
    assert visible(text).isprintable()
    assert visible(visible(text)) == visible(text)
    assert text != visible(text) or text.isprintable()


def test_escapes_are_pythons() -> None:
    assert visible("a\x1b[31m\nb\u202e\x9b") == r"a\x1b[31m\nb\u202e\x9b"
    assert excerpt("x" * 100) == "'" + "x" * 60 + "...'"


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
def test_describe(value: object, words: str) -> None:
    assert describe(value) == words


def test_names_are_limited() -> None:
    assert names([str(i) for i in range(10)], limit=3) == "columns 0, 1, 2 and 7 more"
