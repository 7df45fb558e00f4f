"""Reward functions on rollouts: what they are given, once for all ranks, and what they make."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.config.schema import PPOConfig
from tandem.config.scoring import ScoringConfig
from tandem.errors import DataError, Stopped
from tandem.parallel.world import World
from tandem.rewards.scoring import GivenFunction
from tandem.training.experience import ScoredAnswers, score_answers
from tandem.training.reward_function import RewardColumns, function_scores, rewards_of
from tandem.types import Message, PromptRow, Rollout, Source, TokenBatch, TokenRow


def rollout_of(*answers: str, group: list[int] | None = None) -> Rollout:
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
    ended = torch.ones(len(answers)).bool()
    groups = torch.arange(len(answers)) if group is None else torch.tensor(group)
    return Rollout(batch, zeros, zeros, zeros, ended, prompts, answers, groups)


def here(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run in this process on all answers at once."""

    def called(prompts: list[str], completions: list[str], **columns: Any) -> Any:
        return function(prompts, completions, **columns)

    called.in_process = True  # type: ignore[attr-defined]
    return called


def scored(
    functions: Sequence[GivenFunction], rollout: Rollout, **knobs: Any
) -> tuple[RewardColumns, list[str]]:
    lines: list[str] = []
    rewards = rewards_of(functions, ScoringConfig(**knobs), lines.append)
    assert rewards is not None
    try:
        return function_scores(rewards, rollout), lines
    finally:
        rewards.close()


def test_the_function_sees_prompts_answers_and_every_column() -> None:
    seen: dict[str, object] = {}

    def spy(prompts: list[str], completions: list[str], **columns: object) -> list[float | None]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.5, None]

    found, _ = scored([here(spy)], rollout_of("a", "b"))
    assert found.values[0, 0] == 0.5
    assert found.values[1, 0].isnan()
    assert seen["prompts"] == ["q0", "q1"]
    assert seen["completions"] == ["a", "b"]
    assert seen["answer"] == [None, "1"]
    assert seen["messages"] == [
        [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{i}"}] for i in (0, 1)
    ]


def test_a_worker_sees_the_same(tmp_path: Any) -> None:
    def told(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        assert prompts == ["q1"] or columns["answer"] == [None]
        assert columns["messages"][0][1]["role"] == "user"
        return [float(len(completions[0]) + os.getpid())]

    found, _ = scored([told], rollout_of("a", "bbb"), workers=1)
    assert (found.values[1, 0] - found.values[0, 0]) == 2
    assert int(found.values[0, 0]) - 1 != os.getpid()


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped(signal.SIGTERM, "here")])
def test_a_stop_inside_it_is_a_stop(stop: BaseException) -> None:
    def stopped(*args: object, **columns: object) -> list[float | None]:
        raise stop

    with pytest.raises(type(stop)):
        scored([here(stopped)], rollout_of("a", "b"))


def test_it_changes_no_default_of_ours() -> None:
    def careless(*args: object, **columns: object) -> list[float | None]:
        torch.set_default_dtype(torch.float64)
        return [1.0, 2.0]

    assert scored([here(careless)], rollout_of("a", "b"))[0].values.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "values", [torch.tensor([0.5, 1.0]), np.array([0.5, 1.0]), [torch.tensor(0.5), np.True_]]
)
def test_arrays_tensors_and_truths_are_numbers(values: object) -> None:
    found, _ = scored([here(lambda *a, **k: values)], rollout_of("a", "b"))
    assert found.total.tolist() == [0.5, 1.0]


def test_a_column_with_an_arguments_name_is_named() -> None:
    rollout = rollout_of("a")
    for name in ("completions", "messages"):
        prompt = replace(rollout.prompts[0], columns={name: "x"})
        with pytest.raises(DataError, match=f"must not be named {name}"):
            scored([lambda *a, **k: [1.0]], replace(rollout, prompts=(prompt,)))


def test_what_fails_is_logged_by_function_and_reason() -> None:
    def picky(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        if completions[0] == "bad":
            raise ValueError("no")
        return [float("nan")] if completions[0] == "nan" else [None]

    def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [float(len(c)) for c in completions]

    rollout = rollout_of("a", "bad", "nan", "bad")
    found, lines = scored([(picky, 1.0), (length, 0.5)], rollout)
    metrics = found.metrics()
    assert metrics["reward_failed"] == 0.75
    assert metrics["reward_failures/exception"] == 2
    assert metrics["reward_failures/result"] == 1
    assert metrics["reward_none/picky"] == 1
    assert metrics["reward_none/length"] == 0
    assert "reward_mean/picky" not in metrics
    assert metrics["reward_mean/length"] == 2.5
    assert metrics["reward_std/length"] == pytest.approx(0.866, abs=1e-3)
    assert found.total.tolist() == [0.5, 1.5, 1.5, 1.5]
    (line,) = lines
    assert line.startswith("reward function picky failed on 3 of 4 answers (exception 2, result 1)")
    assert line.endswith("; the first: f:2: ValueError: no")
    (again,) = scored([(picky, 1.0)], rollout, on_failure="zero")[0].values.T.tolist()
    assert again[1:] == [0.0, 0.0, 0.0]
    with pytest.raises(DataError, match=r"failed on 3 of 4 answers .* Fix the function"):
        scored([picky], rollout, on_failure="stop")


def answered(rollout: Rollout, functions: Sequence[GivenFunction], **knobs: Any) -> ScoredAnswers:
    rewards = rewards_of(functions, ScoringConfig(**knobs))
    config = PPOConfig(missing_eos_penalty=0.0)
    return score_answers(rollout, None, None, config, rewards, World())  # type: ignore[arg-type]


def test_rows_without_a_score_are_left_out_or_0_but_always_counted() -> None:
    some = here(lambda p, c, **k: [None if text == "none" else 2.0 for text in c])
    rollout = rollout_of("a", "none")
    dropped = answered(rollout, [some])
    assert dropped.is_scored.tolist() == [True, False]
    zero = answered(rollout, [some], on_none="zero")
    assert zero.is_scored.tolist() == [True, True]
    assert zero.scores.tolist() == [2.0, 0.0]
    for found in (dropped, zero):
        assert found.metrics(rollout)["reward_unscored"] == 1


def test_rewards_normalized_in_their_groups_count_alike() -> None:
    """One in thousands, one in hundredths, against each other: neither drowns the other."""
    wide = here(lambda p, c, **k: [1000.0, 3000.0, 5.0, 5.0])
    narrow = here(lambda p, c, **k: [0.02, 0.01, 0.01, 0.03])
    rollout = rollout_of("a", "b", "c", "d", group=[0, 0, 1, 1])
    half = 0.5**0.5
    found = answered(rollout, [wide, (narrow, 2.0)], combine="group")
    assert found.scores.tolist() == pytest.approx([half, -half, -2 * half, 2 * half], abs=0.05)
    summed = answered(rollout, [wide, (narrow, 2.0)])
    assert summed.mixed.tolist() == pytest.approx([1000.04, 3000.02, 5.02, 5.06])
