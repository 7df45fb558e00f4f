"""A stage without rows is told why, where the data sets show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.config.schema import DataConfig
from tandem.config.stages import Share
from tandem.data.causes import why_none
from tandem.data.dataset import load_data
from tandem.data.ledger import Ledger
from tests.jsonl import write_jsonl


def ledger_of(path: Path, rows: list[dict[str, Any]]) -> Ledger:
    write_jsonl(path, rows)
    return load_data(DataConfig(on_bad_row="drop"), [str(path)], seed=1).ledger


@pytest.mark.parametrize(
    ("row", "share", "columns", "map_"),
    [
        ({"prompt": "a", "reply": "b"}, "texts", "column reply", "completion=reply"),
        (
            {"question": "a", "score": 1, "model_answer": "b"},
            "texts",
            "columns score, model_answer",
            "prompt=question,completion=model_answer",
        ),
        (
            {"prompt": "a", "rejected_text": "b", "chosen_text": "c"},
            "pairs",
            "columns rejected_text, chosen_text",
            "chosen=chosen_text,rejected=rejected_text",
        ),
        (
            {"prompt": "a", "chosen_model": "x", "chosen_text": "b", "rejected_text": "c"},
            "pairs",
            "columns chosen_model, chosen_text, rejected_text",
            "chosen=chosen_text,rejected=rejected_text",
        ),
        (
            {"prompt": "a", "data_source": "gsm8k", "ability": "math", "reward_model": {"b": "c"}},
            "pairs",
            "columns data_source, ability, reward_model",
            "chosen=COLUMN,rejected=COLUMN",
        ),
        (
            {"question": "a", "task_id": "7", "type": "algebra", "reply": "b"},
            "texts",
            "columns task_id, type, reply",
            "prompt=question,completion=reply",
        ),
        (
            {"prompt": "p", "a": "1", "b": "2", "c": "3", "d": "4", "e": "5", "f": "6"},
            "pairs",
            "columns a, b, c, d, e and 1 more",
            "chosen=a,rejected=b",
        ),
    ],
)
def test_prompts_alone_name_their_columns_and_a_map(
    row: dict[str, Any], share: Share, columns: str, map_: str, tmp_path: Path
) -> None:
    ledger = ledger_of(tmp_path / "a.jsonl", [row, row])
    (told,) = why_none(ledger, share)
    assert told == (
        f"All 2 usable rows of a are prompts alone: no stage reads their {columns}. Map the "
        f"answer's column, as in {tmp_path}/a.jsonl::{map_}"
    )
    assert why_none(ledger, "prompts") == []
    assert why_none(Ledger.from_json(ledger.to_json()), share) == why_none(ledger, share)


@pytest.mark.parametrize(
    ("row", "map_"),
    [
        ({"prompt": "a", "chosen": "b", "reject": "c", "id": "7"}, "rejected=reject"),
        ({"prompt": "a", "chosen": "b", "rejceted": "c"}, "rejected=rejceted"),
        ({"prompt": "a", "chosen": "b", "tone": "rude", "bad_answer": "c"}, "rejected=bad_answer"),
        ({"prompt": "a", "chosen": "b", "score": 3, "reject": "c"}, "rejected=reject"),
        ({"question": "a", "chosen": "b", "reject": "c"}, "prompt=question,rejected=reject"),
    ],
)
def test_chosen_answers_alone_name_a_mistyped_column_of_rejected_ones(
    row: dict[str, Any], map_: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    ledger = ledger_of(file, [row, row])
    (told,) = why_none(ledger, "pairs")
    column = map_.rpartition("=")[2]
    assert told == (
        f"All 2 usable rows of a have a chosen answer alone: no stage reads their column {column}. "
        f"Map it, as in {file}::{map_}"
    )
    assert why_none(ledger, "texts") == why_none(ledger, "prompts") == []
    mapped = load_data(DataConfig(), [f"{file}::{map_}"], seed=1)
    samples = [*mapped.texts, *mapped.pairs, *mapped.prompts, *mapped.heldout]
    assert [each.rejected for each in samples if each.rejected] == ["c", "c"]
    pair = {**row, "rejected": "d"}
    assert why_none(ledger_of(file, [pair, pair]), "pairs") == []


@pytest.mark.parametrize("column", ["created", "selected", "reviewed", "corrected"])
def test_a_column_of_another_word_is_no_mistyped_one_of_rejected_answers(
    column: str, tmp_path: Path
) -> None:
    row = {"prompt": "a", "chosen": "b", column: "2024"}
    told = why_none(ledger_of(tmp_path / "a.jsonl", [row, row]), "pairs")
    assert column not in "".join(told)


def test_single_answers_are_told_what_makes_a_pair(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": f"{n}?", "chosen": "b", "reference": "c"} for n in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(split=(0, 4, 0), heldout=0)
    ledger = load_data(config, [str(file)], seed=1, stages=["dpo"]).ledger
    (told,) = why_none(ledger, "pairs")
    assert told == (
        "20 rows of a have one answer each, which tandem sft learns. Give chosen and rejected, two "
        "answers to one prompt"
    )
    (told,) = why_none(ledger, "pairs", labelled=True)
    assert "Give a label, true or false, beside them, or chosen and rejected" in told
    assert why_none(ledger, "texts") == why_none(ledger, "prompts") == []


@pytest.mark.parametrize(
    ("row", "share", "said"),
    [
        (
            {"instruction": "a", "completions": [{"response": "b"}, {"response": "c"}]},
            "pairs",
            "Map the list of the answers' scores, as in a.jsonl::scores=COLUMN",
        ),
        (
            {"instruction": "a", "answers": [{"text": "b", "stars": 4}, {"text": "c", "stars": 1}]},
            "pairs",
            "Map the list of the answers' scores, as in a.jsonl::scores=answers.stars",
        ),
        (
            {"prompt": "a", "tags": ["x"], "responses": ["b", "c"], "my_ratings": [1, 2]},
            "texts",
            "Map the list of the answers' scores, as in a.jsonl::scores=my_ratings",
        ),
        (
            {"prompt": "a", "tags": [1], "responses": ["b", "c"], "upvotes": [7, 3], "by": ["x"]},
            "pairs",
            "Map the list of the answers' scores, as in a.jsonl::scores=upvotes",
        ),
        (
            {"prompt": "a", "responses": ["b", "c"], "upvotes": [7, 3], "flags": [0, 1]},
            "pairs",
            "Map the list of the answers' scores, as in a.jsonl::scores=COLUMN",
        ),
        (
            {"instruction": "a", "response1": "c", "response2": "d", "winner": "gpt-4"},
            "pairs",
            "Map the column that says which answer is better, as in a.jsonl::preferred=winner",
        ),
        (
            {"question": "a", "model_answers": ["b", "c"], "level": "easy"},
            "pairs",
            "as in a.jsonl::prompt=question,answers=model_answers,scores=COLUMN",
        ),
        (
            {"prompt": "a", "tags": ["x"], "reply": "b"},
            "texts",
            "Map the answer's column, as in a.jsonl::completion=reply",
        ),
        (
            {"prompt": "a", "tags": ["x"], "reply": "b"},
            "pairs",
            "Map the answer's column, as in a.jsonl::chosen=reply,rejected=COLUMN",
        ),
        (
            {"instruction": "a", "input": "b", "response1": "c", "response2": "d", "my_choice": 1},
            "pairs",
            "Map the column that says which answer is better, as in a.jsonl::preferred=my_choice",
        ),
    ],
)
def test_the_map_of_several_answers_names_no_list_as_an_answer(
    row: dict[str, Any], share: Share, said: str, tmp_path: Path
) -> None:
    ledger = ledger_of(tmp_path / "a.jsonl", [row])
    (told,) = why_none(ledger, share)
    assert told.replace(f"{tmp_path}/", "").endswith(said)
    assert why_none(Ledger.from_json(ledger.to_json()), share) == [told]


@pytest.mark.parametrize(
    ("row", "labelled", "map_"),
    [
        ({"prompt": "a", "reply": "b", "thumbs": 1}, True, "completion=reply,label=thumbs"),
        ({"prompt": "a", "answer": "b"}, True, "completion=answer,label=COLUMN"),
        ({"prompt": "a", "reply": "b", "thumbs": 1}, False, "completion=reply,grade=thumbs"),
        (
            {"prompt": "a", "yes": "b", "rejected_one": "c"},
            True,
            "chosen=yes,rejected=rejected_one",
        ),
    ],
)
def test_one_answer_and_what_was_said_of_it_are_no_pair(
    row: dict[str, Any], labelled: bool, map_: str, tmp_path: Path
) -> None:
    (told,) = why_none(ledger_of(tmp_path / "a.jsonl", [row]), "pairs", labelled=labelled)
    assert told.endswith(f"a.jsonl::{map_}")


@pytest.mark.parametrize(
    ("row", "map_"),
    [
        ({"prompt": "a", "completion": "b", "grade": 1}, "label=grade"),
        ({"prompt": "a", "response": "b", "score": 1}, "completion=response,label=score"),
        (
            {"instruction": "a", "response": "b", "score": 1},
            "prompt=instruction,completion=response,label=score",
        ),
    ],
)
def test_a_grade_alone_may_be_a_label(row: dict[str, Any], map_: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    data = DataConfig(heldout=0.0)
    ledger = load_data(data, [str(path)], seed=1, stages=["kto"]).ledger
    (told,) = why_none(ledger, "pairs", labelled=True)
    assert told.endswith(f"map the grade to label, as in {path}::{map_}")
    assert why_none(ledger, "pairs") == []
    (labelled,) = load_data(data, [f"{path}::{map_}"], seed=1, stages=["kto"]).pairs
    assert (labelled.chosen, labelled.label) == ("b", True)


@pytest.mark.parametrize("share", ["texts", "pairs"])
def test_steps_of_an_answer_are_not_taken_for_answers(share: Share, tmp_path: Path) -> None:
    row = {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}
    (told,) = why_none(ledger_of(tmp_path / "a.jsonl", [row, row]), share)
    assert told == (
        "All 2 usable rows of a are prompts with completions and labels, which judge an answer "
        "step by step (process supervision): no stage learns from them"
    )


def test_rows_that_are_all_bad_name_the_commonest_cause(tmp_path: Path) -> None:
    rows = [{"chosen": "a", "rejected": "b"}, {"foo": 1}, {"foo": 1}]
    for share in ("texts", "prompts"):
        (told,) = why_none(ledger_of(tmp_path / "a.jsonl", rows), share)
        assert told.startswith("No row of a could be used (2 of 3: row must have the columns of a ")
        assert told.endswith(
            f"; the first, {tmp_path}/a.jsonl:2: found columns foo. Map its columns, as in "
            "FILE::prompt=question,completion=answer, or for pairs "
            "FILE::prompt=question,chosen=better,rejected=worse"
        )


def test_other_data_sets_are_not_blamed(tmp_path: Path) -> None:
    for rows in (
        [{"prompt": "a"}],
        [{"prompt": "a", "reply": "b"}, {"prompt": "c", "chosen": "d"}],
    ):
        assert why_none(ledger_of(tmp_path / "a.jsonl", rows), "texts") == []


def test_a_ledger_of_an_earlier_version_has_no_unread_columns(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "a.jsonl", [{"prompt": "a", "reply": "b"}])
    value = json.loads(ledger.to_json())
    del value["datasets"][0]["unread"], value["datasets"][0]["lists"]
    del value["datasets"][0]["numbers"]
    account = Ledger.from_json(json.dumps(value)).datasets["a"]
    assert not account.unread
    assert not account.lists
