"""PPO's two halves: numbers that must hold in a rollout, and gradients however a step is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config.schema import PPOConfig, RunConfig
from tandem.config.updates import num_updates
from tandem.data.render import Renderer
from tandem.errors import ConfigError, GenerationError, NumericsError
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.ops import native
from tandem.training.make_engine import make_engine
from tandem.training.minibatches import minibatches
from tandem.training.ppo import notes_on_kl
from tandem.training.ppo_trainer import PPOTrainer
from tandem.types import Experience, Message, PromptRow
from tests.tiny import tiny_config
from tests.training.letter_rewards import early_letters


def make(model: str, folder: Path, **changes: object) -> tuple[PPOTrainer, list[PromptRow]]:
    torch.manual_seed(0)
    config: RunConfig = tiny_config(folder, model, "unused", **changes)
    engine = make_engine(actor=model, config=config)
    renderer = Renderer(load_tokenizer(model))
    prompts = [
        renderer.prompt([Message("user", f"Say the word {word}.")])
        for word in ("cat", "elephant", "sun", "green", "a", "house", "yes", "nineteen")
    ]
    return PPOTrainer(engine, config, num_steps=10, reward_function=early_letters), prompts


@pytest.fixture
def experience(tiny_model: str, tmp_path: Path) -> tuple[PPOTrainer, Experience]:
    trainer, prompts = make(tiny_model, tmp_path)
    return trainer, trainer.generate_experience(prompts, step=1)


def test_first_rollout_is_the_reference_and_agrees_with_the_sampler(
    experience: tuple[PPOTrainer, Experience],
) -> None:
    trainer, made = experience
    # The sampler's log-probs served as the old ones: decoding and a forward give the same bits
    # with the C++ operations, and nearly so without.
    assert made.metrics["old_logprobs_sampled"] == 1.0
    assert made.metrics["kl"] == (0.0 if native.available() else pytest.approx(0, abs=1e-4))
    assert trainer.engine.agreement is not None
    assert trainer.engine.agreement.bitwise or not native.available()
    assert "old log-probs: the sampler's" in trainer.engine.describe()
    mask = made.batch.response_mask
    assert not made.old_logprobs[~mask].any()
    assert bool((made.old_logprobs[mask] < 0).all())
    assert made.advantages[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert made.advantages[mask].std(correction=0).item() == pytest.approx(1, abs=1e-5)


def test_what_a_loop_hands_over_wrongly_is_told_in_one_line(
    experience: tuple[PPOTrainer, Experience],
) -> None:
    trainer, made = experience
    engine, config = trainer.engine, trainer.config
    given: Any
    for match, given in (
        (r"engine must be an RLHFEngine; got RunConfig\. Write", (config, engine)),
        (r"engine must be an RLHFEngine; got str\. Write", ("a-model", config)),
        (r"config must be a RunConfig; got dict\. Use", (engine, {"seed": 1})),
        (r"config must be a RunConfig; got the class RunConfig\. Use", (engine, RunConfig)),
    ):
        with pytest.raises(ConfigError, match=match):
            PPOTrainer(*given, reward_function=early_letters)
    given = early_letters
    with pytest.raises(ConfigError, match=r"source must have a method collect.*; got function\."):
        PPOTrainer(engine, config, reward_function=early_letters, source=given)
    given = made.rollout
    with pytest.raises(ConfigError, match=r"must get an Experience; got Rollout\. Pass what"):
        trainer.train_rlhf(given, step=1)


def test_old_logprobs_equal_hugging_faces_own_forward_row_by_row(
    experience: tuple[PPOTrainer, Experience],
) -> None:
    trainer, made = experience
    for i in range(len(made)):
        n = int(made.batch.attention_mask[i].sum())
        ids = made.batch.token_ids[i, :n]
        with torch.no_grad():
            logits = trainer.engine.actor(ids[None]).logits[0]
        expected = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None]).squeeze(1)
        chosen = made.batch.response_mask[i, 1:n]
        torch.testing.assert_close(
            made.old_logprobs[i, 1:n][chosen], expected[chosen], atol=1e-5, rtol=1e-5
        )


def test_response_is_one_run_of_tokens_that_ends_the_row_with_its_eos(
    experience: tuple[PPOTrainer, Experience],
) -> None:
    _, made = experience
    for i in range(len(made)):
        n = int(made.batch.attention_mask[i].sum())
        prompt = len(made.rollout.prompts[i])
        assert made.batch.response_mask[i].nonzero().flatten().tolist() == list(range(prompt, n))
        stop = made.batch.token_ids[i, n - 1].item()
        assert made.rollout.finished[i].item() == (stop == trainer_stop(experience))


def trainer_stop(experience: tuple[PPOTrainer, Experience]) -> int:
    return experience[0].engine.renderer.terminator_id


def test_reward_sits_at_the_last_token_and_returns_add_up(
    experience: tuple[PPOTrainer, Experience],
) -> None:
    trainer, made = experience
    torch.testing.assert_close(made.rewards.sum(dim=1), made.scores)  # KL is 0 here
    last = made.batch.attention_mask.sum(dim=1) - 1
    at_last = made.rewards.gather(1, last[:, None]).squeeze(1)
    torch.testing.assert_close(at_last, made.scores)
    penalty = trainer.config.ppo.missing_eos_penalty * (~made.rollout.finished).float()
    plain = torch.tensor(early_letters([], list(made.rollout.responses)))
    torch.testing.assert_close(made.scores, plain - penalty)


def test_ratio_is_1_before_the_first_update_and_an_experience_is_not_changed(
    experience: tuple[PPOTrainer, Experience],
) -> None:
    trainer, made = experience
    before = {name: getattr(made, name).clone() for name in ("old_logprobs", "values", "rewards")}
    metrics = trainer.train_rlhf(made, step=1)
    assert metrics["ratio_gap_before_update"] < 1e-5
    assert metrics["policy_kl_before_update"] < 1e-8
    assert metrics["updates"] == num_updates(trainer.config, 1) == 4
    assert metrics["ratio_max"] > 1.0
    for name, value in before.items():
        assert torch.equal(getattr(made, name), value)
    again = trainer.generate_experience(list(made.rollout.prompts), step=1)
    assert again.metrics["kl"] != 0.0


def test_an_experience_is_learned_from_once(experience: tuple[PPOTrainer, Experience]) -> None:
    trainer, made = experience
    trainer.train_rlhf(made, step=1)
    with pytest.raises(NumericsError, match=r"updated since it answered\. .* experience once"):
        trainer.train_rlhf(made, step=2)
    with pytest.raises(GenerationError, match=r"must be a PromptRow; got str\. Render it: "):
        trainer.generate_experience(["Hello"], step=2)  # type: ignore[list-item]


def test_a_policy_that_differs_from_itself_stops_the_run(tiny_model: str, tmp_path: Path) -> None:
    trainer, prompts = make(tiny_model, tmp_path)
    made = trainer.generate_experience(prompts, step=1)
    shifted = replace(made, old_logprobs=made.old_logprobs - 0.01 * made.batch.response_mask)
    weights = [p.detach().clone() for p in trainer.engine.actor.parameters()]
    with pytest.raises(NumericsError, match="the policy ratio before the first update must be 1"):
        trainer.train_rlhf(shifted, step=1)
    assert all(
        torch.equal(p, w) for p, w in zip(trainer.engine.actor.parameters(), weights, strict=True)
    )


def test_dropout_is_named_when_it_makes_the_ratio_differ(tiny_model: str, tmp_path: Path) -> None:
    trainer, prompts = make(tiny_model, tmp_path, dropout=0.5)
    made = trainer.generate_experience(prompts, step=1)
    with pytest.raises(NumericsError, match="dropout is on"):
        trainer.train_rlhf(made, step=1)


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_weights_after_a_step_do_not_depend_on_micro_batches(
    tiny_model: str, tmp_path: Path, kl_in: str
) -> None:
    """One row at a time, two widths of micro-batch, all at once: the same update."""
    after = []
    for micro in (1, 150, 100_000):
        changes = {
            "micro_batch_tokens": micro,
            "ppo__kl_in": kl_in,
            "ppo__kl_coef": 0.3,
            "ppo__entropy_coef": 0.1,
            "ppo__minibatch_size": 8,
        }
        trainer, prompts = make(tiny_model, tmp_path, **changes)
        for step in (1, 2):
            made = trainer.generate_experience(prompts, step=step)
            trainer.train_rlhf(made, step=step)
        after.append(torch.cat([p.detach().flatten() for p in trainer.engine.actor.parameters()]))
    torch.testing.assert_close(after[0], after[2], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(after[1], after[2], atol=2e-5, rtol=1e-4)


def test_gradient_equals_one_written_by_hand_with_hugging_face(
    tiny_model: str, tmp_path: Path
) -> None:
    """The first update's gradient is -sum A grad log p / tokens, from plain HF logits."""
    trainer, prompts = make(tiny_model, tmp_path, ppo__minibatch_size=8, ppo__epochs=1)
    made = trainer.generate_experience(prompts, step=1)
    reference = load_causal_lm(tiny_model)
    loss = torch.zeros(())
    for i in range(len(made)):
        n = int(made.batch.attention_mask[i].sum())
        ids, chosen = made.batch.token_ids[i, :n], made.batch.response_mask[i, :n]
        logprobs = torch.log_softmax(reference(ids[None]).logits[0, :-1], dim=-1)
        picked = logprobs.gather(1, ids[1:, None]).squeeze(1)
        loss = loss - (made.advantages[i, 1:n] * picked)[chosen[1:]].sum()
    (loss / made.batch.num_response_tokens).backward()
    expected = torch.sqrt(sum(p.grad.square().sum() for p in reference.parameters()))
    metrics = trainer.train_rlhf(made, step=1)
    assert metrics["actor_grad_norm"] == pytest.approx(expected.item(), rel=1e-4)


