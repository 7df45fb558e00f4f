"""Tools: what a policy hears of its calls, whatever comes of them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tandem.config.scoring import ScoringConfig
from tandem.errors import ConfigError
from tandem.rewards.calling import Call, Outcome
from tandem.rewards.environment import Environment, Replies, Said, Tally
from tandem.rewards.hearing import EnvironmentCall
from tandem.rewards.tool_use import ToolBox, shown_parameters, tool_name
from tests.training import environments, tool_functions

FILE = tool_functions.__file__
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")


def call(name: str, id: str = "call00000", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(*calls: dict[str, Any], tools: str = "", problem: str = "", **row: Any) -> Said:
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": ""}]
    if calls:
        turns[-1]["tool_calls"] = list(calls)  # type: ignore[assignment]
    return Said(turns, row, "data.jsonl:1", tools, problem)


def heard(environment: Environment, *asked: Said) -> list[Any]:
    """Content and failure of each turn, of one answer after another."""
    with Replies(environment) as replies:
        numbers = [replies.ask(one) for one in asked]
        came: dict[int, Outcome] = {}
        while len(came) < len(asked):
            came.update(replies.came(wait=True))
    found = []
    for number in numbers:
        outcome = came[number]
        assert not outcome.failure
        assert outcome.turns is not None
        found += [(turn["content"], turn.get("failure", "")) for turn in outcome.turns]
        assert all(turn["role"] == "tool" for turn in outcome.turns)
    return found


@LINUX
@pytest.mark.parametrize("named", [True, False])
def test_calls_are_made_and_what_they_return_is_heard(named: bool) -> None:
    names = ["add", "look_up", "later"]
    tools = [f"{FILE}:{n}" if named else getattr(tool_functions, n) for n in names]
    environment = Environment(None, tools=tools, columns=["prices"])
    assert environment.tools == ("add", "look_up", "later")
    try:
        row = {"prices": {"tea": 2.5}}
        asked = [
            said(call("add", a=2, b=3), call("add", "other", a=2), call("later", word="é"), **row),
            said(call("look_up", word="tea"), **row),
            said(call("look_up", word="milk"), **row),
        ]
        assert heard(environment, *asked) == [
            ("5", ""),
            ("3", ""),
            ("é", ""),
            ('{"price": 2.5, "unit": "EUR", "turn": 2}', ""),
            ("Error: KeyError: 'milk'", "exception"),
        ]
        assert sorted(environment.printed()) == ["looked up milk", "looked up tea"]
        (turn, other, _) = environment.replies(asked[:1])[0].turns or []
        assert (turn["tool_call_id"], turn["name"]) == ("call00000", "add")
        assert other["tool_call_id"] == "other"
    finally:
        environment.close()


@LINUX
def test_options_are_bound_and_are_not_the_models() -> None:
    environment = Environment(None, tools=[f"{FILE}:look_up?unit=USD"], columns=["prices"])
    try:
        row = {"prices": {"tea": 1.0}}
        (found,) = heard(environment, said(call("look_up", word="tea"), **row))
        assert json.loads(found[0])["unit"] == "USD"
        (found,) = heard(environment, said(call("look_up", word="tea", unit="GBP"), **row))
        assert found == ("Error: look_up takes word; got unit", "result")
    finally:
        environment.close()


def turns(*calls: dict[str, Any], offered: tuple[str, ...] = ()) -> list[str]:
    box = ToolBox([tool_functions.add, tool_functions.look_up])
    return [turn["content"] for turn in box.turns(calls, [], {name: {} for name in offered}, {})]


def test_a_call_of_something_else_is_answered_with_what_there_is() -> None:
    assert turns(call("sub", a=1)) == ["Error: there is no tool sub, only add, look_up"]
    assert turns(call("add", a=1, b=1, c=2)) == ["Error: add takes a, b; got c"]
    assert turns(call("add", b=1)) == ["Error: add takes a, b; a is missing"]
    assert turns(call("add", a="x", b=1))[0].startswith("Error: TypeError: ")
    assert turns(call("add", a=1), offered=("look_up",)) == [
        "Error: there is no tool add, only look_up"
    ]
    assert turns(call("add", a=1), offered=("add",)) == ["2"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("yes", "yes"),
        ("", '""'),
        (" ", '" "'),
        (None, "null"),
        (True, "true"),
        ([1, "é"], '[1, "é"]'),
        (float, "<class 'float'>"),
        ("a\ud800", "Error: it returned half a surrogate pair"),
        (
            (i for i in ""),
            "Error: it returned a value of type generator, which is no text and no JSON",
        ),
        (object(), "Error: it returned a value of type object, which is no text and no JSON"),
    ],
)
def test_what_is_returned_is_text_or_json(value: Any, text: str) -> None:
    def given() -> Any:
        return value

    (turn,) = ToolBox([given]).turns([call("given")], [], {}, {})
    turn = {key: each for key, each in turn.items() if key not in ("failure", "error")}
    assert turn == {
        "role": "tool",
        "content": text,
        "tool_call_id": "call00000",
        "name": "given",
    }


def test_positional_parameters_keep_their_places() -> None:
    def placed(a: int = 1, b: int = 2, /, c: int = 3) -> list[int]:
        return [a, b, c]

    box = ToolBox([placed])
    for arguments, text in (
        ({"b": 7}, "[1, 7, 3]"),
        ({"a": 7, "c": 0}, "[7, 2, 0]"),
        ({"b": 7, "a": 0, "c": 9}, "[0, 7, 9]"),
        ({}, "[1, 2, 3]"),
    ):
        (turn,) = box.turns([call("placed", **arguments)], [], {}, {})
        assert turn["content"] == text


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"type": "integer"}, "3", 'a must be of type integer; got "3"'),
        ({"type": "integer"}, True, "a must be of type integer; got true"),
        ({"type": "boolean"}, 1, "a must be of type boolean; got 1"),
        ({"type": "number"}, 3, ""),
        ({"type": ["integer", "null"]}, None, ""),
        ({"type": "string", "nullable": True}, None, ""),
        ({"type": "string"}, None, "a must be of type string; got null"),
        ({"type": "string", "enum": ["x", "y"]}, "z", 'a must be one of "x", "y"; got "z"'),
        ({"anyOf": [{"type": "string"}]}, 3, ""),
        (None, 3, ""),
    ],
)
def test_arguments_are_of_the_types_that_the_prompt_shows(
    schema: Any, value: Any, problem: str
) -> None:
    def given(a: Any) -> str:
        return "yes"

    (turn,) = ToolBox([given]).turns([call("given", a=value)], [], {"given": {"a": schema}}, {})
    assert turn["content"] == (f"Error: {problem}" if problem else "yes")


@LINUX
def test_a_process_that_a_tool_forks_answers_nothing() -> None:
    environment = Environment(None, tools=[f"{FILE}:forks", f"{FILE}:add"])
    try:
        for _ in range(3):
            assert heard(environment, said(call("forks"))) == [("mine", "")]
            assert heard(environment, said(call("add", a=1))) == [("2", "")]
    finally:
        environment.close()


@LINUX
def test_what_takes_too_long_or_ends_its_process_is_heard() -> None:
    tools = [f"{FILE}:slow", f"{FILE}:ends"]
    hasty, patient = (
        Environment(None, ScoringConfig(deadline_seconds=seconds, workers=2), tools=tools)
        for seconds in (0.3, 600.0)  # on a busy machine a process takes long to end, too
    )
    try:
        found = heard(hasty, said(call("slow", seconds=60)))
        assert found == [("Error: took more than 0.3 s", "timeout")]
        found = heard(patient, said(call("ends")))
        assert found == [("Error: its process exited with 3", "died")]
        (outcome,) = hasty.replies([said(call("slow", seconds=60), call("ends"))])
        assert [turn["name"] for turn in outcome.turns or []] == ["slow", "ends"]
    finally:
        hasty.close()
        patient.close()


def test_a_call_that_cannot_be_read_is_answered_without_the_function() -> None:
    environment = Environment(None, tools=[tool_functions.add])
    environment._pool = None
    assert heard(environment, said(problem="a call must be JSON; got 'x'")) == [
        ("Error: a call must be JSON; got 'x'", "result")
    ]


def test_an_answer_without_calls_is_the_last_or_the_environments() -> None:
    alone = EnvironmentCall(None, [tool_functions.add])
    both = EnvironmentCall(environments.thrice, [tool_functions.add])

    def asked(*calls: dict[str, Any]) -> Call:
        messages = said(*calls).messages
        messages[-1]["content"] = "four"
        return Call([""], [""], {"messages": [messages]})

    assert alone.outcomes(asked()) == [Outcome(None)]
    (outcome,) = both.outcomes(asked())
    assert outcome.turns == [{"role": "user", "content": "4 letters."}]
    (outcome,) = both.outcomes(asked(call("add", a=1)))
    assert [turn["content"] for turn in outcome.turns or []] == ["2"]


def test_an_environment_sees_calls_and_tools() -> None:
    def environment(messages: Any, tools: Any) -> str:
        name = messages[-1]["tool_calls"][0]["function"]["name"]
        return f"{name} of {tools[0]['function']['name']}"

    environment.in_process = True  # type: ignore[attr-defined]
    listed = json.dumps([{"type": "function", "function": {"name": "add"}}])
    (outcome,) = Environment(environment).replies([said(call("sub"), tools=listed)])
    assert outcome.turns == [{"role": "user", "content": "sub of add"}]
    assert Environment(environment).problem([]) == ""


def test_names_and_what_fills_parameters_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"grpo\.tools must have names of their own; got add twi"):
        Environment(None, tools=[f"{FILE}:add", tool_functions.add], section="grpo")
    with pytest.raises(ConfigError, match=r"grpo\.tools must be file\.py:function"):
        Environment(None, tools=[f"{FILE}:nobody"], section="grpo")
    environment = Environment(None, tools=[tool_functions.look_up])
    assert environment.problem(["prices"]) == ""
    problem = environment.problem(["answer"])
    assert problem.startswith("tool look_up must take messages and the data's columns (answer)")
    assert "look_up's parameter prices is none of them" in problem
    assert [p.name for p in shown_parameters(tool_functions.look_up)] == ["word"]
    named = Environment(environments.thrice, tools=[tool_functions.add, tool_functions.later])
    assert named.label == "environment thrice and tools add, later"
    assert tool_name(tool_functions.add) == "add"


def test_failed_calls_are_told_by_kind_with_the_first() -> None:
    one = Tally(3, 4, {}, {2: [("b:2", "exception", "add: TypeError")]})
    other = Tally(1, 1, {0: ("c:1", "timeout", "late")}, {0: [("c:1", "result", "x: no tool x")]})
    full = Tally(4, 2, no_room={1: ("d:1", "900 tokens behind 60 of 300")})
    (line,) = full.told("tool add")
    assert line == (
        "no answer had room behind what tool add said to 1 of 4 answers, where their conversations "
        "end; the first: d:1: 900 tokens behind 60 of 300"
    )
    (line,) = one.told("tool add")
    assert line == (
        "tool add failed on 1 of 4 calls (exception 1), which the policy hears; the first: b:2: "
        "add: TypeError"
    )
    calls, ends = one.told("tool add", [other])
    assert "failed on 2 of 5 calls (exception 1, result 1)" in calls
    assert "failed on 1 of 4 answers (timeout 1)" in ends
