"""Every shape of the ecosystem to one sample; every odd row to a reason."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from tandem.data.excerpt import names
from tandem.data.reading.sources import parse_columns
from tandem.data.rows import RowProblem
from tandem.data.shapes.plain import SHAPES
from tandem.data.shapes.shaping import to_sample
from tandem.types import Message, Sample, Source

HERE = Source("set", "set.jsonl", 3)
USER = Message("user", "2+2?")
SYSTEM = Message("system", "Be brief.")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def sample(row: dict[str, Any], **columns: str) -> Sample:
    return to_sample(row, HERE, columns).sample


PAIR = Sample(HERE, (USER,), "4", "5")
ANSWER = Sample(HERE, (USER,), "4")
PROMPT = Sample(HERE, (USER,))
DIALOG = [user("2+2?"), bot("4"), user("And 3+3?")]
TURNS = (USER, Message("assistant", "4"), Message("user", "And 3+3?"))


@pytest.mark.parametrize(
    ("shape", "row", "expected"),
    [
        ("preference", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}, PAIR),
        ("preference", {"prompt": [user("2+2?")], "chosen": "4", "rejected": "5"}, PAIR),
        (
            "preference",
            {"prompt": [user("2+2?")], "chosen": [bot("4")], "rejected": [bot("5")]},
            PAIR,
        ),
        (
            "preference",  # the prompt repeated in both dialogs, as UltraFeedback does
            {
                "prompt": "2+2?",
                "chosen": [user("2+2?"), bot("4")],
                "rejected": [user("2+2?"), bot("5")],
            },
            PAIR,
        ),
        (
            "preference",
            {
                "prompt": "2+2?",
                "chosen": [{"role": "system", "content": "Be brief."}, user("2+2?"), bot("4")],
                "rejected": [{"role": "system", "content": "Be brief."}, user("2+2?"), bot("5")],
            },
            Sample(HERE, (SYSTEM, USER), "4", "5"),
        ),
        (
            "preference",  # Dahoas/rm-static
            {
                "prompt": "\n\nHuman: 2+2?\n\nAssistant: 4\n\nHuman: And 3+3?\n\nAssistant:",
                "chosen": " 6",
                "rejected": " 7",
            },
            Sample(HERE, TURNS, " 6", " 7"),
        ),
        ("preference", {"prompt": "2+2?", "chosen": "4", "rejected": None}, ANSWER),
        (
            "dialog preference",
            {"chosen": [user("2+2?"), bot("4")], "rejected": [user("2+2?"), bot("5")]},
            PAIR,
        ),
        (
            "dialog preference",
            {
                "chosen": "\n\nHuman: 2+2?\n\nAssistant: 4\n\nHuman: And 3+3?\n\nAssistant: 6",
                "rejected": "\n\nHuman: 2+2?\n\nAssistant: 4\n\nHuman: And 3+3?\n\nAssistant: 7",
            },
            Sample(HERE, TURNS, "6", "7"),
        ),
        ("completion", {"prompt": "2+2?", "completion": "4"}, ANSWER),
        ("completion", {"prompt": [user("2+2?")], "completion": [bot("4")]}, ANSWER),
        (
            "completion",
            {"prompt": "2+2?", "completion": "4", "label": True},
            replace(ANSWER, label=True),
        ),
        (
            "ranking",
            {"prompt": "2+2?", "ranking": ["4", "5", "no"]},
            Sample(HERE, (USER,), "4", "no", ranking=((1, "4"), (2, "5"), (3, "no"))),
        ),
        (
            "ranked answers",
            {"prompt": "2+2?", "answers": ["no", "4", "5"], "ranks": [2, 1, 2]},
            Sample(HERE, (USER,), "4", "5", ranking=((1, "4"), (2, "no"), (2, "5"))),
        ),
        (
            "completion",
            {"prompt": "2+2?", "completion": "5", "label": False},
            Sample(HERE, (USER,), None, "5", label=False),
        ),
        ("messages", {"messages": [user("2+2?"), bot("4")]}, ANSWER),
        ("messages", {"messages": [*DIALOG, bot("6")]}, Sample(HERE, TURNS, "6")),
        ("messages", {"messages": DIALOG[:1]}, PROMPT),
        ("messages", {"messages": [*DIALOG, bot("6"), user("Thanks")]}, Sample(HERE, TURNS, "6")),
        (
            "messages",
            {"messages": [user("2+2?"), bot("5")], "label": False},
            Sample(HERE, (USER,), None, "5", label=False),
        ),
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "2+2?"},
                    {"from": "gpt", "value": "4"},
                ]
            },
            Sample(HERE, (SYSTEM, USER), "4"),
        ),
        ("alpaca", {"instruction": "2+2?", "input": "", "output": "4"}, ANSWER),
        ("alpaca", {"instruction": "2+2?", "output": "4"}, ANSWER),
        (
            "alpaca",
            {"instruction": "Add", "input": "2 and 2", "output": "4"},
            Sample(HERE, (Message("user", "Add\n\n2 and 2"),), "4"),
        ),
        ("text", {"text": "Once."}, Sample(HERE, text="Once.")),
        ("prompt", {"prompt": "2+2?"}, PROMPT),
        ("prompt", {"prompt": [user("2+2?")]}, PROMPT),
    ],
)
def test_every_shape_becomes_its_sample(shape: str, row: dict[str, Any], expected: Sample) -> None:
    found = to_sample(row, HERE)
    assert found.shape == shape
    assert found.sample == expected


def test_each_shape_with_a_prompt_takes_a_system_column() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"chosen": [user("2+2?"), bot("4")], "rejected": [user("2+2?"), bot("5")]},
        {"prompt": "2+2?", "completion": "4"},
        {"messages": [user("2+2?"), bot("4")]},
        {"conversations": [user("2+2?"), bot("4")]},
        {"instruction": "2+2?", "output": "4"},
        {"question": "2+2?", "answer": "4"},
        {"prompt": "2+2?"},
    ]
    for row in rows:
        assert sample(row | {"system": "Be brief."}).prompt == (SYSTEM, USER)
        assert sample(row | {"system": ""}).prompt == (USER,)
        assert "system" not in sample(row | {"system": "Be brief."}).columns


def test_columns_that_no_shape_reads_are_kept() -> None:
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "level": "easy", "votes": [1, 2]}
    assert sample(row).columns == {"level": "easy", "votes": [1, 2]}
    assert sample({"prompt": "2+2?", "answer": "4"}).columns == {"answer": "4"}
    assert sample({"question": "2+2?", "answer": "4"}).columns == {"answer": "4"}
    assert sample({"question": "2+2?", "answer": "4"}).chosen == "4"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"ranking": ["4"]}, "ranking must be a list of two answers or more; found a list of 1"),
        ({"ranking": "4"}, "ranking must be a list of two answers or more; found '4'"),
        ({"ranking": ["4", " 4"]}, "ranking must hold each answer once; found the same answer"),
        ({"ranking": ["4", ""]}, "ranking must not be blank"),
        ({"answers": ["4", "5"], "ranks": [1]}, "ranks must be a list of 2 ranks, one an answer"),
        ({"answers": ["4", "5"], "ranks": [1, 0]}, "ranks must hold whole numbers from 1"),
        (
            {"answers": ["4", "5"], "ranks": [1, True]},
            "hold whole numbers from 1, the best, on; ",
        ),
        ({"answers": ["4", "5"], "ranks": [3, 3]}, "differ for two answers at least; found 3 for"),
        ({"chosen": "4", "rejected": "5", "margin": "much"}, "margin must be a finite number; fou"),
        ({"chosen": "4", "rejected": "5", "margin": True}, "margin must be a finite number; found"),
        ({"chosen": "4", "rejected": "5", "margin": math.nan}, "margin must be a finite number"),
        ({"chosen": "4", "rejected": "5", "margin": 10**400}, "margin must be at most 1e+30 in s"),
        ({"chosen": "4", "rejected": "5", "margin": -1e300}, "margin must be at most 1e+30 in s"),
    ],
)
def test_rankings_and_margins_that_cannot_be_used(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(RowProblem) as raised:
        to_sample({"prompt": "2+2?", **row}, HERE)
    assert problem in str(raised.value)


def test_a_margin_is_read_and_stays_a_column() -> None:
    found = to_sample({"prompt": "2+2?", "chosen": "4", "rejected": "5", "margin": "1.5"}, HERE)
    assert found.sample.margin == 1.5
    assert found.sample.columns == {"margin": "1.5"}
    assert found.notes == ("with a margin, which the reward model's loss reads",)
    assert sample({"prompt": "2+2?", "chosen": "4", "rejected": "5", "margin": None}).margin == 0


@pytest.mark.parametrize(
    ("row", "map_"),
    [
        (
            {"Prompt": "p", "Chosen": "a", "Rejected": "b", "Notes": "n"},
            "prompt=Prompt,chosen=Chosen,rejected=Rejected",
        ),
        ({"QUESTION": "p", "Answer": "a"}, "prompt=QUESTION,completion=Answer"),
        ({"Instruction": "p", "Output": "a", "Input": ""}, "prompt=Instruction,completion=Output"),
        ({"Query": "p", "Response": "a", "id": 3}, "prompt=Query,completion=Response"),
        ({"Conversations": [user("p"), bot("a")]}, "messages=Conversations"),
        ({"Text": "Once."}, "text=Text"),
    ],
)
def test_columns_that_differ_in_case_alone_get_the_map_that_reads_them(
    row: dict[str, Any], map_: str
) -> None:
    with pytest.raises(RowProblem) as problem:
        to_sample(row, HERE)
    told = str(problem.value.at(HERE).error())
    assert f"); found {names(row)}. Map them: {HERE.path}::{map_}" in told
    assert "--on-bad-row drop" not in told
    assert len(told) < 250
    to_sample(row, HERE, parse_columns(map_.split(","), "columns"))


def test_a_list_of_answers_in_output_gets_the_map_that_reads_it() -> None:
    row = {"instruction": "Add.", "input": "", "output": ["4", "5"]}
    with pytest.raises(RowProblem) as problem:
        to_sample(row, HERE)
    map_ = "prompt=instruction,ranking=output"
    told = str(problem.value.at(HERE).error())
    assert f"found a list of 2. Answers, the best one first, are read with ::{map_}." in told
    sample = to_sample(row, HERE, parse_columns(map_.split(","), "columns"))
    assert "4" in str(sample)
    with pytest.raises(
        RowProblem, match=r"output must be text; found a list of 2\. $|list of 2\.$"
    ):
        to_sample({**row, "input": "2+2"}, HERE)  # which a map would leave out


def test_columns_in_upper_case_that_no_map_can_join() -> None:
    row = {"Instruction": "Add.", "Input": "2+2", "Output": "4"}
    with pytest.raises(RowProblem, match=r"its columns in lower case .* Rename its columns\."):
        to_sample(row, HERE)
    row = {" prompt": "a", "Chosen ": "b", "rejected": "c"}
    wide = r"in lower case and without white space around them .*found columns ' prompt', 'Chosen '"
    with pytest.raises(RowProblem, match=wide):
        to_sample(row, HERE)
    for row in ({"Foo": "a", "Bar": "b"}, {"Prompt": "a", "PROMPT": "b"}):
        with pytest.raises(RowProblem, match="columns of a known shape"):
            to_sample(row, HERE)


PRINTED = "[{'role': 'user', 'content': 'a'}]"


@pytest.mark.parametrize(
    ("row", "columns", "told"),
    [
        ({"q": " ", "a": "4"}, {"prompt": "q", "completion": "a"}, "q must not be blank"),
        ({"q": "2+2?", "a": 4}, {"prompt": "q", "completion": "a"}, "a must be text or a list of"),
        ({"q": PRINTED, "a": "4"}, {"prompt": "q", "completion": "a"}, "q must be text, or mess"),
        (
            {"q": "2+2?", "a": "4", "b": " "},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            "b must not be blank",
        ),
        (
            {"q": "2+2?", "a": "4", "b": "5", "m": "x"},
            {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "m"},
            "m must be a finite number",
        ),
        ({"q": "2+2?", "s": 5}, {"prompt": "q", "system": "s"}, "s must be text; found the number"),
        ({"m": [{"role": "x", "content": "y"}]}, {"messages": "m"}, "m.role must be one of"),
        (
            {"q": "2+2?", "a": None},
            {"prompt": "q", "completion": "a"},
            "a must have a value, mapped to the role completion; found null",
        ),
        (
            {"q": None, "a": "4", "b": None},
            {"rejected": "b", "prompt": "q", "chosen": "a"},
            "q must have a value, mapped to the role prompt; found null",
        ),
    ],
)
def test_problems_of_mapped_columns_have_the_files_names(
    row: dict[str, Any], columns: dict[str, str], told: str
) -> None:
    """The file may have a column of the role's name, too."""
    for more in ({}, dict.fromkeys(columns.keys() - row.keys(), "fine")):
        with pytest.raises(RowProblem) as raised:
            to_sample({**row, **more}, HERE, columns)
        assert str(raised.value).startswith(told)


