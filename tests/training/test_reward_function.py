"""Reward functions: found by name, called with columns, and their answers checked."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.errors import ConfigError, DataError, Stopped
from tandem.training import reward_function
from tandem.training.exact_number import last_number, reward
from tandem.training.reward_function import function_scores, load_reward_function
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
    ended, group = torch.ones(len(answers)).bool(), torch.arange(len(answers))
    return Rollout(batch, zeros, zeros, zeros, ended, prompts, answers, group)


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


def fail(*args: object, **columns: object) -> list[float | None]:
    raise KeyError("answer")


class Unspeakable(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise ValueError("nothing to say")

    __repr__ = __str__


class Panic(BaseException):
    pass


def unspeakable(*args: object, **columns: object) -> list[float | None]:
    raise Unspeakable


def panic(*args: object, **columns: object) -> list[float | None]:
    raise Panic("oh\nno")


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (fail, "it raised KeyError: 'answer'"),
        (lambda *a, **k: sys.exit(3), "it raised SystemExit: 3"),
        (lambda *a, **k: [1.0], "must return a list of 2 numbers or None; got 1"),
        (lambda *a, **k: 1.0, "must return a list of 2 numbers or None; got float"),
        (lambda *a, **k: [1.0, float("nan")], "must return finite numbers or None; got nan"),
        (lambda *a, **k: [1.0, 10**400], "must return finite numbers or None; got 1000"),
        (lambda *a, **k: [1.0, "high"], "must return finite numbers or None; got 'high'"),
        (lambda *a, **k: [1.0, 1e39], "must return finite numbers or None; got 1e+39"),
        (lambda *a, **k: [1.0, Unspeakable()], "must return finite numbers or None; got Unspea"),
        (unspeakable, "it raised Unspeakable: Unspeakable"),
        (panic, "it raised Panic: oh no"),
    ],
)
def test_what_it_returns_is_checked(function: Callable[..., object], part: str) -> None:
    with pytest.raises(DataError) as raised:
        function_scores(function, rollout_of("a", "b"))  # type: ignore[arg-type]
    assert part in str(raised.value)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped(signal.SIGTERM, "here")])
def test_a_stop_inside_it_is_a_stop(stop: BaseException) -> None:
    def stopped(*args: object, **columns: object) -> list[float | None]:
        raise stop

    with pytest.raises(type(stop)):
        function_scores(stopped, rollout_of("a", "b"))


def test_it_changes_no_default_of_ours() -> None:
    def careless(*args: object, **columns: object) -> list[float | None]:
        torch.set_default_dtype(torch.float64)
        return [1.0, 2.0]

    assert function_scores(careless, rollout_of("a", "b")).dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


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
    assert load_reward_function("tandem.training.exact_number:reward") is reward


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nothing", "Write e.g. rewards.py:my_reward"),
        ("/nowhere/mine.py:good", "no file /nowhere/mine.py"),
        ("no.such.module:good", "No module named"),
        ("tandem.training.exact_number:rewrd", "has no function rewrd"),
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
        ("The answer is 1,234.50.", 1234.5), ("3 + 4 = 7", 7.0), ("about .5", 0.5), ("7.", 7.0),
        ("#### 42", 42.0), ("none", None), ("", None), ("- ", None), ("$5", 5.0), ("50%", 50.0),
        # signs
        ("minus -2", -2.0), ("x = \u22125", -5.0), ("is \u20135.", -5.0), ("(-5)", -5.0),
        ("-$5", -5.0), ("-3-5", 5.0), ("3-5", 5.0), ("5-3", 3.0), ("5\u20133", 3.0), ("3 - 5", 5.0),
        ("COVID-19", 19.0), ("(2)-1", 1.0), ("**-7**", -7.0), ("answer:-5", -5.0), ("2 -3", -3.0),
        # thousands and decimal commas
        ("1 000", 1000.0), ("1\u00a0000\u00a0000", 1e6), ("1\u202f234.5", 1234.5),
        ("1'234", 1234.0), ("1_000", 1000.0), ("12,345,678", 12345678.0), ("1.234.567", 1234567.0),
        ("-1,000", -1000.0), ("9,99", 9.99), ("0,125", 0.125), ("1.234,5", 1234.5),
        ("1 234,5", 1234.5), ("1234,5", 1234.5),
        ("1,2,3", 3.0), ("1, 2, 3", 3.0), ("in 2020 100 came", 100.0), ("1,234 5", 5.0),
        ("3.5 4.25", 4.25), ("1.2.3", 3.0), ("-1 2", 2.0), ("1,23,456", 456.0), ("5 000 0", 0.0),
        # fractions
        ("2/3", 2 / 3), ("-2/3", -2 / 3), ("so 1 1/2 cups", 1.5), ("-1 1/2", -1.5), ("1 / 4", 0.25),
        ("\\frac{2}{3}", 2 / 3), ("-\\dfrac{1}{4}", -0.25), ("2\\frac{1}{2}", 2.5), ("5/0", 0.0),
        ("1/1,000", 0.001), ("3 7/2", 3.5), ("on 3/4/2020", 2020.0), ("2/3 4", 4.0), ("5/day", 5.0),
        # powers of ten
        ("1e3", 1000.0), ("2.5E-2", 0.025), ("-1e3", -1000.0), ("1.5 \u00d7 10^3", 1500.0),
        ("1.5 \\times 10^{-3}", 0.0015), ("2 x 10\u00b3", 2000.0), ("1e3x", 3.0), ("2^10", 10.0),
        ("5 m\u00b2", 5.0), ("1e999", None), ("1" + "0" * 23 + "e3", 1e26), ("9" * 500, None),
        ("1e-999", 0.0), ("\u0661\u0662", 12.0),
    ],
)  # fmt: skip
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == (None if number is None else pytest.approx(number, rel=1e-12))


def test_a_number_as_the_data_has_it_is_read_as_itself() -> None:
    for value in (7, -3.5, 1e-7, 1e22, -2.5e-9, 123456789, 0.1):
        assert last_number(str(value)) == value


@pytest.mark.parametrize(
    "unit", ["1,111", "1 ", "1.", "-", "1/", "\\frac{", "\\frac{1}", "1e", "9"]
)
def test_a_long_answer_takes_no_quadratic_time(unit: str) -> None:
    def seconds(times: int) -> float:
        text, start = unit * times, time.process_time()
        last_number(text)
        return time.process_time() - start

    assert min(seconds(400_000 // len(unit)) for _ in range(2)) < 2


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
