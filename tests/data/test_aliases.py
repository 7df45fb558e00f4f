"""Columns by the names of other libraries: read where they can mean one thing only."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.data.rows import RowProblem
from tandem.data.shapes.shaping import to_sample
from tandem.data.tools import without_nulls
from tandem.types import Message, Sample, Source

HERE = Source("set", "set.jsonl", 3)
USER = Message("user", "2+2?")
SYSTEM = Message("system", "Be brief.")
ASK = [{"role": "user", "content": "2+2?"}]
SHAREGPT = [{"from": "human", "value": "2+2?"}]
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}


def read(row: dict[str, Any], **columns: str) -> Sample:
    return to_sample(row, HERE, columns).sample


def parts(row: dict[str, Any]) -> tuple[tuple[Message, ...], str | None, str | None]:
    found = read(row)
    return found.prompt, found.chosen, found.rejected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "2+2?") for name in ("question", "instruction", "query", "problem")),
        *((name, "2+2?") for name in ("input", "context")),
        *((name, ASK) for name in ("messages", "conversations", "conversation", "context")),
        ("conversations", SHAREGPT),
        ("messages", '[{"role": "user", "content": "2+2?"}]'),
    ],
)
def test_a_pairs_prompt_by_another_name(name: str, value: Any) -> None:
    for good, bad in (("4", "5"), ([GOOD], [BAD]), (GOOD, BAD)):
        row = {name: value, "chosen": good, "rejected": bad, "id": 7}
        assert parts(row) == ((USER,), "4", "5")
        found = to_sample(row, HERE)
        assert found.shape == f"preference with prompt={name}"
        assert (found.sample.columns, found.notes) == ({"id": 7}, ())
    for system in ("system", "system_prompt"):
        row = {name: value, "chosen": "4", "rejected": "5", system: "Be brief."}
        assert parts(row) == ((SYSTEM, USER), "4", "5")
        assert not read(row).columns


def test_llama_factorys_pairs() -> None:
    turn = {"from": "gpt", "value": "4"}
    row = {"conversations": SHAREGPT, "chosen": turn, "rejected": {**turn, "value": "5"}}
    assert parts(row) == ((USER,), "4", "5")
    cells = {name: json.dumps(value) for name, value in row.items()}
    assert parts(cells) == ((USER,), "4", "5")
    # One of them alone, or beside a prompt in plain text, is JSON that a model is to write.
    assert parts(cells | {"rejected": "5"})[1] == json.dumps(turn)
    plain = {"prompt": "2+2?", "chosen": cells["chosen"], "rejected": cells["rejected"]}
    assert parts(plain)[1] == json.dumps(turn)
    row = {"instruction": "Add", "input": "2 and 2", "chosen": "4", "rejected": "5"}
    assert parts(row) == ((Message("user", "Add\n\n2 and 2"),), "4", "5")
    row["history"] = [["Hi", "Yes?"]]
    before = (Message("user", "Hi"), Message("assistant", "Yes?"))
    assert parts(row) == ((*before, Message("user", "Add\n\n2 and 2")), "4", "5")
    assert not read(row).columns
    with pytest.raises(RowProblem, match="input must be text; found the number 2"):
        read(row | {"input": 2})


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("chosen_response", "rejected_response"),
        ("response_j", "response_k"),
        ("preferred_output", "non_preferred_output"),
    ],
)
def test_a_pair_by_other_names(good: str, bad: str) -> None:
    for name, value in (("prompt", "2+2?"), ("question", "2+2?"), ("messages", ASK)):
        for answers in (("4", "5"), ([GOOD], [BAD]), (GOOD, BAD)):
            row = {name: value, good: answers[0], bad: answers[1], "qid": 7}
            assert parts(row) == ((USER,), "4", "5")
            found = to_sample(row, HERE)
            asked = f"prompt={name}," if name != "prompt" else ""
            assert found.shape == f"preference with {asked}chosen={good},rejected={bad}"
            assert (found.sample.columns, found.notes) == ({"qid": 7}, ())
    with pytest.raises(RowProblem, match=f"{bad} must differ from chosen"):
        read({"prompt": "2+2?", good: "4", bad: "4"})
    # One without the other is no pair, and a row with an answer of its own is read as that.
    assert read({"prompt": "2+2?", good: "4", bad: None}) == Sample(
        HERE, (USER,), columns={good: "4", bad: None}
    )
    for own in ({"prompt": "2+2?", "completion": "3"}, {"messages": [*ASK, GOOD]}):
        assert read({**own, good: "4", bad: "5"}).rejected is None
    assert read({"prompt": "2+2?", good: "4", bad: "5"}, prompt="prompt").rejected is None


def test_openais_pairs_have_their_prompt_in_input() -> None:
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]
    asked = {"messages": ASK, "tools": tools, "parallel_tool_calls": True}
    found = to_sample(
        {"input": asked, "preferred_output": [GOOD], "non_preferred_output": [BAD]}, HERE
    )
    assert (found.sample.prompt, found.sample.chosen, found.sample.rejected) == ((USER,), "4", "5")
    assert "add" in found.sample.tools
    tools[0]["strict"] = None  # as in a table in which another row's tools have it
    pair = {"preferred_output": [GOOD], "non_preferred_output": [BAD]}
    of_table = without_nulls({"input": asked, **pair})
    assert to_sample(of_table, HERE).sample.tools == found.sample.tools
    assert (found.sample.columns, found.notes) == ({}, ())


def test_whole_dialogs_need_no_prompt() -> None:
    """A column beside them is left as it is, and noted if it looks like a part of the prompt."""
    row = {"chosen": [*ASK, GOOD], "rejected": [*ASK, BAD], "question": "else?", "context": "x"}
    found = to_sample(row, HERE)
    assert (found.shape, found.sample.prompt) == ("dialog preference", (USER,))
    assert found.sample.columns == {"question": "else?", "context": "x"}
    assert found.notes == ("column context is not in the prompt",)
    lines = {
        "chosen": "\n\nHuman: 2+2?\n\nAssistant: 4",
        "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5",
    }
    assert parts(lines | {"question": "else?"}) == ((USER,), "4", "5")


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        ("input", "output"),
        ("instruction", "response"),
        ("query", "response"),
        ("question", "response"),
        ("problem", "solution"),
        ("problem", "answer"),
        ("input", "target"),
        ("inputs", "targets"),
        ("instruction", "generation"),
        ("prompt", "response"),
    ],
)
def test_an_answer_by_another_name_is_learned_and_stays_a_column(ask: str, answer: str) -> None:
    row = {ask: "2+2?", answer: "4", "level": 1}
    found = to_sample(row, HERE)
    assert (found.sample.prompt, found.sample.chosen) == ((USER,), "4")
    assert found.sample.columns == {answer: "4", "level": 1}
    written = f"completion={answer}" if ask == "prompt" else f"prompt={ask},completion={answer}"
    assert (found.shape, found.notes) == (f"completion with {written}", ())
    bad = read(row | {"label": False})
    assert (bad.chosen, bad.rejected, bad.label) == (None, "4", False)
    if ask == "prompt":  # a prompt whatever else there is
        assert read(row | {answer: ""}).chosen is None
    else:
        with pytest.raises(RowProblem, match=f"{answer} must not be blank"):
            read(row | {answer: ""})
    # The same columns by a map: what it does not name is not read.
    assert read(row, prompt=ask).chosen is None


def test_a_completion_has_its_own_name() -> None:
    found = to_sample({"question": "2+2?", "completion": "4"}, HERE)
    assert found.sample == Sample(HERE, (USER,), "4")
    assert found.shape == "completion with prompt=question"


def test_history_and_system_prompt_belong_to_a_question() -> None:
    row = {"query": "2+2?", "response": "4", "history": [["Hi", "Yes?"]], "system_prompt": "Hm."}
    assert [turn.content for turn in read(row).prompt] == ["Hm.", "Hi", "Yes?", "2+2?"]
    assert read(row).columns == {"response": "4"}
    dialog = {
        "messages": [{"role": "system", "content": "Be brief."}, *ASK],
        "system_prompt": "Hm.",
    }
    found = to_sample(dialog, HERE)  # it has its own
    assert found.sample.prompt == (SYSTEM, USER)
    assert found.notes == ("column system_prompt is not in the prompt",)


@pytest.mark.parametrize("answer", ["response", "output"])
def test_an_instruction_takes_dollys_context_with_it(answer: str) -> None:
    row = {"instruction": "Add", "context": "2 and 2", answer: "4", "category": "closed_qa"}
    found = to_sample(row, HERE)
    assert (found.sample.prompt, found.sample.chosen) == ((Message("user", "Add\n\n2 and 2"),), "4")
    kept = {"response": "4"} if answer == "response" else {}
    assert (found.sample.columns, found.notes) == ({**kept, "category": "closed_qa"}, ())
    blank = to_sample(row | {"context": ""}, HERE)
    assert (blank.sample.prompt, blank.notes) == ((Message("user", "Add"),), ())
    # Beside an input it is something else, and so is what is no text.
    for more in ({"input": "3 and 1"}, {"input": ""}, {"context": ["2"]}):
        found = to_sample(row | more, HERE)
        asked = "Add" + "\n\n3 and 1" * (more.get("input") == "3 and 1")
        assert found.sample.prompt == (Message("user", asked),)
        assert found.notes == ("column context is not in the prompt",)


def test_a_solution_is_learned_and_the_answer_kept() -> None:
    found = read({"problem": "2+2?", "solution": "2+2 is 4.", "answer": "4"})
    assert found.chosen == "2+2 is 4."
    assert found.columns == {"solution": "2+2 is 4.", "answer": "4"}


def test_inputs_of_tests_are_no_part_of_a_prompt() -> None:
    row = {"question": "Add two numbers.", "inputs": ["1 2\n"], "outputs": ["3\n"]}
    found = to_sample(row, HERE)
    assert (found.sample.prompt, found.notes) == ((Message("user", "Add two numbers."),), ())


@pytest.mark.parametrize("ask", ["question", "problem", "prompt"])
@pytest.mark.parametrize("answer", [4, 4.5, True, {"value": "4", "aliases": ["four"]}, ["4"]])
def test_an_answer_that_is_no_text_is_for_reward_functions(ask: str, answer: Any) -> None:
    found = to_sample({ask: "2+2?", "answer": answer}, HERE)
    assert found.sample == Sample(HERE, (USER,), columns={"answer": answer})
    assert (found.unread, found.notes) == (("answer",), ())


@pytest.mark.parametrize("name", ["question", "problem", "query", "instruction", "input"])
def test_a_question_alone_is_a_prompt(name: str) -> None:
    found = to_sample({name: "2+2?", "ground_truth": "4"}, HERE)
    assert found.sample == Sample(HERE, (USER,), columns={"ground_truth": "4"})
    assert found.shape == f"prompt with prompt={name}"
    assert found.unread == ("ground_truth",)


def test_references_beside_a_prompt_are_for_reward_functions() -> None:
    for name in ("answer", "solution", "ground_truth"):
        found = read({"prompt": "2+2?", name: "4"})
        assert (found.chosen, found.columns) == (None, {name: "4"})


def test_what_could_be_two_things_is_neither() -> None:
    row = {"prompt": "2+2?", "response": "4", "output": "5"}
    found = to_sample(row, HERE)
    assert found.sample == Sample(HERE, (USER,), columns={"response": "4", "output": "5"})
    assert found.notes == (
        "output and response may each be the answer, so neither is: map one to completion",
    )
    assert read(row | {"output": ""}).chosen == "4"
    assert read({"prompt": "2+2?", "response": {"score": 1}}).chosen is None
    two = {"question": "2+2?", "problem": "3+3?"}
    for row in (two | {"chosen": "4", "rejected": "5"}, two | {"response": "4"}):
        with pytest.raises(RowProblem):
            read(row)
    assert read(two | {"chosen": "4", "rejected": "5"}, prompt="question").prompt == (USER,)


def test_own_names_and_maps_come_first() -> None:
    row = {"messages": [*ASK, GOOD], "question": "else?", "response": "no"}
    assert to_sample(row, HERE).shape == "messages"
    assert read({"text": "Once.", "question": "q", "response": "r"}).text == "Once."
    row = {"prompt": "2+2?", "completion": "4", "response": "5"}
    assert read(row).chosen == "4"
    assert read({"prompt": "2+2?", "response": "4"}, prompt="prompt").chosen is None


def test_one_conversation_is_read_as_messages_are() -> None:
    assert parts({"conversation": [*ASK, GOOD]}) == ((USER,), "4", None)
    with pytest.raises(RowProblem, match="columns of a known shape"):
        read({"conversation": [{"asked": "2+2?", "said": "4"}]})


def test_problems_name_the_rows_own_columns() -> None:
    with pytest.raises(RowProblem, match="question must not be blank"):
        read({"question": " ", "response": "4"})
    with pytest.raises(RowProblem, match=r"conversation\.from must be one of"):
        read({"conversation": [*ASK, {"from": "x", "value": "4"}]})


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"dialogue": ASK}, "Add ::messages=dialogue to the file's name."),
        (
            {"question": "a", "problem": "b", "chosen": "4", "rejected": "5"},
            "Add ::prompt=question to the file's name.",
        ),
        (
            {"turns": ASK, "chosen": "4", "rejected": "5"},
            "Add ::prompt=turns to the file's name.",
        ),
        (
            {"chosen": "4", "rejected": "5"},
            "Name the prompt's column, as in FILE::prompt=COLUMN.",
        ),
        (
            {"a": ASK, "b": ASK},
            (
                "Map its columns, as in FILE::prompt=question,completion=answer, or for pairs "
                "FILE::prompt=question,chosen=better,rejected=worse."
            ),
        ),
    ],
)
def test_a_refused_row_names_the_map_that_may_read_it(row: dict[str, Any], advice: str) -> None:
    with pytest.raises(RowProblem) as error:
        read(row)
    assert error.value.advice == advice