@pytest.mark.parametrize(
    ("value", "label"), [(1, True), ("0", False), ("True", True), (False, False), (1.0, True)]
)
def test_a_column_that_is_mapped_to_label_is_a_verdict(value: Any, label: bool) -> None:
    row = {"prompt": "2+2?", "completion": "4", "good": value}
    found = to_sample(row, HERE, {"label": "good"}).sample
    assert (found.label, found.columns) == (label, {})
    assert (found.chosen, found.rejected) == (("4", None) if label else (None, "4"))
    with pytest.raises(
        RowProblem, match=r"^good must be true or false, or 1 or 0 .or -1.; found 'maybe'"
    ):
        to_sample({**row, "good": "maybe"}, HERE, {"label": "good"})


@pytest.mark.parametrize(
    ("value", "label"),
    [(1, True), (0, False), ("0", False), ("True", True), (0.0, False), (-1, False)],
)
def test_a_column_label_is_a_verdict_in_any_spelling(value: Any, label: bool) -> None:
    for row in (
        {"prompt": "2+2?", "completion": "4", "label": value},
        {"messages": [user("2+2?"), bot("4")], "label": value},
        {"conversations": [user("2+2?"), bot("4")], "label": value},
        {"instruction": "2+2?", "output": "4", "label": value},
        {"instruction": "2+2?", "output": "4", "kto_tag": value},
        {"conversations": [user("2+2?"), bot("4")], "kto_tag": value},
    ):
        found = to_sample(row, HERE)
        assert (found.sample.label, found.sample.columns, found.notes) == (label, {}, ())
        expected = ("4", None) if label else (None, "4")
        assert (found.sample.chosen, found.sample.rejected) == expected


