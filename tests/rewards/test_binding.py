"""Which parameter of a reward function gets what: by name first, then by position."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

from tandem.rewards.binding import GIVEN, BindingError, binding_of, columns_problem
from tandem.rewards.calling import Call, outcomes_of

VALUES = {name: [name] for name in (*GIVEN, "answer", "level")}


def seen_by(parameters: str, names: str = "level") -> dict[str, Any]:
    """What a function with these parameters gets, by parameter."""
    made: dict[str, Any] = {}
    exec(f"def f({parameters}): return locals()", made)
    values = {name: VALUES[name] for name in (*GIVEN, *names.split())}
    given = binding_of(made["f"], values).call(made["f"], values)
    return {
        name: value if isinstance(value, dict | tuple) else value and value[0]
        for name, value in given.items()
    }


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        # TRL's ways, by name.
        ("prompts, completions, **rest", "prompts completions"),
        ("completions, prompts, **rest", "completions prompts"),
        ("completions, prompts, level", "completions prompts level"),
        ("completions, **rest", "completions"),
        ("completions, level, **rest", "completions level"),
        ("*, prompts, completions, **rest", "prompts completions"),
        ("completions, prompts, level, /", "completions prompts level"),
        ("completions, level", "completions level"),
        ("completion_ids, **rest", "completion_ids"),
        ("completions, completion_ids, level=None", "completions completion_ids level"),
        ("completions, messages, **rest", "completions messages"),
        ("level, **rest", "level"),
        # Names of one's own, by position.
        ("questions, answers, level", "prompts completions level"),
        ("questions, answers, /, level", "prompts completions level"),
        ("prompts, answers, **rest", "prompts completions"),
        ("questions, completions, level", "prompts completions level"),
        ("p, c, **rest", "prompts completions"),
    ],
)
def test_each_parameter_gets_what_it_is_called_or_what_its_place_means(
    parameters: str, expected: str
) -> None:
    seen = seen_by(parameters)
    rest = seen.pop("rest", None)
    assert list(seen.values()) == expected.split()
    if rest is not None:
        others = {"prompts", "completions", "messages", "level"} - set(expected.split())
        assert set(rest) == others


def test_columns_that_no_parameter_takes_are_left_out() -> None:
    assert list(seen_by("prompts, completions").items()) == [
        ("prompts", "prompts"),
        ("completions", "completions"),
    ]
    assert list(seen_by("questions, answers").values()) == ["prompts", "completions"]


def test_nothing_but_keywords_or_nothing_but_places_is_enough() -> None:
    assert set(seen_by("**rest")["rest"]) == {"prompts", "completions", "messages", "level"}
    seen = seen_by("*places, **rest")
    assert seen["places"] == (["prompts"], ["completions"])
    assert set(seen["rest"]) == {"messages", "level"}
    assert seen_by("prompts, *places, level")["places"] == (["completions"],)
    assert seen_by("completions, *places, **rest")["places"] == ()


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ("prompts, completions, answer, **rest", "missing a required argument: 'answer'. --scor"),
        ("completions, questions, level", "missing a required argument: 'questions'. Name its"),
        ("prompts, completions, levle=0", "its parameter levle is no column, but level is. Name"),
        ("prompts, level", "it has no parameter for completions. Name one completions"),
        ("prompts", "it has no parameter for completions"),
        ("questions, level, **rest", "the second parameter, level, is called as a column"),
        ("completions, trainer_state, **rest", "'trainer_state', which TRL's trainer alone has"),
        ("completions, log_metric, **rest", "'log_metric', which TRL's trainer alone has"),
    ],
)
def test_what_cannot_be_bound_is_said_in_words(parameters: str, part: str) -> None:
    with pytest.raises(BindingError) as raised:
        seen_by(parameters)
    assert part in str(raised.value)


def wrapped(problem: str, **functions: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a message says to write."""
    made: dict[str, Any] = dict(functions)
    exec(problem.partition("Wrap it: ")[2], made)
    function: Callable[..., Any] = made["reward"]
    return function


def test_a_decorator_is_called_by_the_names_that_it_has() -> None:
    """With names of its own it takes what they say, else what the function that it wraps says."""

    def inner(completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    @wraps(inner)
    def named(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return inner(completions, prompts, **columns)

    @wraps(inner)
    def passing(*arguments: Any, **columns: Any) -> list[float]:
        return inner(*arguments, **columns)

    for function in (named, passing):
        (outcome,) = outcomes_of(function, Call(["pp"], ["ccccc"], {}))
        assert outcome.score == 5.0

    def compute_score(solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)

    @wraps(compute_score)
    def each(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [compute_score(*pair) for pair in zip(completions, answer, strict=True)]

    assert columns_problem(each, ["answer"]) == ""


def test_a_function_of_two_columns_and_no_completion_is_refused() -> None:
    def of_the_data(question: list[str], response: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in response]

    problem = columns_problem(of_the_data, ["question", "response"])
    assert "question and response, are called as columns of the data" in problem
    assert columns_problem(of_the_data, ["answer"]) == "", "it gets prompts and completions"


def test_functions_of_verl_are_refused_with_their_wrapping() -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ) -> float:
        assert data_source == "gsm8k"
        return float(ground_truth in solution_str) + extra_info["bonus"]

    columns: dict[str, list[Any]] = {
        "data_source": ["gsm8k"],
        "answer": ["4"],
        "extra_info": [{"bonus": 2.0}],
    }
    for given in (columns, {"answer": ["4"]}):
        problem = columns_problem(compute_score, given)
        assert "got: verl's signature" in problem
    reward = wrapped(problem, compute_score=compute_score)
    assert columns_problem(reward, columns) == ""
    (outcome,) = outcomes_of(reward, Call(["q"], ["it is 4"], columns))
    assert outcome.score == 3.0


def test_functions_of_openrlhf_are_refused_with_their_wrapping() -> None:
    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> Any:
        triples = zip(queries, prompts, labels, strict=True)
        return {"rewards": [float(query == p + label) for query, p, label in triples]}

    problem = columns_problem(reward_func, ["answer"])
    assert "got: OpenRLHF's signature" in problem
    reward = wrapped(problem, reward_func=reward_func)
    (outcome,) = outcomes_of(reward, Call(["q"], ["4"], {"answer": ["4"]}))
    assert outcome.score == 1.0


def test_something_without_a_signature_is_called_by_position() -> None:
    values = {"prompts": ["a"], "completions": ["b"], "messages": [[]]}
    assert binding_of(max, values).call(max, values) == ["b"]


def test_the_published_functions_of_trl_run() -> None:
    """The forms of its documentation, on a column `solution`, and a wrong order of parameters."""

    def accuracy(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        return [float(s in c) for c, s in zip(completions, solution, strict=True)]

    def swapped(completions: list[str], prompts: list[str], **kwargs: Any) -> list[float]:
        return [float(len(c)) for c in completions]

    def overlong(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    columns: dict[str, list[Any]] = {"solution": ["7"], "completion_ids": [[3, 4]]}
    call = Call(["a long prompt"], ["7!"], columns)
    scores = [outcomes_of(f, call)[0].score for f in (accuracy, swapped, overlong)]
    assert scores == [1.0, 2.0, 2.0]
