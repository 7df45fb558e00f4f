"""Conversations of every form, and what they get wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.data.rows import RowProblem
from tandem.data.turns import (
    check_prompt,
    inline_turns,
    is_transcript,
    prompt_turns,
    text_of,
    transcript_turns,
    turns_of,
)
from tandem.types import Message

USER = Message("user", "hi")
BOT = Message("assistant", "yo")


def test_role_and_content_or_from_and_value() -> None:
    openai = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    sharegpt = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    assert turns_of(openai, "m") == turns_of(sharegpt, "m") == (USER, BOT)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("User", "user"),
        ("gpt", "assistant"),
        ("bot", "assistant"),
        ("model", "assistant"),
        ("developer", "system"),
        ("function", "tool"),
    ],
)
def test_other_names_of_roles_are_read(name: str, role: str) -> None:
    assert turns_of([{"role": name, "content": "x"}], "m")[0].role == role


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"text": "c", "type": "text", "image": None}]
    assert turns_of([{"role": "user", "content": parts}], "m") == (Message("user", "abc"),)


def test_blank_system_turns_are_none() -> None:
    assert turns_of(
        [{"role": "system", "content": " "}, {"role": "user", "content": "hi"}], "m"
    ) == (USER,)


@pytest.mark.parametrize(
    ("value", "field", "found", "expected"),
    [
        ("words", "m", "'words'", "be a list of messages"),
        ({"role": "user"}, "m", "an object with columns role", "be a list of messages"),
        ([], "m", "a list of 0", "hold at least one message"),
        (["hi"], "m", "'hi' as turn 1", "have only objects"),
        ([{"role": "user"}], "m", "columns role in turn 1", "have role and content"),
        ([{"role": 3, "content": "x"}], "m.role", "the number 3 in turn 1", "be one of system"),
        ([{"role": "user", "content": None}], "m.content", "null in turn 1", "be text, or text p"),
        ([{"role": "user", "content": []}], "m.content", "a list of 0 in turn 1", "be text, or"),
        (
            [{"role": "user", "content": [{"type": "image", "text": "x"}]}],
            "m.content",
            "a list of 1 in turn 1",
            "be text, or text parts only",
        ),
        ([{"role": "user", "content": "\ud800"}], "m.content", "surrogate pair at c", "Unicode"),
    ],
)
def test_wrong_messages_are_refused(value: Any, field: str, found: str, expected: str) -> None:
    with pytest.raises(RowProblem) as error:
        turns_of(value, "m")
    assert error.value.field == field
    assert found in error.value.found
    assert expected in error.value.expected


@pytest.mark.parametrize("name", ["tool_calls", "function_call"])
def test_a_turn_without_calls_may_have_their_key(name: str) -> None:
    plain = {"role": "assistant", "content": "yo", name: None}
    assert turns_of([{"role": "user", "content": "hi"}, plain], "m") == (USER, BOT)


def test_an_unknown_role_names_the_nearest() -> None:
    with pytest.raises(RowProblem) as error:
        turns_of([{"role": "user", "content": "x"}, {"role": "asistant", "content": "x"}], "m")
    assert error.value.found == "'asistant' in turn 2"
    assert error.value.advice == "The nearest role is assistant."
    with pytest.raises(RowProblem) as error:
        turns_of([{"role": "zzz", "content": "x"}], "m")
    assert error.value.advice == ""


@pytest.mark.parametrize(
    ("value", "found", "expected"),
    [
        (None, "null", "be text"),
        (4, "the number 4", "be text"),
        (" \n", r"' \n'", "not be blank"),
        ("a\udfff", "half a surrogate pair at character 2", "be valid Unicode"),
    ],
)
def test_wrong_text_is_refused(value: Any, found: str, expected: str) -> None:
    with pytest.raises(RowProblem) as error:
        text_of(value, "chosen")
    assert (error.value.found, error.value.expected) == (found, expected)


@given(st.lists(st.text(alphabet="ab\n :", min_size=1).map(str.strip).filter(bool), min_size=1))
def test_transcripts_round_trip(contents: list[str]) -> None:
    contents = [text.replace("\n\n", "\n") for text in contents]
    names = ["Human", "Assistant"]
    text = "".join(f"\n\n{names[i % 2]}: {c}" for i, c in enumerate(contents))
    turns = transcript_turns(text, "chosen")
    assert [turn.content for turn in turns] == contents
    assert [turn.role for turn in turns] == [
        ("user", "assistant")[i % 2] for i in range(len(turns))
    ]


def test_transcript_marks_count_only_after_a_blank_line() -> None:
    text = "\n\nHuman: a\n\nAssistant: one\nHuman: two\n\nHumans: three"
    assert transcript_turns(text, "c") == (
        Message("user", "a"),
        Message("assistant", "one\nHuman: two\n\nHumans: three"),
    )
    assert is_transcript(text)
    assert not is_transcript("As a Human: being")


@pytest.mark.parametrize("text", ["\n\nAssistant: a", "Once.\n\nHuman: a", "words", ""])
def test_a_transcript_begins_with_a_human(text: str) -> None:
    with pytest.raises(RowProblem, match="begin with a Human: turn"):
        transcript_turns(text, "chosen")


def test_prompt_columns() -> None:
    assert prompt_turns("hi", "prompt") == (USER,)
    assert prompt_turns([{"role": "user", "content": "hi"}], "prompt") == (USER,)
    whole = "\n\nHuman: hi\n\nAssistant: yo\n\nHuman: hi\n\nAssistant:"
    assert prompt_turns(whole, "prompt") == (USER, BOT, USER)
    about = "Human: and Assistant: are words."
    assert prompt_turns(about, "prompt") == (Message("user", about),)


@pytest.mark.parametrize(
    ("turns", "found", "expected"),
    [
        ((), "no user turn", "begin with a user turn"),
        ((Message("system", "s"),), "no user turn", "begin with a user turn"),
        ((BOT, USER), "assistant first", "begin with a user turn"),
        ((USER, BOT), "assistant last", "end with a user turn"),
        ((USER, Message("assistant", " "), USER), "a blank assistant turn 2", "no blank turn"),
        ((Message("user", ""),), "a blank user turn 1", "have no blank turn"),
        ((Message("user", "\ud83d"),), "half a surrogate pair", "be valid Unicode"),
    ],
)
def test_wrong_prompts_are_refused(turns: tuple[Message, ...], found: str, expected: str) -> None:
    with pytest.raises(RowProblem) as error:
        check_prompt(turns, "prompt")
    assert found in error.value.found
    assert expected in error.value.expected


def test_prompts_that_end_with_a_turn_to_answer_are_taken() -> None:
    for turns in ((USER,), (Message("system", "s"), USER, BOT, USER), (USER, USER)):
        assert check_prompt(turns, "prompt") == turns
    tool = (USER, BOT, Message("tool", "4"))
    assert check_prompt(tool, "prompt") == tool


@pytest.mark.parametrize(
    "text",
    [
        " Human: hi Assistant: yo Human: hi Assistant:",
        "Human: hi\nAssistant: yo\nHuman: hi\nAssistant: ",
        "\n\nHuman: hi Assistant: yo\n\nHuman: hi Assistant:",
    ],
)
def test_the_turns_of_a_prompt_without_blank_lines(text: str) -> None:
    assert inline_turns(text) == (USER, BOT, USER)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Human:",
        "Assistant:",
        "Human: and Assistant: are words.",
        "Say Human: hi Assistant:",
        "Human: hi",
        "Human: Assistant:",
        "Human: compare Human: and Assistant:",
        "Human: is it Assistant: or Assistant:",
        "Human: a SuperAssistant:",
        "Assistant: hi Human: yo Assistant:",
        "Humans: hi Assistant:",
    ],
)
def test_a_prompt_that_may_be_one_turn_has_no_others(text: str) -> None:
    assert inline_turns(text) == ()