def test_a_label_that_is_no_verdict_is_a_column_and_noted() -> None:
    row = {"prompt": "2+2?", "completion": "4", "label": 3}
    assert "neither true (1) nor false (0)" in to_sample(row, HERE).notes[0]
    row = sample(row)
    assert row.chosen == "4"
    assert row.columns == {"label": 3}


def test_a_column_map_renames() -> None:
    row = {"id": "x", "dataset": "d", "question": "2+2?", "answer": "4", "cot": "2+2 is 4."}
    mapped = sample(row, prompt="question", completion="cot")
    assert (mapped.prompt, mapped.chosen) == ((USER,), "2+2 is 4.")
    assert mapped.columns == {"id": "x", "dataset": "d", "answer": "4"}
    assert sample(row, prompt="question").chosen is None
    assert sample(row, prompt="question").columns == {
        "id": "x",
        "dataset": "d",
        "answer": "4",
        "cot": "2+2 is 4.",
    }
    assert sample(row, prompt="question", chosen="answer").columns["answer"] == "4"
    assert sample({"q": "2+2?", "chosen": "4", "rejected": "5"}, prompt="q") == PAIR


def test_a_map_decides_the_shape_and_keeps_the_column_it_hides() -> None:
    row = {"prompt": "old", "text": "Once.", "question": "2+2?", "completion": "no"}
    assert sample(row, prompt="question", completion="text").chosen == "Once."
    assert sample(row, text="text").text == "Once."
    assert sample(row, prompt="question", completion="text").columns == {
        "prompt": "old",
        "completion": "no",
    }


