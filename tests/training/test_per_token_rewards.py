"""Rewards of single tokens on their way from a function into advantages, against slow loops."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import PPOTrainer, build_config, make_engine
from tandem.config.schema import PPOConfig, RunConfig, rl_section
from tandem.errors import ConfigError
from tandem.parallel.world import World
from tandem.rewards.scoring import RewardFunctions
from tandem.training.algorithm import algorithm_of
from tandem.training.ppo import note_on_tokens
from tandem.types import Experience
from tests.jsonl import write_jsonl
from tests.ranks import on_ranks
from tests.training.runs import ran

FILE = """
def even(completions, completion_ids, **columns):
    given = [[(id % 5) / 4 - 0.5 for id in ids] for ids in completion_ids]
    return [None if ids[0] % 3 == 0 else own for ids, own in zip(completion_ids, given)]
even.per_token = True

def same(completions, completion_ids, **columns):
    parts = [[(id % 7) / 10 for id in ids[1:]] for ids in completion_ids]
    return [[5.3 - sum(own), *own] for own in parts]
same.per_token = True

def more(messages, **columns):
    return "Go on." if len(messages) == 2 else None

def whole(completions, **columns):
    return [len(text) % 3 for text in completions]
"""
WORDS = ("rain", "sun", "snow", "wind", "fog", "hail")


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE, encoding="utf-8")
    return str(tmp_path / "mine.py")


def configured(folder: Path, model: str, stage: str, **changes: Any) -> RunConfig:
    section = {"prompts_per_step": 6, "minibatch_size": 12, **changes.pop(stage)}
    values = {
        "stages": [stage], "actor_model": model, "output_dir": str(folder / "run"),
        "log": {"tensorboard": False}, stage: section,
        "sampling": {"max_new_tokens": 6, "samples_per_prompt": 2},
    }  # fmt: skip
    return build_config(values | changes)


def made_by(config: RunConfig) -> tuple[PPOTrainer, Experience]:
    engine = make_engine(config, config.actor_model)
    trainer = PPOTrainer(engine, config, num_steps=1, print_line=lambda line: None)
    prompts = [engine.renderer.prompt(f"Say {word}.") for word in WORDS]
    return trainer, trainer.generate_experience(prompts, step=1)


def answers_ids(made: Experience) -> list[list[int]]:
    batch = made.batch
    return [
        ids[mask].tolist() for ids, mask in zip(batch.token_ids, batch.response_mask, strict=True)
    ]


def expected_rewards(made: Experience, config: RunConfig, weights: tuple[float, float]) -> Any:
    """Each answer's rewards, token by token: 1.5 times the functions' weighted sum, the KL, and at
    the end what penalty and clip take."""
    rl, found = rl_section(config), []
    for row, ids in enumerate(answers_ids(made)):
        tokens = [1.5 * weights[0] * ((one % 5) / 4 - 0.5) for one in ids]
        other = 1.5 * weights[1] * (len(made.rollout.responses[row]) % 3)
        if ids[0] % 3 == 0:
            tokens = [0.0] * len(ids)
        score = sum(tokens) + other - rl.missing_eos_penalty * (not made.rollout.finished[row])
        score = max(-rl.reward_clip, min(rl.reward_clip, score))
        tokens[-1] += score - sum(tokens)
        if made.ref_logprobs is not None:
            ratio = (made.old_logprobs - made.ref_logprobs)[row]
            kl = ratio[made.batch.response_mask[row]].tolist()
            tokens = [token - rl.kl_coef * k for token, k in zip(tokens, kl, strict=True)]
        found.append(tokens)
    return found


@pytest.mark.parametrize("clip", [10.0, 0.8])
def test_ppo_learns_from_each_tokens_reward(
    tmp_path: Path, tiny_model: str, file: str, clip: float
) -> None:
    ppo = {
        "reward_function": [f"{file}:even:2", f"{file}:whole:0.5"], "reward_clip": clip,
        "reward_function_weight": 1.5, "gamma": 0.9, "lam": 0.7, "whiten_advantages": False,
        "missing_eos_penalty": 0.3,
    }  # fmt: skip
    config = configured(tmp_path, tiny_model, "ppo", ppo=ppo)
    trainer, made = made_by(config)
    assert isinstance(config.ppo, PPOConfig)
    assert made.values is not None
    assert made.returns is not None
    expected = expected_rewards(made, config, (2.0, 0.5))
    mask = made.batch.response_mask
    for row, rewards in enumerate(expected):
        own, values = mask[row], made.values[row][mask[row]].tolist()
        assert made.rewards[row][own].tolist() == pytest.approx(rewards, abs=1e-5)
        advantage, advantages = 0.0, []
        for place in reversed(range(len(rewards))):
            following = values[place + 1] if place + 1 < len(values) else 0.0
            delta = rewards[place] + 0.9 * following - values[place]
            advantage = delta + 0.9 * 0.7 * advantage
            advantages.insert(0, advantage)
        assert made.advantages[row][own].tolist() == pytest.approx(advantages, abs=1e-5)
    sums = [sum(own) for own in expected]
    assert made.metrics["shaped_return"] == pytest.approx(sum(sums) / len(sums), abs=1e-5)
    scored = [ids for ids in answers_ids(made) if ids[0] % 3]
    given = [[(one % 5) / 4 - 0.5 for one in ids] for ids in scored]
    mean = sum(map(sum, given)) / len(given)
    assert made.metrics["reward_mean/even"] == pytest.approx(mean, abs=1e-6)
    of_tokens = sum(map(sum, given)) / sum(map(len, given))
    assert made.metrics["reward_per_token/even"] == pytest.approx(of_tokens, abs=1e-6)
    assert (made.metrics["reward_clipped"] > 0) == (clip < 1)
    placed = [1.5 * 2 * number for own in given for number in own]
    placed += [0.0] * (made.batch.num_response_tokens - len(placed))
    spread = statistics.pstdev(placed)
    assert made.metrics["reward_token_std"] == pytest.approx(spread, abs=1e-5)
    assert trainer.train_rlhf(made, step=1)["updates"] == 1


def test_answers_without_a_reward_are_left_out_with_their_tokens(
    tmp_path: Path, tiny_model: str, file: str
) -> None:
    sampling = {"max_new_tokens": 3, "samples_per_prompt": 4}
    ppo = {"reward_function": [f"{file}:even"], "missing_eos_penalty": 0, "kl_coef": 0}
    config = configured(tmp_path, tiny_model, "ppo", ppo=ppo, sampling=sampling, seed=5)
    _, made = made_by(config)
    assert made.metrics["reward_unscored"] > 0
    assert len(made) == 24 - made.metrics["reward_unscored"]
    for row, ids in enumerate(answers_ids(made)):
        rewards = made.rewards[row][made.batch.response_mask[row]].tolist()
        assert rewards == pytest.approx([(one % 5) / 4 - 0.5 for one in ids], abs=1e-6)


@pytest.mark.parametrize("rounds", [1, 3])
def test_without_a_critic_a_token_gets_what_follows_it_or_the_answers_sum(
    tmp_path: Path, tiny_model: str, file: str, rounds: int
) -> None:
    grpo = {"reward_function": [f"{file}:even"], "baseline": "none", "advantage_scale": "none",
            "sampling_rounds": rounds}  # fmt: skip
    config = configured(tmp_path, tiny_model, "grpo", grpo=grpo)
    _, made = made_by(config)
    for row, ids in enumerate(answers_ids(made)):
        rewards = [(one % 5) / 4 - 0.5 for one in ids]
        following = [sum(rewards[place:]) for place in range(len(rewards))]
        own = made.batch.response_mask[row]
        assert made.advantages[row][own].tolist() == pytest.approx(following, abs=1e-5)
    assert made.metrics["reward_token_std"] > 0.1
    rewards_of = RewardFunctions([f"{file}:even", f"{file}:whole"])
    assert note_on_tokens(config.grpo, rewards_of) == ""
    grpo["baseline"] = "group-mean"
    by_group = configured(tmp_path, tiny_model, "grpo", grpo=grpo)
    assert algorithm_of(by_group.grpo, 6).shares_advantage
    assert not algorithm_of(by_group.grpo, 6, lambda made: (made.rewards, None)).shares_advantage
    assert note_on_tokens(by_group.grpo, rewards_of).startswith(
        "of the rewards per token of even only each answer's sum counts: baseline group-mean"
    )


@pytest.mark.parametrize("scale", ["group-std", "batch-std", "none"])
def test_equal_sums_teach_nothing_however_their_tokens_share_them(
    tmp_path: Path, tiny_model: str, file: str, scale: str
) -> None:
    grpo = {"reward_function": [f"{file}:same"], "advantage_scale": scale}
    more = {"max_new_tokens": 24, "samples_per_prompt": 4}
    _, made = made_by(configured(tmp_path, tiny_model, "grpo", grpo=grpo, sampling=more))
    assert made.metrics["groups_without_signal"] == 1.0
    assert made.scores.tolist() == [pytest.approx(5.3)] * 24
    assert not made.advantages.any()


def test_in_a_conversation_the_last_answers_tokens_are_rewarded(
    tmp_path: Path, tiny_model: str, file: str
) -> None:
    ppo = {"reward_function": [f"{file}:even"], "environment": f"{file}:more", "kl_coef": 0,
           "missing_eos_penalty": 0, "max_conversation_tokens": 120}  # fmt: skip
    config = configured(
        tmp_path, tiny_model, "ppo", ppo=ppo, dataset={"max_prompt_tokens": 64},
        sampling={"max_new_tokens": 6, "samples_per_prompt": 2, "stop_strings": ["e", "a", "o"]},
    )  # fmt: skip
    _, made = made_by(config)
    assert made.metrics["conversation_answers"] > 1
    for row, prompt in enumerate(made.rollout.prompts):
        expected = torch.zeros(len(made.rewards[row]))
        last = made.batch.response_mask[row].clone()
        last[: len(prompt)] = False
        expected[last] = (made.batch.token_ids[row][last] % 5) / 4 - 0.5
        torch.testing.assert_close(made.rewards[row], expected)


def test_a_run_records_what_each_token_got(tmp_path: Path, tiny_model: str, file: str) -> None:
    rows = [{"prompt": f"Say {word}."} for word in WORDS * 2]
    data = tmp_path / "prompts.jsonl"
    write_jsonl(data, rows)
    grpo = {"reward_function": [f"{file}:even"], "steps": 1, "eval_every": 0}
    lines: list[str] = []
    config = configured(tmp_path, tiny_model, "grpo", grpo=grpo, data=[str(data)])
    folder = ran(config, lines=lines)
    assert any("only each answer's sum counts" in line for line in lines)
    text = (folder / "rollouts.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    assert records
    for record in records:
        assert sum(record["rewards"]) == pytest.approx(record["reward"], abs=1e-3)
        assert torch.tensor(record["rewards"]).abs().gt(0).sum() > 1 or len(record["rewards"]) == 1


def refused(world: World, config: RunConfig) -> str:
    with pytest.raises(ConfigError) as error:
        ran(config, world)
    return str(error.value)


def test_rewards_that_are_normalized_are_refused_on_every_rank_before_models_are_loaded(
    tmp_path: Path, tiny_model: str, file: str
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "Say {word}."}}\n' for word in WORDS), encoding="utf-8")
    grpo = {"reward_function": [f"{file}:even"], "steps": 1, "eval_every": 0}
    combined = {"combine": "group"}
    config = configured(tmp_path, tiny_model, "grpo", grpo=grpo, data=[str(data)], scoring=combined)
    for told in on_ranks(2, refused, config):
        assert told.startswith("scoring.combine must be sum where a function rewards each token")