def test_early_stop_and_critic_warmup(tiny_model: str, tmp_path: Path) -> None:
    trainer, prompts = make(
        tiny_model, tmp_path, ppo__early_stop_kl=1e-9, ppo__epochs=4, ppo__critic_warmup_steps=1
    )
    actor = [p.detach().clone() for p in trainer.engine.actor.parameters()]
    metrics = trainer.train_rlhf(trainer.generate_experience(prompts, step=1), step=1)
    assert "policy_loss" not in metrics
    assert metrics["epochs_done"] == 4
    same = zip(trainer.engine.actor.parameters(), actor, strict=True)
    assert all(torch.equal(now, before) for now, before in same)
    made = trainer.generate_experience(prompts, step=2)
    metrics = trainer.train_rlhf(made, step=2)
    per_pass = len(list(minibatches(trainer.config, made, step=2))) / 4
    assert 0 < metrics["epochs_done"] == metrics["updates"] / per_pass < 4


def test_adaptive_kl_coefficient_moves_towards_its_target(tiny_model: str, tmp_path: Path) -> None:
    trainer, prompts = make(tiny_model, tmp_path, ppo__kl_coef_target=5.0, ppo__kl_horizon=8)
    trainer.train_rlhf(trainer.generate_experience(prompts, step=1), step=1)
    assert trainer.kl_coef == pytest.approx(0.05 * 0.8)  # KL 0 is far under 5: less penalty


