"""Environments: what they are given, what they may return, and what comes of failures."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.config.scoring import ScoringConfig
from tandem.errors import ConfigError
from tandem.rewards.calling import Call, CallError, Outcome
from tandem.rewards.environment import Environment, Replies, Said, Tally
from tandem.rewards.hearing import EnvironmentCall, turns_of
from tandem.rewards.pool import told_printed
from tests.training import environments

FILE = environments.__file__
ASKED = {"role": "user", "content": "2+2?"}


def said(*answers: str, row: dict[str, Any] | None = None) -> Said:
    turns = [ASKED]
    for answer in answers:
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "hm"}]
    return Said(turns[:-1], row or {}, "data.jsonl:1")


@pytest.mark.parametrize(
    ("returned", "turns"),
    [
        (None, None),
        ([], None),
        ("more", [("user", "more")]),
        (["one", "two"], [("user", "one"), ("user", "two")]),
        ({"content": "more"}, [("user", "more")]),
        ({"role": "tool", "content": "42", "other": 1}, [("tool", "42")]),
        (({"role": "tool", "content": "42"}, "and?"), [("tool", "42"), ("user", "and?")]),
    ],
)
def test_turns_are_texts_and_mappings(returned: Any, turns: Any) -> None:
    expected = turns and [{"role": role, "content": content} for role, content in turns]
    assert turns_of(returned) == expected


def test_a_tools_turn_keeps_what_it_answers() -> None:
    turn = {"role": "tool", "content": "42", "name": "sum", "tool_call_id": "call1"}
    assert turns_of(turn) == [turn]
    assert turns_of({**turn, "role": "user"}) == [{"role": "user", "content": "42"}]


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (3.5, "float"),
        (True, "bool"),
        ({"role": "assistant", "content": "yes"}, "the role 'assistant'"),
        ({"role": "user"}, "None as content"),
        ([" "], "' ' as content"),
        ([["more"]], "as content"),
    ],
)
def test_anything_else_is_told(returned: Any, found: str) -> None:
    with pytest.raises(CallError, match="a text, turns of role") as caught:
        turns_of(returned)
    assert found in str(caught.value)


def test_a_function_gets_what_it_names_or_all_columns() -> None:
    got: list[dict[str, Any]] = []

    def named(messages: Any, answer: str, level: int = 3, *, word: str = "x") -> None:
        got.append({"answer": answer, "level": level, "word": word, "last": messages[-1]})

    def every(turns: Any, **columns: Any) -> None:
        got.append(columns)
        turns.clear()  # its own: the next call's are untouched

    columns = {"messages": [said("4").messages], "answer": ["4"], "other": [None]}
    call = Call([""], ["4"], columns)
    for function in (named, every, every):
        assert EnvironmentCall(function).outcomes(call) == [Outcome(None)]
    assert got[0] == {"answer": "4", "level": 3, "word": "x", "last": columns["messages"][0][-1]}
    assert got[1] == got[2] == {"answer": "4", "other": None}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")
def test_it_answers_in_processes_of_its_own() -> None:
    rows = [{"answer": "four"}, {"answer": "five"}]
    asked = [said("no", "four!", row=rows[0]), said("no", row=rows[1])]
    named = Environment(f"{FILE}:later?word=back", columns=["answer", "level"])
    given = Environment(environments.later)
    try:
        for environment, word in ((named, "back"), (given, "on")):
            assert "in the training process" not in environment.describe()
            assert environment.replies(asked) == [
                Outcome(None),
                Outcome(None, turns=[{"role": "user", "content": f"{word} to five"}]),
            ]
    finally:
        named.close()
        given.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")
def test_failures_and_what_it_prints_are_told() -> None:
    slow = Environment(f"{FILE}:slow", ScoringConfig(deadline_seconds=0.2, workers=1))
    config = ScoringConfig(deadline_seconds=600.0, workers=1)
    loud, broken = (Environment(f"{FILE}:{name}", config) for name in ("talking", "breaks"))
    try:
        (outcome,) = slow.replies([said("a")])
        assert (outcome.failure, outcome.message) == ("timeout", "took more than 0.2 s")
        good, bad = broken.replies([said("a"), said("a", "b")])
        assert good.turns == [{"role": "user", "content": "go on"}]
        assert (bad.failure, bad.message) == ("exception", "ValueError: a broken tool")
        ends = {0: ("data.jsonl:1", bad.failure, bad.message)}
        (line,) = Tally(num_asked=1, ends=ends).told(broken.label, [Tally(num_asked=1)])
        assert line == (
            f"environment {FILE}:breaks failed on 1 of 2 answers (exception 1), where their "
            "conversations end; the first: data.jsonl:1: ValueError: a broken tool"
        )
        assert loud.replies([said("a")]) == [Outcome(None)]
        lines = told_printed(loud.label, loud.printed())
        assert [line.rpartition("printed")[2] for line in lines] == [
            ": one", ": two", ": three", " 2 more lines",
        ]  # fmt: skip
        assert loud.printed() == []
    finally:
        for environment in (slow, loud, broken):
            environment.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")
def test_nobody_waits_for_the_slow_answer_of_another(tmp_path: Path) -> None:
    environment = Environment(
        f"{FILE}:meeting", ScoringConfig(deadline_seconds=60, workers=2), columns=["place", "waits"]
    )
    rows = [{"place": str(tmp_path / "met"), "waits": waits} for waits in (True, False)]
    try:
        with Replies(environment) as replies:
            slow = replies.ask(said("a", row=rows[0]))
            quick = replies.ask(said("a", row=rows[1]))
            more = Outcome(None, turns=[{"role": "user", "content": "go on"}])
            assert replies.came(wait=True) == [(quick, more)]
            again = replies.ask(said("a", "b", row=rows[1]))
            found: list[tuple[int, Outcome]] = []
            while len(found) < 2:
                found += replies.came(wait=True)
            assert sorted(found) == [(slow, Outcome(None)), (again, Outcome(None))]
            assert replies.came(wait=True) == []
    finally:
        environment.close()


def test_an_answer_has_the_same_random_numbers_in_every_process() -> None:
    def here(messages: Any) -> str:
        return environments.drawn(messages)

    here.in_process = True  # type: ignore[attr-defined]
    inside, outside = Environment(here), Environment(f"{FILE}:drawn")
    asked = [said("a"), said("b"), said("a")]
    random.seed(3)
    before = random.getstate()
    try:
        found = inside.replies(asked)
        assert random.getstate() == before
        assert found[0] == found[2] != found[1]
        assert outside.replies(asked) == found
    finally:
        outside.close()
    assert (
        inside.describe()
        == "environment here, in the training process, without deadline and limits"
    )


def test_a_parameter_that_nothing_fills_is_named() -> None:
    environment = Environment(f"{FILE}:wants")
    problem = environment.problem(["answer"])
    assert "must take messages and the data's columns (answer); its parameter price" in problem
    assert environment.problem(["price"]) == ""
    assert Environment(f"{FILE}:later").problem(["answer"]) == ""


def test_a_name_that_leads_nowhere_names_the_knob() -> None:
    with pytest.raises(ConfigError, match=r"ppo\.environment must be file\.py:function"):
        Environment(f"{FILE}:nobody", section="ppo")
    with pytest.raises(ConfigError, match="must have the option wrod"):
        Environment(f"{FILE}:later?wrod=on")
