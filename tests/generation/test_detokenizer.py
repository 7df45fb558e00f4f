"""Text as it grows: whole characters, and stop strings across any border."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.generation.detokenizer import AnswerText


def byte_text(ids: Sequence[int]) -> str:
    """A tokenizer with one token per byte."""
    return bytes(ids).decode("utf-8", errors="replace")


def pieces_of(text: str, *stops: str, min_tokens: int = 0) -> tuple[list[str], AnswerText]:
    said = AnswerText(byte_text, stops, min_tokens)
    pieces = [said.push(byte) for byte in text.encode()]
    return [*pieces, said.flush()], said


@given(st.text(max_size=40))
def test_what_was_shown_is_the_text_in_whole_characters(text: str) -> None:
    pieces, said = pieces_of(text)
    assert "".join(pieces) == said.text == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    assert all(piece for piece, byte in zip(pieces, text.encode(), strict=False) if byte < 128)


@given(
    st.text("aab\u00e9\U0001f600", max_size=30),
    st.lists(st.text("ab\u00e9\U0001f600", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_stop_strings_against_a_slow_loop(text: str, stops: list[str], min_tokens: int) -> None:
    expected, num_tokens = None, 0
    data = text.encode()
    begins = 0
    for n in range(1, len(data) + 1):
        sofar = byte_text(data[:n]).rstrip("\ufffd")
        found = [at for s in stops if (at := sofar.find(s, begins)) >= 0]
        if found and n >= min_tokens:
            expected, num_tokens = sofar[: min(found)], n
            break
        while any(sofar.find(s, begins) >= 0 for s in stops):
            begins += 1  # what was whole too early is no stop
    said = AnswerText(byte_text, stops, min_tokens)
    shown = ""
    for n, byte in enumerate(data, 1):
        shown += said.push(byte)
        assert said.ended == (expected is not None and n >= num_tokens)
    assert shown + said.flush() == said.text == (text if expected is None else expected)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    pieces, said = pieces_of("one\nUser: two", "\nUser:")
    assert said.ended
    assert "".join(pieces) == said.text == "one"
    pieces, said = pieces_of("one\nUse it", "\nUser:")
    assert not said.ended
    assert pieces[3:8] == ["", "", "", "", "\nUse "]


def test_a_stop_string_in_the_middle_of_a_token_and_before_half_a_character() -> None:
    table = {0: b"he", 1: b"llo. Us", 2: b"er:\xf0\x9f", 3: b"\x98\x80"}

    def decode(ids: Sequence[int]) -> str:
        return b"".join(table[i] for i in ids).decode("utf-8", errors="replace")

    said = AnswerText(decode, ("User:",))
    assert [said.push(i) for i in (0, 1)] == ["he", "llo. "]
    assert said.push(2) == ""
    assert said.ended
    assert said.text == "hello. "
    assert said.push(3) == said.flush() == ""


@pytest.mark.parametrize("drop", [" ", "\n"])
def test_decoders_that_drop_a_lead_or_a_trail(drop: str) -> None:
    def decode(ids: Sequence[int]) -> str:
        return byte_text(ids).removeprefix(drop).removesuffix(drop)

    text = f"{drop}one{drop}two{drop}{drop}three {drop}"
    said = AnswerText(decode)
    shown = "".join(said.push(byte) for byte in text.encode()) + said.flush()
    assert shown == said.text == decode(list(text.encode()))


def test_the_cost_of_a_token_does_not_grow() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return byte_text(ids)

    said = AnswerText(decode, ("stop",))
    for byte in ("caf\u00e9 " * 100).encode():
        said.push(byte)
    assert longest < 20
    for _ in range(500):
        said.push(0xC4)  # begins a character that never comes
    assert longest < 40


def fallback_text(ids: Sequence[int]) -> str:
    """A tokenizer with byte tokens from 128 on, as SentencePiece decodes them: a run of them is
    text as a whole, or every byte of it is U+FFFD."""
    text = ""
    for is_byte, run in groupby(ids, key=lambda i: i >= 128):
        data = bytes(run)
        try:
            text += data.decode("utf-8")
        except UnicodeDecodeError:
            assert is_byte
            text += "\ufffd" * len(data)
    return text


@given(st.text("ab \u00e9\u65e5\u672c\U0001f44d\U0001f389", max_size=40))
def test_runs_of_byte_tokens_are_decoded_from_where_a_character_begins(text: str) -> None:
    ids = list(text.encode())
    assert fallback_text(ids) == text
    said = AnswerText(fallback_text)
    assert "".join(map(said.push, ids)) + said.flush() == said.text == text


def test_a_stop_string_after_a_run_of_byte_tokens() -> None:
    text = "great \U0001f389\U0001f389\U0001f389! more"
    said = AnswerText(fallback_text, ("\U0001f389!",))
    shown = "".join(map(said.push, text.encode()))
    assert said.ended
    assert shown == said.text == "great \U0001f389\U0001f389"


@given(st.lists(st.sampled_from([0x41, 0xC4, 0xE2, 0x9C, 0x93, 0xF0, 0x9F, 0xFF]), max_size=120))
def test_bytes_that_are_no_text_come_as_decoding_all_at_once_gives_them(ids: list[int]) -> None:
    said = AnswerText(byte_text)
    assert "".join(map(said.push, ids)) + said.flush() == said.text == byte_text(ids)