def test_samples_do_not_depend_on_the_batch_they_are_drawn_in(
    tiny_model: str, tmp_path: Path
) -> None:
    trainer, prompts = make(tiny_model, tmp_path, sampling__samples_per_prompt=2)
    numbers = list(range(8))
    whole = trainer.generate_experience(prompts, step=3, numbers=numbers).rollout
    alone = trainer.generate_experience(prompts[5:6], step=3, numbers=[5]).rollout
    assert whole.responses[10:12] == alone.responses
    assert whole.responses[10] != whole.responses[11]


def test_lora_reference_is_the_base_and_costs_no_copy(tiny_model: str, tmp_path: Path) -> None:
    trainer, prompts = make(tiny_model, tmp_path, lora__rank=4)
    engine = trainer.engine
    assert engine.reference is None
    base = load_causal_lm(tiny_model)
    for step in (1, 2):
        made = trainer.generate_experience(prompts, step=step)
        trainer.train_rlhf(made, step=step)
    row = made.batch.token_ids[0, : int(made.batch.attention_mask[0].sum())]
    with torch.no_grad():
        expected = torch.log_softmax(base(row[None]).logits[0, :-1], -1)
    picked = expected.gather(1, row[1:, None]).squeeze(1)
    chosen = made.batch.response_mask[0, 1 : len(row)]
    torch.testing.assert_close(
        made.ref_logprobs[0, 1 : len(row)][chosen], picked[chosen], atol=1e-5, rtol=1e-5
    )
    assert made.metrics["kl"] != 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_a_small_policy_learns_a_simple_rule(tiny_model: str, tmp_path: Path, seed: int) -> None:
    """Share of letters a to m in the answer, from a random policy, within 25 rollouts."""
    trainer, prompts = make_learner(tiny_model, tmp_path, seed)
    rewards = []
    for step in range(1, 26):
        made = trainer.generate_experience(prompts, step=step)
        rewards.append(made.metrics["reward"])
        trainer.train_rlhf(made, step=step)
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert first < 0.5
    assert last > first + 0.3


