"""What a run records of its answers, against the numbers that it logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import tiny_config
from tests.training import letter_rewards
from tests.training.runs import answer_lines, ran, ran_with_stops, records

FILES = ("answers.jsonl", "rollouts.jsonl", "followed.jsonl")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str) -> Any:
    """PPO alone with a reward function, evaluated at every step."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    return tiny_config(
        folder, tiny_model, preferences, stages=["ppo"], ppo__eval_every=1,
        ppo__reward_function=f"{letter_rewards.__file__}:starts_early",
        log__record_answers=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(config: Any) -> Path:
    return ran(config)


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer_lines(run / name)]


def test_the_numbers_of_answers_are_those_whose_means_are_logged(run: Path) -> None:
    logged = {record["step"]: record["values"] for record in records(run)}
    found = lines(run, "answers.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3]
    for line in found:
        values = logged[line["step"]]
        for name, metric in {
            "reward": "reward", "length": "response_tokens", "kl": "kl", "finished": "eos_rate",
        }.items():  # fmt: skip
            mean = sum(line[name]) / len(line[name])
            assert mean == pytest.approx(values[metric], rel=1e-4, abs=1e-5), name
        assert sum(line["advantage"]["counts"]) == sum(line["length"])


def test_some_answers_are_recorded_token_by_token(run: Path) -> None:
    found = lines(run, "rollouts.jsonl")
    assert [line["step"] for line in found] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    numbers = {line["step"]: line for line in lines(run, "answers.jsonl")}
    for line in found:
        assert line["reward"] == numbers[line["step"]]["reward"][line["row"]]
        columns = (
            "tokens", "logprobs", "ref_logprobs", "values", "rewards", "returns", "advantages",
        )  # fmt: skip
        assert {len(line[name]) for name in columns} == {line["length"]}
        returns = np.cumsum(line["rewards"][::-1])[::-1]  # lambda 1
        assert line["returns"] == pytest.approx(returns, abs=1e-2)
        ratios = [a - b for a, b in zip(line["logprobs"], line["ref_logprobs"], strict=True)]
        assert sum(ratios) == pytest.approx(line["kl"], abs=2e-3 * line["length"])
        assert line["prompt"][-1]["role"] == "user"
    values, returns, advantages = (
        np.concatenate([line[name] for line in found if line["step"] == 3])
        for name in ("values", "returns", "advantages")
    )
    slope, start = np.polyfit(returns - values, advantages, 1)  # whitening, of a step's tokens
    assert slope > 0
    assert slope * (returns - values) + start == pytest.approx(advantages, abs=1e-2)


def test_held_out_prompts_are_followed_from_before_the_first_step(run: Path) -> None:
    logged = {record["step"]: record["values"] for record in records(run)}
    found = lines(run, "followed.jsonl")
    assert sorted({line["step"] for line in found}) == [0, 1, 2, 3]
    of_step = {s: [x for x in found if x["step"] == s] for s in range(4)}
    names = [x["prompt_id"] for x in of_step[0]]
    for step, answers in of_step.items():
        assert [x["prompt_id"] for x in answers] == names
        rewards = [x["reward"] for x in answers]
        assert sum(rewards) / len(rewards) == pytest.approx(
            logged[step]["heldout_reward"], rel=1e-4, abs=1e-5
        )


def test_a_stopped_run_records_nothing_twice(config: Any, run: Path, tmp_path: Path) -> None:
    ran_with_stops(config, tmp_path / "run", [("ppo", 1), ("ppo", 3)])
    for name in FILES:
        assert answer_lines(tmp_path / "run" / name) == answer_lines(run / name), name


def test_rows_of_the_data_are_shown_with_what_is_learned(run: Path) -> None:
    rows = json.loads((run / "data_rows.json").read_text(encoding="utf-8"))
    assert set(rows) == {"prompts"}
    (sequence,) = rows["prompts"][0]["sequences"]
    assert len(sequence["tokens"]) == len(sequence["learned"]) == sequence["num_tokens"]
    assert not any(sequence["learned"])
