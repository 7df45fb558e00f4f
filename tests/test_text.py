"""No text that comes from anywhere acts on a terminal, and errors fit a line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import DataError
from tandem.text import cause_of, named_line, one_line, visible, visible_lines


@given(st.text())
def test_visible_text_prints(text: str) -> None:
    assert visible(text).isprintable()
    assert visible(visible(text)) == visible(text)
    assert text != visible(text) or text.isprintable()


def test_a_cause_stands_within_a_sentence() -> None:
    assert cause_of(OSError("No network.\nSet the variable.")) == "No network. Set the variable"
    assert cause_of(OSError("x" * 400)) == "x" * 297 + "..."


def test_escapes_are_pythons() -> None:
    assert visible("a\x1b[31m\nb\u202e\x9b") == r"a\x1b[31m\nb\u202e\x9b"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 日本語\n\ttab", "plain, ünïcode, 日本語\n\ttab"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\rb\x00", "a\\rb\\x00"),
        ("\x9b2J", "\\x9b2J"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("\u3000\xa0👩\u200d🚀", "\u3000\xa0👩\u200d🚀"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert visible_lines(text) == shown
    visible_lines(text).encode()


def test_long_errors_are_cut() -> None:
    assert len(one_line(ValueError("x" * 1000))) == 300
    assert one_line(ValueError()) == "ValueError"


def test_an_error_is_one_line() -> None:
    assert named_line(ValueError("boom\nmore")) == "ValueError: boom"
    assert named_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert named_line(DataError("x must hold")) == "x must hold"
