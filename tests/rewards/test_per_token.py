"""Reward functions that reward each token: what they must return, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.scoring import ScoringConfig
from tandem.errors import ConfigError
from tandem.rewards.per_token import mean_of_tokens, weighted_tokens
from tandem.rewards.scoring import Answers, FunctionScores, RewardFunctions
from tests.rewards.answers import answers_of

FILE = """
def ids(completions, completion_ids, **columns):
    return [None if text == "none" else [id / 4 for id in own] for text, own in
            zip(completions, completion_ids)]
ids.per_token = True

def no_ids(completions, **columns):
    return [[1.0]]
no_ids.per_token = True
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE, encoding="utf-8")
    return str(tmp_path / "mine.py")


def three() -> Answers:
    """Answers of three tokens, of one and of two."""
    ids = [[4, 8, 1], [3], [2, 2]]
    return replace(answers_of(["four", "none", "two"]), completion_ids=ids)


@pytest.mark.parametrize("in_process", [False, True])
def test_an_answers_score_is_the_sum_of_what_its_tokens_got(file: str, in_process: bool) -> None:
    def ids(completions: list[str], completion_ids: list[list[int]]) -> list[list[float] | None]:
        return [
            None if text == "none" else [one / 4 for one in own]
            for text, own in zip(completions, completion_ids, strict=True)
        ]

    ids.per_token = True  # type: ignore[attr-defined]
    ids.in_process = True  # type: ignore[attr-defined]
    rewards = RewardFunctions([ids if in_process else f"{file}:ids"])
    (found,) = rewards.score(three())
    rewards.close()
    assert found.tokens == [[1.0, 2.0, 0.25], None, [0.5, 0.5]]
    assert found.scores == [3.25, None, 1.0]
    assert not found.failures
    both = FunctionScores.joined([found, found])
    assert both.tokens == found.tokens * 2


def test_a_function_of_whole_answers_has_no_tokens() -> None:
    rewards = RewardFunctions([lambda completions: [1.0]])
    (found,) = rewards.score(three())
    rewards.close()
    assert found.tokens is None


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([[1.0, 2.0]], "must return a number for each of 3 tokens; got 2 numbers"),
        ([[1.0, None, 2.0]], "must return a finite number for each token; got None"),
        ([[1.0, float("nan"), 2.0]], "must return finite numbers within 1e+15 or None; got nan"),
        (
            [[1e15, 1e15, 1e15]],
            "must return finite numbers within 1e+15 or None; got 3000000000000000.0",
        ),
        ([1.0], "must return a list of numbers, one for each token, or None; got 1.0"),
        (1.0, "must return a list of 1 lists of numbers or None; got float"),
        ([[1.0] * 3] * 2, "must return a list of 1 lists of numbers or None; got 2"),
    ],
)
def test_what_is_not_a_number_for_each_token_is_a_failure(returned: Any, told: str) -> None:
    def wrong(completions: list[str], completion_ids: list[list[int]]) -> Any:
        return returned

    wrong.per_token = True  # type: ignore[attr-defined]
    answers = replace(answers_of(["four"]), completion_ids=[[4, 8, 1]])
    rewards = RewardFunctions([wrong], ScoringConfig(on_failure="zero"), lambda line: None)
    (found,) = rewards.score(answers)
    rewards.close()
    assert found.failures == {"result": 1}
    assert told in found.first
    assert (found.scores, found.tokens) == ([0.0], [None])


def test_lists_without_the_attribute_are_answered_with_it() -> None:
    rewards = RewardFunctions([lambda completions: [[1.0, 2.0]]], print_line=lambda line: None)
    (found,) = rewards.score(answers_of(["four"]))
    rewards.close()
    assert "needs the attribute per_token" in found.first


def test_a_function_that_cannot_see_the_tokens_is_refused(file: str) -> None:
    with pytest.raises(ConfigError, match="no_ids must have a parameter completion_ids"):
        RewardFunctions([f"{file}:no_ids"])


def test_rewards_that_are_normalized_have_no_tokens(file: str) -> None:
    with pytest.raises(ConfigError, match="combine must be sum where a function rewards each tok"):
        RewardFunctions([f"{file}:ids"], ScoringConfig(combine="group"))


def test_weights_by_hand() -> None:
    first = [[1.0, 2.0], None, None]
    second = [[0.5, -1.0], [4.0], None]
    expected = ((2.25, 3.5), (2.0,), ())
    assert weighted_tokens([(2.0, first), (0.5, second)], 3) == expected
    assert weighted_tokens([], 3) == ()
    assert mean_of_tokens(second) == pytest.approx(3.5 / 3)
    assert mean_of_tokens([None]) is None


def test_options_keep_the_attribute(tmp_path: Path) -> None:
    code = (
        "def ids(completions, completion_ids, *, scale=1.0):\n"
        "    return [[scale * one for one in own] for own in completion_ids]\n"
        "ids.per_token = True\n"
    )
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    rewards = RewardFunctions([f"{tmp_path / 'mine.py'}:ids?scale=2"])
    (found,) = rewards.score(three())
    rewards.close()
    assert found.tokens == [[8.0, 16.0, 2.0], [6.0], [4.0, 4.0]]
