"""The data's columns for reward functions: the reference as `answer`, and names that are taken."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.rewards.columns import account_of, columns_of


@pytest.mark.parametrize(
    ("row", "column", "answer"),
    [
        ({"answer": "a", "reward_model": {"ground_truth": "b"}}, "answer", "a"),
        ({"answer": None, "reward_model": {"ground_truth": "b"}}, "answer", "b"),
        ({"reward_model": {"ground_truth": "b"}, "extra_info": {"answer": "c"}}, "answer", "b"),
        ({"reward_spec": {"ground_truth": "b"}}, "answer", "b"),
        ({"extra_info": {"answer": ""}}, "answer", ""),
        ({"answer": "a", "truth": "b"}, "truth", "b"),
        ({"answer": "a", "deep": {"er": {"still": "b"}}}, "deep.er.still", "b"),
        ({"deep.er": {"still": "b"}}, "deep.er.still", "b"),
        ({"messages": "b"}, "messages", "b"),
        ({"reward_model": "b"}, "reward_model.ground_truth", None),
    ],
)
def test_the_reference_is_found_by_its_column_or_path(
    row: dict[str, Any], column: str, answer: str | None
) -> None:
    found = columns_of([row], column, ["answer"])
    assert found["answer"] == [answer]
    assert account_of([row], column).num_answers == (answer is not None)
    others = row.keys() - {"answer", "messages"}
    assert {name: found[name] for name in others} == {name: [row[name]] for name in others}
    assert found.keys() - row.keys() <= {"answer"}


def test_rows_that_lack_a_column_give_none_and_it_is_counted_where_answers_come_from() -> None:
    rows: list[dict[str, Any]] = [
        {"answer": "a", "messages": 1},
        {"reward_model": {"ground_truth": "b"}},
        {"level": 3},
    ]
    columns = columns_of(rows, names=["other"])
    assert columns == {
        "answer": ["a", "b", None],
        "level": [None, None, 3],
        "other": [None] * 3,
        "reward_model": [None, {"ground_truth": "b"}, None],
    }
    account = account_of(rows)
    assert account.names == ("answer", "level", "reward_model")
    of_answers, of_messages = account.lines()
    assert of_answers == (
        "reward functions get answer from reward_model.ground_truth on 1 of 3 rows, which have no "
        "column answer (--scoring.answer-column names another)"
    )
    assert of_messages == (
        "reward functions get messages from Tandem: the data's column of that name, in 1 of 3 "
        "rows, is left out for them"
    )
    assert account_of([{"level": 3}]).names == ("level",)
    assert account_of([{"t": {"u": 1}}], "t.u").lines() == []
