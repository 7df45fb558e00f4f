"""Reward functions: found by name, called with columns, and their answers checked."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.errors import ConfigError, DataError
from tandem.train import reward_function
from tandem.train.exact_number import last_number, reward
from tandem.train.reward_function import function_scores, load_reward_function
from tandem.types import Message, PromptRow, Rollout, Source, TokenBatch, TokenRow


def rollout_of(*answers: str) -> Rollout:
    rows = [TokenRow((1, 2), (False, True), Source("d", "f", 1)) for _ in answers]
    batch = TokenBatch.from_rows(rows, 0)
    prompts = tuple(
        PromptRow(
            (1,),
            (Message("system", "s"), Message("user", f"q{i}")),
            {"answer": str(i)} if i else {},
            Source("d", "f", i + 1),
        )
        for i in range(len(answers))
    )
    zeros = torch.zeros(len(answers), 2)
    return Rollout(batch, zeros, zeros, zeros, torch.ones(len(answers)).bool(), prompts, answers)


def test_the_function_sees_prompts_answers_and_every_column() -> None:
    seen: dict[str, object] = {}

    def spy(prompts: list[str], completions: list[str], **columns: object) -> list[float | None]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.5, None]

    scores = function_scores(spy, rollout_of("a", "b"))
    assert scores[0] == 0.5
    assert scores[1].isnan()
    assert seen["prompts"] == ["q0", "q1"]
    assert seen["completions"] == ["a", "b"]
    assert seen["answer"] == [None, "1"]
    assert seen["messages"] == [
        [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{i}"}] for i in (0, 1)
    ]


class _SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError


class _OtherError(BaseException):
    pass


def raising(error: BaseException) -> Callable[..., list[float | None]]:
    def function(*args: object, **columns: object) -> list[float | None]:
        raise error

    return function


def fail(*args: object, **columns: object) -> list[float | None]:
    raise KeyError("answer")


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (fail, "it raised KeyError: 'answer'"),
        (lambda *a, **k: sys.exit(3), "it raised SystemExit: 3"),
        (raising(_SilentError()), "it raised _SilentError: a _SilentError that cannot be shown"),
        (raising(_OtherError("no")), "it raised _OtherError: no"),
        (lambda *a, **k: [1.0, 1e39], "within float32; got 1e+39"),
        (lambda *a, **k: [1.0], "must return a list of 2 numbers or None; got 1"),
        (lambda *a, **k: 1.0, "must return a list of 2 numbers or None; got float"),
        (
            lambda *a, **k: [1.0, float("nan")],
            "or None, within float32; got nan",
        ),
        (lambda *a, **k: [1.0, 10**400], "or None, within float32; got 1000"),
        (lambda *a, **k: [1.0, "high"], "or None, within float32; got 'high'"),
    ],
)
def test_what_it_returns_is_checked(function: Callable[..., object], part: str) -> None:
    with pytest.raises(DataError) as raised:
        function_scores(function, rollout_of("a", "b"))  # type: ignore[arg-type]
    assert part in str(raised.value)


@pytest.mark.parametrize(
    "values", [torch.tensor([0.5, 1.0]), np.array([0.5, 1.0]), [torch.tensor(0.5), np.True_]]
)
def test_arrays_tensors_and_truths_are_numbers(values: object) -> None:
    assert function_scores(lambda *a, **k: values, rollout_of("a", "b")).tolist() == [0.5, 1.0]


def test_a_column_with_an_arguments_name_is_named() -> None:
    rollout = rollout_of("a")
    prompt = replace(rollout.prompts[0], columns={"completions": "x"})
    with pytest.raises(DataError, match="must not be named completions"):
        function_scores(lambda *a, **k: [1.0], replace(rollout, prompts=(prompt,)))


def test_found_in_a_file_or_a_module(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def good(prompts, completions, **columns):\n    return [1.0]\n")
    assert load_reward_function(f"{file}:good")([], []) == [1.0]
    assert load_reward_function("tandem.train.exact_number:reward") is reward


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nothing", "Write e.g. rewards.py:my_reward"),
        ("/nowhere/mine.py:good", "no file /nowhere/mine.py"),
        ("no.such.module:good", "No module named"),
        ("tandem.train.exact_number:rewrd", "has no function rewrd"),
        ("FOLDER/syntax.py:f", "SyntaxError"),
        ("FOLDER/exits.py:f", "SystemExit: 3"),
    ],
)
def test_a_name_that_leads_nowhere(tmp_path: Path, name: str, part: str) -> None:
    (tmp_path / "syntax.py").write_text("def f(:")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError) as raised:
        load_reward_function(name.replace("FOLDER", str(tmp_path)))
    assert part in str(raised.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 1,234.50.", 1234.5),
        ("3 + 4 = 7", 7.0),
        ("minus -2", -2.0),
        ("about .5", 0.5),
        ("#### 42", 42.0),
        ("7.", 7.0),
        ("none", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_exact_number_reward() -> None:
    completions = ["so 42", "so 41", "no idea", "x"]
    assert reward([], completions, ["a #### 42", "42", "42", "none"]) == [1.0, 0.0, 0.0, None]


def test_a_function_that_does_not_return_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_function, "OVERDUE_SECONDS", 0.01)
    said: list[str] = []

    def waits(*args: object, **columns: object) -> list[float | None]:
        while not said:
            time.sleep(0.005)
            said.extend(capsys.readouterr().out.splitlines())
        return [1.0, 1.0]

    assert function_scores(waits, rollout_of("a", "b")).tolist() == [1.0, 1.0]
    assert said[0].startswith("reward function waits has run for 0 s on 2 answers and has not")