def test_a_mapped_column_that_is_null_counts_as_absent() -> None:
    row = {"q": "2+2?", "good": "4", "bad": None}
    assert sample(row, prompt="q", chosen="good", rejected="bad") == ANSWER


def test_turns_after_the_last_answer_are_noted() -> None:
    row = {"messages": [user("2+2?"), bot("4"), user("Thanks")]}
    assert to_sample(row, HERE).notes == ("turns after the last assistant turn skipped",)
    assert to_sample({"messages": [user("2+2?"), bot("4")]}, HERE).notes == ()


HH = "\n\nHuman: 2+2?\n\nAssistant: "


@pytest.mark.parametrize(
    ("row", "field", "found", "expected"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": " a "}, "rejected", "same", "differ from"),
        ({"prompt": "p", "chosen": "", "rejected": "b"}, "chosen", "''", "not be blank"),
        ({"prompt": "p", "chosen": "a", "rejected": "\t"}, "rejected", r"'\t'", "not be blank"),
        ({"prompt": "p", "chosen": 4, "rejected": "b"}, "chosen", "the number 4", "list of mess"),
        ({"prompt": " ", "completion": "b"}, "prompt", "' '", "not be blank"),
        ({"prompt": 1, "completion": "b"}, "prompt", "the number 1", "be text or a list of mess"),
        ({"prompt": "p", "completion": [bot(" ")]}, "completion", "' '", "not be blank"),
        ({"prompt": [bot("x")], "chosen": "a"}, "prompt", "assistant first", "begin with a user"),
        ({"prompt": "p", "completion": [bot("x"), user("y")]}, "completion", "user last", "end w"),
        (
            {"prompt": "p", "chosen": [user("q"), bot("x")], "rejected": [bot("y")]},
            "chosen",
            "another dialog, which begins 'q'",
            "continue the prompt",
        ),
        ({"chosen": "a", "rejected": "b"}, "prompt", "columns chosen, rejected", "exist, or"),
        ({"chosen": HH + "4", "rejected": "5"}, "rejected", "'5'", "begin with a Human: turn"),
        ({"chosen": HH, "rejected": HH + "5"}, "chosen", "''", "not be blank"),
        ({"chosen": HH + "4", "rejected": HH}, "rejected", "''", "not be blank"),
        ({"chosen": HH + "4", "rejected": HH + "4"}, "rejected", "the same", "differ from chosen"),
        (
            {"chosen": HH + "4\n\nHuman: ok", "rejected": HH + "5"},
            "chosen",
            "user last",
            "end with an assistant turn",
        ),
        (
            {"chosen": HH + "4", "rejected": HH + "5\n\nHuman: ok"},
            "rejected",
            "user last",
            "end with an assistant turn",
        ),
        (
            {"chosen": HH + "4", "rejected": HH + "5\n\nHuman: ok\n\nAssistant: 6"},
            "rejected",
            "4 turns of which 1 are shared with chosen's 2",
            "share all turns but the last",
        ),
        (
            {"chosen": HH + "4", "rejected": "\n\nHuman: else\n\nAssistant: 5"},
            "rejected",
            "2 turns of which 0 are shared",
            "share all turns but the last",
        ),
        (
            {"chosen": HH + "a\n\nAssistant: b", "rejected": HH + "a\n\nAssistant: c"},
            "chosen",
            "assistant last",
            "end with a user turn before the answer",
        ),
        ({"messages": [bot("x")]}, "messages", "no user turn", "begin with a user turn"),
        ({"messages": [user("a"), bot("")]}, "messages", "''", "not be blank"),
        ({"instruction": "", "output": "x"}, "instruction", "''", "not be blank"),
        ({"instruction": "i", "input": 4, "output": "x"}, "input", "the number 4", "be text"),
        ({"instruction": "i", "input": "", "output": ""}, "output", "''", "not be blank"),
        ({"text": ""}, "text", "''", "not be blank"),
        ({"text": ["a"]}, "text", "a list of 1", "be text"),
        ({"question": "q", "answer": " "}, "answer", "' '", "not be blank"),
        (
            {"messages": [{"role": "system", "content": "s"}, user("a")], "system": "t"},
            "system",
            "'t'",
            "not be given together with a system turn",
        ),
        ({"foo": 1, "bar": 2}, "", "columns foo, bar", "have the columns of a known shape"),
        ({}, "", "no columns", "have the columns of a known shape"),
    ],
)
def test_odd_rows_have_reasons(row: dict[str, Any], field: str, found: str, expected: str) -> None:
    with pytest.raises(RowProblem) as error:
        to_sample(row, HERE)
    assert error.value.field == field
    assert found in error.value.found
    assert expected in error.value.expected


