"""The self-test before the first step: right above empty and above another row's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tandem.config.scoring import ScoringConfig
from tandem.errors import ConfigError
from tandem.rewards.scoring import RewardFunctions
from tandem.rewards.selftest import ReferenceRow, self_test


def rows_of(*answers: Any, column: str = "answer") -> list[ReferenceRow]:
    return [
        ReferenceRow(f"q{i}", {column: answer, "messages": []}, f"d.jsonl:{i + 1}")
        for i, answer in enumerate(answers)
    ]


def report_of(function: Any, rows: list[ReferenceRow], **knobs: Any) -> list[str]:
    lines: list[str] = []
    rewards = RewardFunctions([function], ScoringConfig(**knobs), lines.append)
    try:
        return self_test(rewards, rows)
    finally:
        rewards.close()


def equal(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
    return [float(c == str(a)) for c, a in zip(completions, answer, strict=True)]


def test_a_reward_that_tells_answers_apart_passes() -> None:
    (line,) = report_of(equal, rows_of("Paris", "Rome", "Nairobi", None))
    assert line.startswith("reward function equal tells answers apart on 3 rows: reference 1, ")
    assert line.endswith("empty 0, another row's reference 0")
    assert (
        "on 2 rows" in report_of(equal, rows_of(3, 4, column="result"), answer_column="result")[0]
    )
    for name in ("gsm8k", "exact_number", "choice"):
        rows = rows_of("A", "B") if name == "choice" else rows_of("so 1 + 1 = 2 #### 2", "3")
        assert (
            "reference 1, empty 0, another row's reference 0"
            in report_of(f"tandem:{name}", rows)[0]
        )


def zero(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


def longer(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(c)) for c in completions]


def short(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [-float(len(c)) for c in completions]


def nothing(prompts: Any, completions: Any, **columns: Any) -> list[None]:
    return [None for _ in completions]


def raises(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    raise ValueError("signal only works in main thread")


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (zero, "got 0, 0 and 0"),
        (longer, "got 4.33, 0 and 4.33"),
        (short, "got -4.33, 0 and -4.33"),
        (nothing, "got none, none and none"),
        (raises, "failed on 12 of 12 answers .*d.jsonl:1: ValueError: signal only works"),
    ],
)
def test_a_reward_that_cannot_stops_the_run_with_its_scores(
    function: Callable[..., Any], part: str
) -> None:
    with pytest.raises(ConfigError, match=part) as raised:
        report_of(function, rows_of("aaaa", "bbbb", "ccccc"))
    assert f"reward function {function.__name__} must score the reference" in str(raised.value)
    assert "--no-scoring.self-test" in str(raised.value)


def test_what_judges_no_right_and_wrong_is_not_tested() -> None:
    assert report_of("tandem:length?limit=5", rows_of("a", "b")) == []


def test_rows_without_references_are_told_in_a_line() -> None:
    for rows in (rows_of(None, None), rows_of("same", "same"), rows_of(["a"], {"b": 1})):
        (line,) = report_of(zero, rows)
        assert line.startswith("reward functions are not tested before the first step: no two rows")
