"""An algorithm without a critic: PPO's trainer, an advantage that is a pure function, no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.config.schema import RunConfig
from tandem.errors import ConfigError, ModelError
from tandem.objectives.advantages import leave_one_out, over_tokens
from tandem.training.make_engine import make_engine
from tandem.training.ppo_trainer import PPOTrainer
from tandem.types import Experience
from tests.tiny import tiny_config
from tests.training.test_ppo_trainer import early_letters

QUESTIONS = ("cat", "sun", "green", "a", "house", "yes")


def rloo(made: Experience) -> tuple[torch.Tensor, None]:
    """All of a critic-free algorithm that is not PPO's."""
    return over_tokens(leave_one_out(made.scores, made.group), made.batch.response_mask), None


def config_of(folder: Path, model: str, kl_coef: float = 0.0) -> RunConfig:
    config = tiny_config(folder, model, "unused")
    actor = replace(config.ppo.actor, learning_rate=5e-3, schedule="constant")
    ppo = replace(config.ppo, kl_coef=kl_coef, actor=actor, whiten_advantages=False)
    return replace(config, ppo=ppo, sampling=replace(config.sampling, samples_per_prompt=4))


def test_a_policy_learns_without_critic_and_reference(tiny_model: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_model)
    engine = make_engine(actor=tiny_model, config=config, has_critic=False, has_reference=False)
    assert list(engine.learners) == ["actor"]
    assert (engine.critic, engine.reference, engine.critic_learner) == (None, None, None)
    trainer = PPOTrainer(
        engine, config, num_steps=24, reward_function=early_letters, advantages_of=rloo
    )
    prompts = [engine.renderer.prompt(f"Say {word}.") for word in QUESTIONS]
    trainer.rehearse(prompts)
    rewards = []
    for step in range(1, 25):
        made = trainer.generate_experience(prompts, step=step)
        assert (made.values, made.returns, made.ref_logprobs) == (None, None, None)
        assert made.group.tolist() == [i // 4 for i in range(24)]
        sums = torch.zeros(6).index_add(0, made.group, made.advantages.amax(1))
        metrics = trainer.train_rlhf(made, step=step)
        assert "value_loss" not in metrics
        assert "kl" not in made.metrics
        assert metrics["ratio_gap_before_update"] < 1e-6
        rewards.append(made.metrics["reward"])
        assert bool(sums.isfinite().all())
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_a_reference_alone_penalizes_without_a_critic(tiny_model: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_model, kl_coef=0.1)
    engine = make_engine(actor=tiny_model, config=config, has_critic=False)
    trainer = PPOTrainer(
        engine, config, num_steps=2, reward_function=early_letters, advantages_of=rloo
    )
    prompts = [engine.renderer.prompt(f"Say {word}.") for word in QUESTIONS]
    made = trainer.generate_experience(prompts, step=1)
    assert made.metrics["kl"] == 0.0, "the policy is its reference before the first update"
    trainer.train_rlhf(made, step=1)
    assert trainer.generate_experience(prompts, step=2).metrics["kl"] != 0.0


def test_what_is_missing_is_said(tiny_model: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_model, kl_coef=0.1)
    engine = make_engine(actor=tiny_model, config=config, has_critic=False, has_reference=False)
    with pytest.raises(ConfigError, match="must have a critic for its advantages"):
        PPOTrainer(engine, config, reward_function=early_letters)
    with pytest.raises(ConfigError, match=r"ppo.kl_coef must be 0 without a reference; got 0.1"):
        PPOTrainer(engine, config, reward_function=early_letters, advantages_of=rloo)
    rollout = engine.rollout([engine.renderer.prompt("Say a.")], step=1)
    with pytest.raises(ModelError, match="values need a critic"):
        engine.values(rollout.batch)
    with pytest.raises(ModelError, match="log-probs of the reference need one"):
        engine.reference_logprobs(rollout.batch)