def test_a_map_to_a_missing_column() -> None:
    with pytest.raises(RowProblem, match="qestion must exist, mapped to the role prompt"):
        sample({"question": "q"}, prompt="qestion")
    with pytest.raises(RowProblem, match="with prompt, text mapped"):
        sample({"a": "q", "b": "c"}, prompt="a", text="b")


def test_no_shape_hides_another() -> None:
    """A row with just a shape's own columns is read by that shape."""
    for shape in SHAPES:
        row = dict.fromkeys(shape.needs, "x")
        assert next(s for s in SHAPES if s.fits(row, {})) is shape


def test_an_alpaca_rows_history_is_the_turns_before_it() -> None:
    row = {"instruction": "And 3+3?", "output": "6", "history": [["2+2?", "4"]], "system": "Hm."}
    found = sample(row)
    assert found.prompt == (Message("system", "Hm."), *TURNS)
    assert (found.chosen, found.columns) == ("6", {})
    for none in (None, [], ""):
        assert len(sample(row | {"history": none}).prompt) == 2
    assert sample(row | {"history": '[["2+2?", "4"]]'}).prompt == sample(row).prompt


@pytest.mark.parametrize("history", ["2+2?", [["2+2?"]], [["a", None]], [["a", " "]], [{}], 3])
def test_a_history_of_another_form_is_a_bad_row(history: object) -> None:
    with pytest.raises(RowProblem, match="history must"):
        sample({"instruction": "a", "output": "b", "history": history})


