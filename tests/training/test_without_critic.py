"""An algorithm without a critic: PPO's trainer, an advantage that is a pure function, no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.config.schema import RunConfig
from tandem.errors import ConfigError, ModelError
from tandem.objectives.advantages import leave_one_out, over_tokens
from tandem.objectives.policy import TokenLosses
from tandem.training.make_engine import make_engine
from tandem.training.ppo_trainer import PPOTrainer
from tandem.types import Experience
from tests.tiny import tiny_config
from tests.training.letter_rewards import early_letters

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


def test_own_advantages_are_used_as_they_come_and_see_the_kl(
    tiny_model: str, tmp_path: Path
) -> None:
    """Whitening, which the knobs leave on, is of GAE's advantages alone."""
    config = config_of(tmp_path, tiny_model, kl_coef=0.5)
    config = replace(config, ppo=replace(config.ppo, whiten_advantages=True))
    engine = make_engine(actor=tiny_model, config=config, has_critic=False)
    seen = []

    def own(made: Experience) -> tuple[torch.Tensor, None]:
        seen.append(made)
        return 7 * over_tokens(made.rewards.sum(dim=1), made.batch.response_mask), None

    trainer = PPOTrainer(
        engine, config, num_steps=2, reward_function=early_letters, advantages_of=own
    )
    prompts = [engine.renderer.prompt(f"Say {word}.") for word in QUESTIONS]
    trainer.train_rlhf(trainer.generate_experience(prompts, step=1), step=1)
    made = trainer.generate_experience(prompts, step=2)
    assert torch.equal(made.advantages, own(seen[-1])[0])
    kl = (made.old_logprobs - made.ref_logprobs).masked_fill(~made.batch.response_mask, 0)
    assert kl.abs().sum() > 0
    expected = made.scores - 0.5 * kl.sum(dim=1)
    assert torch.allclose(made.rewards.sum(dim=1), expected, atol=1e-5)


def trained(config: RunConfig, model: str, losses: TokenLosses | None) -> tuple[object, ...]:
    """Metrics and weights after a step."""
    engine = make_engine(actor=model, config=config)
    trainer = PPOTrainer(
        engine, config, num_steps=2, reward_function=early_letters, token_losses=losses
    )
    prompts = [engine.renderer.prompt(f"Say {word}.") for word in QUESTIONS]
    metrics = trainer.train_rlhf(trainer.generate_experience(prompts, step=1), step=1)
    return metrics, [p.detach().clone() for p in engine.actor.parameters()]


def test_a_policy_loss_of_ones_own_takes_the_clips_place(tiny_model: str, tmp_path: Path) -> None:
    """Written as the clipped surrogate it gives the same weights; what it gives off the response,
    and in how many pieces it is asked, does not matter."""
    config = config_of(tmp_path, tiny_model)
    config = replace(config, ppo=replace(config.ppo, epochs=2, clip_ratio=0.02, early_stop_kl=0))

    def clipped(
        logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        ratio = (logprobs - old).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.98, 1.02) * advantages)
        return torch.where(mask, -surrogate, torch.nan)

    def doubled(*tensors: torch.Tensor) -> torch.Tensor:
        return 2 * clipped(*tensors)

    theirs, expected = trained(config, tiny_model, None)
    ours, weights = trained(config, tiny_model, clipped)
    assert theirs["clip_fraction"] > 0
    assert ours["clip_fraction"] == 0
    for name in ("policy_loss", "policy_kl", "ratio_mean", "actor_grad_norm", "updates"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    for one, other in zip(weights, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    twice, _ = trained(config, tiny_model, doubled)
    assert twice["policy_loss"] != pytest.approx(theirs["policy_loss"], rel=1e-2)
    small = replace(config, micro_batch_tokens=64)
    _, pieces = trained(small, tiny_model, clipped)
    for one, other in zip(pieces, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (
            lambda logprobs, *_: logprobs.sum(1),
            "must return a loss for each token, .* not their sum",
        ),
        (lambda *_: 0.0, r"must return a tensor of floats \(B, T\); got float"),
        (lambda logprobs, *_: logprobs > 0, "got torch.bool"),
        (lambda logprobs, *_: logprobs.detach(), "with a gradient; got none"),
    ],
)
def test_a_policy_loss_that_is_none_is_refused(
    losses: TokenLosses, message: str, tiny_model: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(config_of(tmp_path, tiny_model), tiny_model, losses)


def test_advantages_of_ones_own_are_a_pair(tiny_model: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_model)
    engine = make_engine(actor=tiny_model, config=config, has_critic=False, has_reference=False)
    trainer = PPOTrainer(
        engine, config, reward_function=early_letters, advantages_of=lambda made: made.rewards
    )
    with pytest.raises(ConfigError, match=r"must be a pair, .* and None; got torch.float32 \(4, "):
        trainer.generate_experience([engine.renderer.prompt("Say a.")], step=1)


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