def make_learner(model: str, folder: Path, seed: int) -> tuple[PPOTrainer, list[PromptRow]]:
    """A trainer whose only reward is the rule, at a learning rate for a tiny model."""
    config = tiny_config(folder, model, "unused", seed=seed)
    config = replace(
        config,
        ppo=replace(
            config.ppo,
            epochs=PPOConfig().epochs,
            minibatch_size=PPOConfig().minibatch_size,
            kl_coef=0.0,
            missing_eos_penalty=0.0,
            early_stop_kl=0.0,
            actor=replace(config.ppo.actor, learning_rate=3e-3, schedule="constant"),
            critic=replace(config.ppo.critic, learning_rate=3e-3, schedule="constant"),
        ),
        sampling=replace(config.sampling, samples_per_prompt=8),
    )
    engine = make_engine(actor=model, config=config)
    renderer = Renderer(load_tokenizer(model))
    prompts = [renderer.prompt([Message("user", f"Say {n}.")]) for n in range(8)]
    return PPOTrainer(engine, config, num_steps=25, reward_function=early_letters), prompts


def test_old_logprobs_by_a_forward_are_the_samplers(tiny_model: str, tmp_path: Path) -> None:
    made = []
    for source in ("sampler", "forward"):
        trainer, prompts = make(tiny_model, tmp_path, ppo__old_logprobs=source)
        made.append(trainer.generate_experience(prompts, step=1))
    ours, forward = made
    assert (ours.metrics["old_logprobs_sampled"], forward.metrics["old_logprobs_sampled"]) == (1, 0)
    assert torch.allclose(ours.old_logprobs, forward.old_logprobs, atol=1e-5)
    assert forward.metrics["rollout_gap"] == (
        0.0 if native.available() else pytest.approx(0, abs=1e-5)
    )
    largest = forward.metrics["rollout_gap_max"]
    assert forward.metrics["rollout_gap"] <= largest <= (0.0 if native.available() else 1e-4)
    assert ours.metrics["entropy"] == pytest.approx(forward.metrics["entropy"], abs=1e-5)


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"sampling__regex": "yes|no"}, "(--sampling.regex)"),
        ({"sampling__json_schema": "{}"}, "(--sampling.json-schema)"),
        ({"sampling__top_p": 0.5, "sampling__regex": "a"}, "(--sampling.top-p 0.5, --sampling.reg"),
    ],
)
def test_a_kl_along_answers_that_are_drawn_otherwise_is_noted(
    knobs: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, "model", "data.jsonl", **knobs)
    (note,) = notes_on_kl(config, has_reference=True)
    assert named in note
    assert list(notes_on_kl(config, has_reference=False)) == []