def test_a_weight_behind_the_map_is_told() -> None:
    with pytest.raises(RowProblem, match=r"A weight goes before the map: FILE:2::"):
        sample({"q": "a"}, prompt="q:2")


def test_a_prompt_may_be_the_last_question_of_whole_dialogs() -> None:
    before = [user("Hi"), bot("Yes?"), user("2+2?")]
    row = {"prompt": "2+2?", "chosen": [*before, bot("4")], "rejected": [*before, bot("5")]}
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        dialogs = {name: [*system, *row[name]] for name in ("chosen", "rejected")}
        found = sample({**row, **dialogs})
        assert [turn.content for turn in found.prompt][-3:] == ["Hi", "Yes?", "2+2?"]
        assert (len(found.prompt), found.chosen, found.rejected) == (3 + len(system), "4", "5")
    with pytest.raises(RowProblem, match="chosen must continue the prompt, or repeat it"):
        sample({**row, "prompt": "Hi there"})


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss": False}])
def test_a_turn_that_is_not_to_be_learned_is_shown(mark: dict[str, Any]) -> None:
    turn = {**bot("no"), **mark}
    row = {"messages": [user("2+2?"), turn, user("Again."), {**bot("4"), "weight": 1}]}
    found = to_sample(row, HERE)
    assert found.sample.prompt == (
        USER,
        Message("assistant", "no", learned=False),
        Message("user", "Again."),
    )
    assert found.sample.chosen == "4"
    assert found.notes == ("turns marked weight 0, train or loss false are shown, not learned",)
    # The answer is the last turn that is learned; without one the row is a prompt.
    ends = to_sample({"messages": [user("2+2?"), bot("4"), user("Again."), turn]}, HERE)
    assert (ends.sample.prompt, ends.sample.chosen) == ((USER,), "4")
    assert ends.notes == ("turns after the last assistant turn that is learned skipped",)
    none = to_sample({"messages": [user("2+2?"), turn]}, HERE)
    assert none.sample == PROMPT
    assert none.notes == (
        "every assistant turn is marked weight 0, train or loss false: a prompt alone",
    )
    with pytest.raises(RowProblem, match="chosen must end with an answer to learn; found weight 0"):
        sample({"prompt": "2+2?", "chosen": [turn], "rejected": "5"})


