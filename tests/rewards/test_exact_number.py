"""The reward by exact number: which spellings are read as which number."""

from __future__ import annotations

import time

import pytest

from tandem.rewards.exact_number import last_number, reward


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
def test_the_last_number_of_a_text_is_read(text: str, number: float | None) -> None:
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
