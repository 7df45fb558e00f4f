"""Conversations that are no lists of messages."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from tandem.data.rows import RowProblem
from tandem.data.shapes.shaping import to_sample
from tandem.data.tools import without_nulls
from tandem.types import Message, Source

HERE = Source("set", "set.jsonl", 3)
BEFORE = (Message("user", "Hi"), Message("assistant", "Yes?"), Message("user", "2+2?"))
DIALOGS = [
    [{"input": "Hi", "output": "Yes?"}, {"input": "2+2?", "output": "4"}],
    [{"human": "Hi", "assistant": "Yes?"}, {"human": "2+2?", "assistant": "4"}],
    ["Hi", "Yes?", "2+2?", "4"],
]


@pytest.mark.parametrize("dialog", DIALOGS)
@pytest.mark.parametrize("name", ["messages", "conversations", "conversation"])
def test_exchanges_are_a_conversation(name: str, dialog: list[Any]) -> None:
    for value in (dialog, tuple(dialog), json.dumps(dialog)):
        found = to_sample({name: value, "source": "x"}, HERE)
        assert (found.sample.prompt, found.sample.chosen) == (BEFORE, "4")
        assert (found.sample.columns, found.notes) == ({"source": "x"}, ())
        mapped = to_sample({"data": value, name: None}, HERE, {"messages": "data"})
        assert (mapped.sample.prompt, mapped.sample.chosen) == (BEFORE, "4")


def test_a_system_text_comes_first() -> None:
    first = {"system": "Be brief.", "input": "Hi", "output": "Yes?"}
    found = to_sample({"conversation": [first, {"input": "2+2?", "output": "4"}]}, HERE)
    assert found.sample.prompt == (Message("system", "Be brief."), *BEFORE)


def test_the_last_answer_may_be_missing() -> None:
    first = {"input": "Hi", "output": "Yes?"}
    for last in (
        {"input": "2+2?"},
        {"input": "2+2?", "output": ""},
        {"input": "2+2?", "system": ""},
    ):
        found = to_sample({"conversation": [first, last]}, HERE)
        assert (found.sample.prompt, found.sample.chosen) == (BEFORE[:1], "Yes?")
        assert found.notes == ("turns after the last assistant turn skipped",)
        assert to_sample({"conversation": [last]}, HERE).sample.prompt == BEFORE[2:]
    assert to_sample({"conversations": ["2+2?"]}, HERE).sample.prompt == BEFORE[2:]


@pytest.mark.parametrize(
    "dialog",
    [
        [{"input": "Hi", "output": "Yes?", "output_with_loss": False}],
        [{"input": "Hi"}, {"output": "Yes?"}],
        [{"input": "Hi", "output": "Yes?"}, "2+2?"],
        [{"input": "Hi"}, {"input": "2+2?", "output": "4"}],
        [{"input": "", "output": "4"}],
        ["Hi", " "],
        ["Hi", None],
        ['{"role": "user", "content": "Hi"}'],
        [],
    ],
)
def test_what_may_say_more_is_refused(dialog: list[Any]) -> None:
    with pytest.raises(RowProblem):
        to_sample({"messages": dialog}, HERE)


CALLS = [{"name": "add", "arguments": {"a": 2, "b": 2}}, {"name": "now", "arguments": {}}]
TOOLS = [{"name": "add", "description": "", "parameters": {"a": {"type": "int"}}}]


@pytest.mark.parametrize("ask", ["query", "prompt"])
@pytest.mark.parametrize("dump", [json.dumps, list])
def test_a_list_of_calls_beside_tools_is_an_answer(ask: str, dump: Any) -> None:
    row = {"id": 1, ask: "2+2?", "answers": dump(CALLS), "tools": dump(TOOLS)}
    found = to_sample(row, HERE)
    answer = found.sample.chosen
    assert isinstance(answer, Message)
    assert (answer.content, json.loads(answer.tool_calls)) == ("", CALLS)
    assert (found.sample.prompt, found.notes) == (BEFORE[2:], ())
    assert found.sample.columns == {name: row[name] for name in ("id", "answers", "tools")}
    asked = "prompt=query," if ask == "query" else ""
    assert found.shape == f"completion with {asked}completion=answers"
    for other in ({"tools": None}, {"answers": "[]"}, {"answers": [{"name": "add"}]}):
        assert to_sample(row | other, HERE).sample.chosen is None
    with pytest.raises(RowProblem, match=r"answers.*arguments must be a JSON object"):
        to_sample(row | {"answers": [{"name": "add", "arguments": 4}]}, HERE)


def test_calls_of_a_table_have_the_arguments_that_were_given() -> None:
    calls = [
        {"name": "add", "arguments": {"a": 2, "b": 2, "zone": None}},
        {"name": "now", "arguments": {"a": None, "b": None, "zone": "CET"}},
    ]
    row = {"query": "2+2?", "answers": calls, "tools": TOOLS}
    answer = to_sample(without_nulls(row), HERE).sample.chosen
    assert isinstance(answer, Message)
    given = [call["arguments"] for call in json.loads(answer.tool_calls)]
    assert given == [{"a": 2, "b": 2}, {"zone": "CET"}]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"query": "2+2?", "conversation": ["a", "b", "c"], "response": "4"}, "4"),
        ({"problem": "2+2?", "conversation": [{"input": "a", "output": "b"}], "answer": "4"}, "4"),
        (
            {
                "query": "2+2?",
                "response": "4",
                "tools": [{"name": "f"}],
                "answers": [{"name": "f", "arguments": {}}],
            },
            "4",
        ),
    ],
)
def test_a_question_with_its_own_answer_stays_that(row: dict[str, Any], answer: str) -> None:
    found = to_sample(row, HERE)
    assert (found.sample.prompt, found.sample.chosen) == ((Message("user", "2+2?"),), answer)


def test_an_answer_with_a_label_is_no_pair_of_other_columns() -> None:
    row = {"prompt": "2+2?", "response": "4", "label": True}
    found = to_sample({**row, "chosen_response": "a", "rejected_response": "b"}, HERE)
    assert (found.sample.chosen, found.sample.rejected) == ("4", None)
    assert found.sample.label is True


def test_texts_that_name_their_speakers_are_not_taken_for_turns() -> None:
    """What they name would be learned as a part of the answer."""
    with pytest.raises(RowProblem):
        to_sample({"conversations": ["User: hi", "Assistant: hello"]}, HERE)


def test_a_measured_loss_of_a_turn_is_no_mark() -> None:
    turns = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "loss": 1.7},
    ]
    assert to_sample({"messages": turns}, HERE).sample.chosen == "4"


def test_a_margin_may_be_a_decimal() -> None:
    """As a Parquet column has it."""
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "margin": Decimal("1.5")}
    assert to_sample(row, HERE).sample.margin == 1.5


def test_a_mapped_answer_that_is_a_number_is_named() -> None:
    with pytest.raises(RowProblem, match="a must be text; found the number 42"):
        to_sample({"q": "2+2?", "a": 42}, HERE, {"question": "q", "answer": "a"})


def test_a_preference_beside_other_answers_may_have_a_sign() -> None:
    """As HelpSteer's have: 1 is the second there."""
    row = {"prompt": "2+2?", "response_1": "4", "response_2": "5", "preference": 1}
    assert to_sample(row, HERE).sample.rejected is None