@pytest.mark.parametrize("mark", [{"weight": 0.5}, {"weight": "0"}, {"train": 2}, {"loss": "no"}])
def test_a_mark_of_a_turn_is_yes_or_no(mark: dict[str, Any]) -> None:
    with pytest.raises(
        RowProblem, match=r"messages\.(weight|train|loss) must be 0 or 1, or false or tr"
    ):
        sample({"messages": [user("2+2?"), {**bot("4"), **mark}]})


def test_what_no_model_will_read_is_noted() -> None:
    row = {
        "messages": [
            {**user("2+2?"), "train": True, "loss": True, "thinking": "Hm."},
            {**bot("4"), "reasoning_content": ["Hm."]},
        ],
        "tools": [{"name": "add"}],
        "functions": "[]",
        "chat_template_kwargs": {"enable_thinking": False},
        "context": "A sum.",
        "input": " ",
    }
    assert to_sample(row, HERE).notes == (
        "train true of turns that are not the assistant's is not read",
        "loss true of turns that are not the assistant's is not read",
        "reasoning_content of turns is not rendered: thoughts are the assistant's, and text",
        "thinking of turns is not rendered: thoughts are the assistant's, and text",
        "column context is not in the prompt",
        "column chat_template_kwargs is not rendered: the chat template is called without them",
    )
    assert to_sample({"text": "Once.", "context": "A sum."}, HERE).notes == ()
    mapped = to_sample({"q": "2+2?", "a": "4", "input": "x"}, HERE, {"prompt": "q"})
    assert mapped.notes == ("column input is not in the prompt",)


TURNS_TEXT = json.dumps(
    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
)


@pytest.mark.parametrize("name", ["prompt", "chosen", "rejected"])
def test_messages_saved_as_text_are_read_from_json_and_from_nothing_else(name: str) -> None:
    row: dict[str, Any] = {"prompt": [user("2+2?")], "chosen": [bot("4")], "rejected": [bot("5")]}
    assert sample(row | {name: json.dumps(row[name])}) == PAIR
    printed = repr([*row[name], user("x")]).replace("}, {", "}\n {")  # as pandas writes an array
    for cell in (repr(row[name]), printed, json.dumps(row[name])[:-2], "[{'role': 'user', " * 999):
        with pytest.raises(RowProblem, match=r"Write the column with json\.dumps") as error:
            sample(row | {name: cell})
        assert error.value.expected == "be text, or messages in JSON"
    assert sample(row | {"chosen": '[{"role": "Hamlet"}]'}).chosen == '[{"role": "Hamlet"}]'
    with pytest.raises(RowProblem, match="text must be plain text; found a list of messages"):
        sample({"text": json.dumps(row["prompt"])})
    assert sample({"text": json.dumps(row["prompt"])}, messages="text") == PROMPT


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Write a chat.", "completion": TURNS_TEXT},
        {"prompt": "Write a chat.", "chosen": TURNS_TEXT, "rejected": "no"},
        {"prompt": f"{TURNS_TEXT}\nSummarize this chat.", "completion": "4"},
        {"instruction": "Sum it up.", "input": TURNS_TEXT, "output": "4"},
        {"instruction": "Sum it up.", "input": f"{TURNS_TEXT} So?", "output": TURNS_TEXT},
        {"prompt": "Write Python.", "completion": "[{'role': 'user', 'content': x} for x in y]"},
    ],
)
def test_what_is_to_be_written_or_read_stays_text(row: dict[str, Any]) -> None:
    """JSON of messages can be an answer to a plain prompt, or a part of one."""
    found = sample(row)
    assert found.chosen == row.get("completion", row.get("chosen", row.get("output")))
    assert all(isinstance(turn.content, str) for turn in found.prompt)
    asked = row.get("prompt", row.get("input", ""))
    assert asked in found.prompt[-1].content


def test_a_turn_that_calls_a_function_is_the_assistants() -> None:
    row = {"conversations": [{"from": "function_call", "value": "{}"}]}
    with pytest.raises(RowProblem, match=r"conversations\.value must be a list of calls"):
        sample(row)
    row["conversations"][0]["value"] = "add(2, 2)"
    with pytest.raises(RowProblem, match="Write a call in another notation into a turn of the"):
        sample(row)
