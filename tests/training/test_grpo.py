"""The stage grpo: every preset, what is skipped, dynamic sampling, and the same run again."""

from __future__ import annotations

import _thread
import json
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tandem.cli import main
from tandem.config.grpo import PRESETS
from tandem.config.load import build_config, check_config, dump_config
from tandem.config.schema import RunConfig
from tandem.config.scoring import weighted_models
from tandem.engine.scoring import RewardScorer
from tandem.errors import ConfigError
from tandem.metrics.names import find_metric
from tandem.models.modes import evaluating
from tandem.models.save import save_model
from tandem.models.scalar import load_scalar_model, set_normalization
from tandem.objectives.advantages import critic_free_advantages
from tandem.ops import native
from tandem.parallel.world import World
from tandem.plan.run import plan_memory
from tandem.training import ppo_trainer
from tandem.training.algorithm import Algorithm
from tandem.training.answering import Answering
from tandem.training.make_engine import make_engine
from tandem.training.minibatches import minibatches
from tandem.training.ppo import more_prompts
from tandem.training.ppo_trainer import PPOTrainer
from tandem.training.replay import replay
from tandem.types import Experience, PromptRow, Source, TokenBatch, TokenRow
from tests.ranks import on_ranks
from tests.tiny import tiny_config, tiny_llama
from tests.training import letter_rewards
from tests.training.runs import CLOCK, assert_equal_runs, ran, ran_with_stops, ranks_ran, records

WORDS = ("cat", "elephant", "sun", "green", "a", "house", "yes", "nineteen", "tree", "on")
REWARD = f"{letter_rewards.__file__}:starts_early"


def config_of(folder: Path, model: str, **changes: Any) -> RunConfig:
    """A run of the stage alone; `grpo` and `sampling` replace single knobs of those."""
    grpo: dict[str, Any] = {
        "steps": 3,
        "prompts_per_step": 6,
        "minibatch_size": 12,
        "eval_prompts": 4,
        "reward_function": REWARD,
        "actor": {"learning_rate": 3e-3, "schedule": "constant", "warmup": 0.0},
    }
    sampling = {"max_new_tokens": 8, "samples_per_prompt": 4}
    return build_config(
        {
            "stages": ["grpo"],
            "actor_model": model,
            "output_dir": str(folder),
            "save_every": 1,
            "log": {"tensorboard": False},
            **{name: value for name, value in changes.items() if name not in ("grpo", "sampling")},
            "grpo": grpo | changes.get("grpo", {}),
            "sampling": sampling | changes.get("sampling", {}),
        }
    )


def trainer_of(config: RunConfig, **more: Any) -> tuple[PPOTrainer, list[PromptRow]]:
    engine = make_engine(config, config.actor_model)
    prompts = [engine.renderer.prompt(f"Say {word}.") for word in WORDS]
    trainer = PPOTrainer(
        engine, config, num_steps=3, reward_function=letter_rewards.starts_early, **more
    )
    return trainer, prompts


def weights_of(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.engine.actor.named_parameters()}


def test_scores_of_any_size_are_compared_as_they_are(tiny_model: str, tmp_path: Path) -> None:
    def points(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [60.0 + len(text) for text in completions]

    config = config_of(tmp_path, tiny_model)
    engine = make_engine(config, config.actor_model)
    trainer = PPOTrainer(engine, config, num_steps=3, reward_function=points)
    made = trainer.generate_experience([engine.renderer.prompt(f"Say {w}.") for w in WORDS], step=1)
    assert made.scores.tolist() == points([], list(made.rollout.responses))
    assert made.metrics["reward_clipped"] == 0
    assert made.advantages.any()


@pytest.mark.parametrize("algorithm", list(PRESETS))
def test_every_preset_trains_with_the_models_that_it_needs_alone(
    algorithm: str, tiny_model: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, tiny_model, grpo={"algorithm": algorithm})
    trainer, prompts = trainer_of(config)
    engine = trainer.engine
    assert list(engine.learners) == ["actor"]
    assert (engine.critic, engine.scorer) == (None, None)
    assert (engine.reference is None) == (config.grpo.kl == "none")
    before = weights_of(trainer)
    for step in (1, 2):
        made = trainer.generate_experience(prompts[:6], step=step)
        metrics = trainer.train_rlhf(made, step=step)
        assert metrics["ratio_gap_before_update"] < 1e-6
        assert metrics["updates"] >= 1
        assert 0 <= made.metrics["groups_without_signal"] < 1
    after = weights_of(trainer)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    plan = plan_memory(config, "grpo", tiny_llama(64).config)
    roles = {name.split(":")[0] for name in plan.resting}
    assert roles == {"actor"} | ({"reference"} if config.grpo.has_reference else set())


def learned(config: RunConfig, made: Experience | None = None) -> tuple[Experience, dict[str, Any]]:
    """One step from the same start; the experience, and the gradient-moved weights."""
    trainer, prompts = trainer_of(config)
    made = made or trainer.generate_experience(prompts[:6], step=1)
    metrics = trainer.train_rlhf(made, step=1)
    return made, {"weights": weights_of(trainer), **metrics}


@pytest.mark.parametrize("algorithm", ["grpo", "dr-grpo", "gspo", "cispo"])
def test_groups_without_signal_are_not_read_and_change_nothing(
    algorithm: str, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        tmp_path, tiny_model, seed=5,
        grpo={"algorithm": algorithm, "minibatch_size": 24, "epochs": 2, "cispo_max_ratio": 1.01},
    )  # fmt: skip
    made, skipping = learned(config)
    flat = made.metrics["groups_without_signal"]
    assert 0 < flat < 1
    assert skipping["answers_learned"] == pytest.approx(1 - flat)
    monkeypatch.setattr(Algorithm, "skips_without_signal", lambda self: False)
    _, reading = learned(config, made)
    assert reading["answers_learned"] == 1.0
    for name, value in reading["weights"].items():
        torch.testing.assert_close(skipping["weights"][name], value, atol=2e-5, rtol=1e-4)
    assert skipping["policy_loss"] == pytest.approx(reading["policy_loss"], abs=1e-6)
    assert reading["clip_fraction"] > 0
    for name in ("clip_fraction", "clip_fraction_low", "clip_fraction_high"):
        assert skipping[name] == pytest.approx(reading[name], abs=1e-6)
    assert skipping["actor_grad_norm"] == pytest.approx(reading["actor_grad_norm"], rel=1e-4)


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_micro_batches_do_not_change_the_gradient(
    normalization: str, tiny_model: str, tmp_path: Path
) -> None:
    knobs = {"normalization": normalization, "kl": "k2-in-loss", "kl_coef": 0.1}
    config = config_of(tmp_path, tiny_model, grpo=knobs)
    made, whole = learned(config)
    _, cut = learned(replace(config, micro_batch_tokens=40), made)
    assert cut["actor_grad_norm"] == pytest.approx(whole["actor_grad_norm"], rel=1e-4)
    for name in ("policy_loss", "kl_loss", "policy_kl", "ratio_mean"):
        assert cut[name] == pytest.approx(whole[name], abs=1e-5), name


def test_cut_answers_leave_the_loss_and_stay_in_the_statistics(
    tiny_model: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, tiny_model, grpo={"overlong_filter": True, "epochs": 2})
    trainer, prompts = trainer_of(config)
    made = trainer.generate_experience(prompts[:6], step=1)
    assert made.in_loss is not None
    assert made.in_loss.tolist() == made.rollout.finished.tolist()
    everyone = replace(made, in_loss=torch.ones_like(made.in_loss))
    assert len(everyone) == 24
    seen = [rows for _, rows in minibatches(trainer.config, made, step=1)]
    kept = made.in_loss.nonzero().flatten().tolist()
    assert sorted(torch.cat(seen).tolist() if seen else []) == sorted(kept * 2)
    none = replace(made, in_loss=torch.zeros_like(made.in_loss))
    before = weights_of(trainer)
    metrics = trainer.train_rlhf(none, step=1)
    assert "updates" not in metrics
    assert (metrics["answers_learned"], metrics["epochs_done"]) == (0, 0)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())


def test_whitened_advantages_are_measured_before(tiny_model: str, tmp_path: Path) -> None:
    grpo = {"algorithm": "reinforce++", "kl_coef": 0.0}
    trainer, prompts = trainer_of(config_of(tmp_path, tiny_model, grpo=grpo))
    made = trainer.generate_experience(prompts[:6], step=1)
    mask = made.batch.response_mask
    before = critic_free_advantages(
        made.rewards, made.group, mask, baseline=trainer.rl.baseline, scale="none"
    )
    assert made.metrics["advantage_mean"] == pytest.approx(float(before[mask].mean()))
    assert made.metrics["advantage_std"] == pytest.approx(float(before[mask].std(correction=0)))
    expected = critic_free_advantages(
        made.rewards, made.group, mask, baseline=trainer.rl.baseline, scale="whiten"
    )
    assert torch.equal(made.advantages, expected)
    assert float(made.advantages[mask].std()) == pytest.approx(1)


def test_no_step_is_taken_where_no_answer_has_a_gradient(tiny_model: str, tmp_path: Path) -> None:
    """Momentum would move the weights otherwise."""
    trainer, prompts = trainer_of(config_of(tmp_path, tiny_model))
    trainer.train_rlhf(trainer.generate_experience(prompts[:6], step=1), step=1)
    made = trainer.generate_experience(prompts[:6], step=2)
    half = torch.arange(len(made))[:, None] < len(made) // 2
    before = weights_of(trainer)
    flat = replace(made, advantages=torch.zeros_like(made.advantages))
    metrics = trainer.train_rlhf(flat, step=2)
    assert metrics["answers_learned"] == 0
    assert "updates" not in metrics
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())
    ones = torch.where(half, made.batch.response_mask.float(), 0.0)  # one minibatch of two, or both
    metrics = trainer.train_rlhf(replace(made, advantages=ones), step=2)
    assert metrics["updates"] >= 1
    assert metrics["ratio_gap_before_update"] < 1e-6, "the first that learns is compared"


def test_dynamic_sampling_fills_up_with_other_prompts(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the others are drawn, or in rollouts of their own: the same answers either way."""
    config = config_of(tmp_path, tiny_model, grpo={"sampling_rounds": 5}, seed=5)
    plain, prompts = trainer_of(replace(config, grpo=replace(config.grpo, sampling_rounds=1)))
    first = plain.generate_experience(prompts[:6], step=1)
    assert first.metrics["groups_without_signal"] > 0
    trainer, prompts = trainer_of(config)
    trainer.answering.more_prompts = lambda step, taken, count: more_prompts(
        prompts, config.seed, step, taken, count
    )
    made = trainer.generate_experience(prompts[:6], step=1)
    assert trainer.answering._can_refill()
    assert 1 < made.metrics["sampling_rounds"] <= 10 / 6
    monkeypatch.setattr(Answering, "_can_refill", lambda self: False)
    rounds = trainer.generate_experience(prompts[:6], step=1)
    assert torch.equal(rounds.batch.token_ids, made.batch.token_ids)
    assert rounds.metrics.pop("reward_seconds/starts_early") >= 0
    assert rounds.metrics == {
        name: pytest.approx(value)
        for name, value in made.metrics.items()
        if name != "reward_seconds/starts_early"
    }
    monkeypatch.undo()
    for group in made.group.unique():
        scores = made.scores[made.group == group]
        assert len(scores) == 4
        assert scores.min() < scores.max()
    names = [id(prompt) for prompt in made.rollout.prompts[::4]]
    assert len(set(names)) == len(names) <= 6
    assert made.metrics["groups_without_signal"] > 0, "the report is of all answers"
    assert made.metrics["reward"] != pytest.approx(float(made.scores.mean()))
    again = trainer.generate_experience(prompts[:6], step=1)
    assert torch.equal(again.batch.token_ids, made.batch.token_ids)
    alone = trainer_of(config)[0].generate_experience(prompts[:6], step=1)
    assert alone.metrics["sampling_rounds"] == 1, "without a source of prompts it makes do"


def test_an_engine_must_fit_the_algorithm(tiny_model: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_model, grpo={"algorithm": "rloo"})
    reward = letter_rewards.starts_early
    with pytest.raises(ConfigError, match="must get has_critic=False"):
        make_engine(config, tiny_model, has_critic=True)
    engine = make_engine(replace(config, stages=("ppo",)), tiny_model)
    with pytest.raises(ConfigError, match="must get no critic"):
        PPOTrainer(engine, config, reward_function=reward)
    engine = make_engine(config, tiny_model, has_critic=False, has_reference=False)
    with pytest.raises(ConfigError, match=r"grpo.kl_coef must be 0 without a reference; got 0.03"):
        PPOTrainer(engine, config, reward_function=reward)


def forward_logprobs(trainer: PPOTrainer, made: Experience) -> torch.Tensor:
    """(B, T) what the training forward gives the sampled tokens."""
    with torch.no_grad(), evaluating(trainer.engine.actor):
        return trainer.engine.actor_logprobs(made.batch, with_entropy=False)[0]


def test_lora_leaves_the_base_as_it_is_and_samples_from_the_adapter(
    tiny_model: str, tmp_path: Path
) -> None:
    config = config_of(
        tmp_path,
        tiny_model,
        lora={"rank": 4},
        grpo={"minibatch_size": 8, "actor": {"lora_learning_rate": 1e-2, "warmup": 0.0}},
        sampling={"max_new_tokens": 4},
    )
    trainer, prompts = trainer_of(config)
    start = weights_of(trainer)
    base = {name for name in start if "lora_" not in name}
    assert base != start.keys()
    for step in range(1, 26):
        made = trainer.generate_experience(prompts[:2], step=step)
        forward = forward_logprobs(trainer, made)
        if native.available():
            assert torch.equal(made.rollout.rollout_logprobs, forward), step
        torch.testing.assert_close(made.rollout.rollout_logprobs, forward)
        metrics = trainer.train_rlhf(made, step=step)
        assert metrics.get("ratio_gap_before_update", 0.0) < 1e-6, step
    end = weights_of(trainer)
    assert all(torch.equal(end[name], start[name]) for name in base)
    moved = trainer.engine.rollout(prompts[:2], step=1).rollout_logprobs
    untouched = trainer_of(config)[0].engine.rollout(prompts[:2], step=1).rollout_logprobs
    assert moved.shape != untouched.shape or not torch.equal(moved, untouched)


def test_a_run_stopped_in_the_middle_is_the_same_run_and_replays(
    tiny_model: str, preferences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    knobs = {"algorithm": "dapo", "kl": "k1-in-reward", "kl_coef": 0.05, "ema": True}
    config = config_of(
        tmp_path / "straight", tiny_model, data=[preferences], grpo=knobs, save_async=False
    )
    straight = ran(config)
    lines = ran_with_stops(config, tmp_path / "stopped", [("grpo", 2), ("grpo", 3)])
    assert any("grpo: continuing after step 2" in line for line in lines)
    assert any("grpo: dapo: 4 samples per prompt, baseline group-mean" in line for line in lines)
    assert_equal_runs(tmp_path / "stopped", straight)
    steps = [record["values"] for record in records(straight) if record["step"] > 0]
    assert all("sampling_rounds" in values and "kl" in values for values in steps)
    assert "explained_variance" not in steps[0]
    refilled = [step for step, values in enumerate(steps, 1) if values["sampling_rounds"] > 1]
    assert refilled, "else no step shows that further prompts come again"
    for step in refilled:
        assert replay(str(straight), step) == 0
        assert f"grpo step {step}, again" in capsys.readouterr().out
    evaluation = json.loads((straight / "evaluation.json").read_text("utf-8"))
    assert set(evaluation["models"]) == {"base", "grpo", "grpo-ema"}


def answers_of_hugging_face(world: World, config: RunConfig) -> tuple[str, ...]:
    engine = make_engine(config, config.actor_model, world=world)
    return engine.rollout([engine.renderer.prompt("Say cat.")], step=1).responses


def test_a_rank_without_a_prompt_does_not_wait_for_anothers_generate(
    tiny_model: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, tiny_model, hybrid_engine=False, parallel={"actor_zero_stage": 3})
    first, second = on_ranks(2, answers_of_hugging_face, config)
    assert first == second == answers_of_hugging_face(World(), config)


@pytest.mark.parametrize("algorithm", ["reinforce++-baseline", "dapo"])
def test_ranks_have_the_statistics_of_one_process(
    tiny_model: str, preferences: str, tmp_path: Path, algorithm: str
) -> None:
    """The one with two reward models, on the host over ranks. With DAPO one process refills its
    running generation, and two ranks answer in rounds."""
    more: dict[str, Any] = {"grpo": {"algorithm": algorithm, "steps": 2, "eval_prompts": 2}}
    if algorithm != "dapo":
        save_reward_models(tiny_model, tmp_path)
        more["grpo"] |= {"normalization": "sequence", "reward_function": []}
        more["reward_model"] = str(tmp_path / "helpful")
        more["scoring"] = {"reward_models": [f"{tmp_path / 'harmless'}:0.5"]}
    config = config_of(tmp_path / "one", tiny_model, data=[preferences], **more)
    one = ran(config)
    two = replace(config, output_dir=str(tmp_path / "two"))
    if algorithm != "dapo":
        two = replace(two, parallel=replace(two.parallel, offload=("reward",)))
    on_ranks(2, ranks_ran, two)
    expected = {"dapo": "sampling_rounds"}.get(algorithm, "reward_std/reward_model.harmless")
    values = [record["values"] for record in records(one) if record["step"] > 0]
    assert max(step[expected] for step in values) > (algorithm == "dapo")
    unlike = (*CLOCK, "rank_")
    for ours, theirs in zip(records(tmp_path / "two", unlike), records(one, unlike), strict=True):
        assert ours["values"] == pytest.approx(theirs["values"], rel=2e-3, abs=2e-4)


def test_after_sft_by_the_command_line(
    tiny_model: str, preferences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, tiny_model, preferences, dataset__split=[])
    grpo = config_of(tmp_path, tiny_model).grpo
    config = replace(
        config, grpo=replace(grpo, steps=1), sampling=replace(config.sampling, samples_per_prompt=2)
    )
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config), "utf-8")
    folder = tmp_path / "both"
    flags = ["--config", str(file), "--output-dir", str(folder)]
    assert main(["train", *flags, "--stages", "sft,grpo"]) == 0
    assert "grpo: grpo: 2 samples per prompt, baseline group-mean" in capsys.readouterr().out
    made_from = json.loads((folder / "grpo/MANIFEST.json").read_text("utf-8"))["facts"]["made_from"]
    assert "the sft stage" in made_from
    assert "the reward function" in made_from
    assert load_file(folder / "grpo/actor/model.safetensors")
    assert not (folder / "grpo/critic").exists()
    assert main(["train", *flags, "--stages", "grpo", "--grpo.clip-high", "0.3"]) == 2
    assert "grpo.clip_high 0.2 -> 0.3" in capsys.readouterr().err


def save_reward_models(model: str, folder: Path) -> None:
    """Two in folders of their names, with random heads and normalizations of their own."""
    for seed, name in enumerate(("helpful", "harmless")):
        torch.manual_seed(seed)
        scalar = load_scalar_model(model, seed=seed)
        set_normalization(scalar, float(seed), 2.0)
        save_model(scalar, AutoTokenizer.from_pretrained(model), folder / name)


def test_several_reward_models_score_beside_each_other(tiny_model: str, tmp_path: Path) -> None:
    save_reward_models(tiny_model, tmp_path)
    config = config_of(
        tmp_path / "run",
        tiny_model,
        grpo={"reward_function": []},
        scoring={"reward_models": [f"{tmp_path / 'harmless'}:-0.5"], "combine": "group"},
    )
    check_config(config)
    engine = make_engine(config, tiny_model, reward_model=tmp_path / "helpful")
    trainer = PPOTrainer(engine, config, num_steps=3)
    prompts = [engine.renderer.prompt(f"Say {word}.") for word in WORDS[:6]]
    made = trainer.generate_experience(prompts, step=1)
    assert engine.scorer is not None
    assert [other.weight for other in engine.scorer.ensemble.others] == [-0.5]
    assert engine.scorer.note_on_units() == ""
    set_normalization(engine.scorer.ensemble.others[0].scorer.model, 0.0, 1.0)
    assert engine.scorer.note_on_units().startswith(
        "reward_model.harmless: raw scores, in units of"
    )
    alone = make_engine(
        config_of(tmp_path, tiny_model), tiny_model, reward_model=tmp_path / "harmless"
    )
    assert alone.scorer is not None
    raw = alone.scorer.raw(made.rollout, engine.renderer)
    expected = float(((raw - 1.0) / 2.0).mean())
    assert made.metrics["reward_mean/reward_model.harmless"] == pytest.approx(expected, abs=1e-6)
    mean = made.metrics["reward_mean/reward_model"] - 0.5 * expected
    assert made.metrics["reward_before_penalty"] == pytest.approx(mean, abs=1e-5)
    assert trainer.train_rlhf(made, step=1)["updates"] >= 1


@pytest.mark.parametrize(("stage", "rounds"), [("grpo", 1), ("grpo", 2), ("online-dpo", 1)])
def test_a_reward_model_that_fails_on_answers_is_told_in_one_line_a_step(
    tiny_model: str,
    preferences: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    rounds: int,
) -> None:
    """With sampling rounds, of all that the step answered together; of evaluations too."""
    save_reward_models(tiny_model, tmp_path)
    raw = RewardScorer.raw_batch

    def failing(self: RewardScorer, batch: TokenBatch) -> torch.Tensor:
        scores = raw(self, batch)
        if not self.ensemble.others:  # the one beside the first
            scores[0] = torch.nan
        return scores

    monkeypatch.setattr(RewardScorer, "raw_batch", failing)
    config = config_of(
        tmp_path / "run",
        tiny_model,
        data=[preferences],
        stages=[stage],
        grpo={"reward_function": [], "sampling_rounds": rounds, "steps": 2, "eval_every": 1},
        ppo={"prompts_per_step": 6, "steps": 2, "eval_prompts": 4, "eval_every": 1},
        reward_model=str(tmp_path / "helpful"),
        scoring={"reward_models": [f"{tmp_path / 'harmless'}:0.5"]},
    )
    lines: list[str] = []
    found = records(ran(config, lines=lines))
    told = [line for line in lines if " no finite score: " in line]
    trained = [line for line in told if "held-out" not in line]
    assert len(trained) == 2
    for line, record in zip(trained, found[1:], strict=True):
        failed = int(record["values"]["reward_failures/result"])
        assert line.startswith(f"reward model harmless gave {failed} of ")
        assert line.endswith(f" answers no finite score: {failed} left out")
    assert len(told) - len(trained) == 5, "evaluations before and after steps, two models compared"


def test_the_lowest_of_several_models_scores_rewards_and_another_is_watched(
    tiny_model: str, tmp_path: Path
) -> None:
    save_reward_models(tiny_model, tmp_path)
    other = f"{tmp_path / 'harmless'}"

    def made(config: RunConfig, reward_model: Path) -> Experience:
        check_config(config)
        engine = make_engine(config, tiny_model, reward_model=reward_model)
        prompts = [engine.renderer.prompt(f"Say {word}.") for word in WORDS[:6]]
        return PPOTrainer(engine, config, num_steps=3).generate_experience(prompts, step=1)

    plain: dict[str, Any] = {"grpo": {"reward_function": []}}
    first, second = (
        made(config_of(tmp_path / "alone", tiny_model, **plain), tmp_path / name).scores
        for name in ("helpful", "harmless")
    )
    scoring = {"reward_models": [other], "ensemble": "worst-case"}
    both = made(
        config_of(tmp_path / "both", tiny_model, **plain, scoring=scoring), tmp_path / "helpful"
    )
    assert not torch.equal(first, second)
    torch.testing.assert_close(both.scores, torch.minimum(first, second))
    expected = float((first - second).abs().mean()) / 2
    assert both.metrics["reward_model_disagreement"] == pytest.approx(expected, abs=1e-5)
    watching = {"reward_models": [f"{other}:0"]}
    watched = made(
        config_of(tmp_path / "watched", tiny_model, **plain, scoring=watching), tmp_path / "helpful"
    )
    torch.testing.assert_close(watched.scores, first)
    assert watched.metrics["reward_watched"] == pytest.approx(float(second.mean()), abs=1e-5)
    assert "reward_model_disagreement" not in watched.metrics


def test_of_rewards_normalized_by_group_the_return_keeps_penalties_and_kl(
    tiny_model: str, tmp_path: Path
) -> None:
    config = config_of(
        tmp_path,
        tiny_model,
        grpo={"kl": "k1-in-reward", "kl_coef": 0.5, "missing_eos_penalty": 0.25},
        scoring={"combine": "group"},
    )
    trainer, prompts = trainer_of(config)
    for step in (1, 2):  # the policy is not the reference any more
        made = trainer.generate_experience(prompts[:6], step=step)
        penalty = 0.25 * (1 - made.metrics["eos_rate"])
        expected = -penalty - 0.5 * made.metrics["kl"]
        assert made.metrics["shaped_return"] == pytest.approx(expected, abs=1e-5)
        assert float(made.scores.mean()) == pytest.approx(-penalty, abs=1e-5)
        trainer.train_rlhf(made, step=step)
    assert penalty > 0
    assert "only penalties and KL are left of it" in find_metric("shaped_return").meaning


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["a/b:0.5", "c/b"], [("a/b", 0.5, "reward_model.b"), ("c/b", 1.0, "reward_model.b_2")]),
        (["x/d:-1e-1"], [("x/d", -0.1, "reward_model.d")]),
    ],
)
def test_reward_models_are_named_with_weights(given: list[str], found: list[Any]) -> None:
    assert [(m.source, m.weight, m.label) for m in weighted_models(given)] == found


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"scoring": {"reward_models": ["a", "./a:2"]}}, "is given twice"),
        ({"scoring": {"reward_models": ["/:2"]}}, "names no model"),
        ({"scoring": {"reward_models": ["a:nan"]}}, "no finite weight"),
        (
            {"scoring": {"reward_models": ["a"]}, "grpo": {"reward_model_weight": 0}},
            "scoring.reward_models must be empty where grpo.reward_model_weight is 0",
        ),
        (
            {"scoring": {"reward_models": ["a:0"], "ensemble": "mean"}},
            "scoring.ensemble must be sum without a reward model beside the first whose weight is",
        ),
        (
            {"scoring": {"reward_models": ["a:0.5"], "ensemble": "worst-case"}},
            r"weight 1 \(or 0, to be watched\) .* got 0.5 of a\. Remove the weight",
        ),
        (
            {"scoring": {"reward_models": ["a:-1"], "ensemble": "uncertainty"}},
            "weights of 0 or more with scoring.ensemble uncertainty, .* got -1 of a",
        ),
        (
            {"scoring": {"reward_models": ["a"], "uncertainty_coef": 0.2}},
            "scoring.uncertainty_coef must go with scoring.ensemble uncertainty",
        ),
    ],
)
def test_wrong_reward_models_are_refused(knobs: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(config_of(tmp_path, "m", **knobs))


def test_texts_may_move_the_policy_before_the_first_answers_do(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixture training on a minibatch without a gradient: the next one's ratio is not 1."""
    mixed_in = Mock(wraps=ppo_trainer.mixed_in)
    monkeypatch.setattr(ppo_trainer, "mixed_in", mixed_in)
    config = config_of(tmp_path, tiny_model, grpo={"minibatch_size": 12, "ptx_coef": 1.0})
    texts = [TokenRow((5, 6, 7, 8), (False, True, True, True), Source("t", "t", 1))] * 4
    trainer, prompts = trainer_of(config, ptx_rows=texts)
    made = trainer.generate_experience(prompts[:6], step=1)
    _, first = next(minibatches(trainer.config, made, step=1))
    advantages = made.batch.response_mask.float()
    advantages[first] = 0.0
    metrics = trainer.train_rlhf(replace(made, advantages=advantages), step=1)
    assert metrics["updates"] == mixed_in.call_count == 2
    assert "ratio_gap_before_update" not in metrics
    read = int(made.batch.attention_mask.sum() - made.batch.attention_mask[first].sum())
    mixed = 2 * config.grpo.ptx_batch_size * 4
    rates = trainer.phases.metrics()
    assert rates["tokens_per_second/train"] * rates["seconds/train"] == pytest.approx(read + mixed)


def test_where_no_group_has_a_signal_the_scored_answers_are_left(
    tiny_model: str, tmp_path: Path
) -> None:
    """The step's own prompts are unscored, those that follow score alike."""

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        own = {f"Say {word}." for word in WORDS[:6]}
        return [None if prompt in own else 1.0 for prompt in prompts]

    config = config_of(
        tmp_path, tiny_model, grpo={"sampling_rounds": 2, "missing_eos_penalty": 0.0}
    )
    engine = make_engine(config, config.actor_model)
    prompts = [engine.renderer.prompt(f"Say {word}.") for word in WORDS]
    lines: list[str] = []
    trainer = PPOTrainer(
        engine,
        config,
        num_steps=3,
        reward_function=reward,
        more_prompts=lambda step, taken, count: more_prompts(prompts, 1, step, taken, count),
        print_line=lines.append,
    )
    made = trainer.generate_experience(prompts[:6], step=1)
    assert len(made) == 4 * len(WORDS[6:])
    assert "updates" not in trainer.train_rlhf(made, step=1)


@pytest.mark.parametrize("wakes", [True, False])
def test_an_interruption_does_not_wait_for_scores(
    tiny_model: str, tmp_path: Path, wakes: bool
) -> None:
    """Nor if it comes just before a wait begins, and wakes nobody."""
    begun = tmp_path / "begun"

    def sleeping(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        begun.touch()
        time.sleep(100)
        return [0.0]

    config = config_of(
        tmp_path, tiny_model, grpo={"sampling_rounds": 2}, scoring={"deadline_seconds": 1000.0}
    )
    engine = make_engine(config, config.actor_model)
    prompts = [engine.renderer.prompt(f"Say {word}.") for word in WORDS]
    trainer = PPOTrainer(engine, config, num_steps=3, reward_function=sleeping)
    done = threading.Event()
    main = threading.main_thread().ident
    assert main is not None
    interrupt_main = partial(signal.pthread_kill, main) if wakes else _thread.interrupt_main

    def interrupt() -> None:
        while not (done.wait(0.02) or begun.exists()):
            pass
        if not done.is_set():
            interrupt_main(signal.SIGINT)

    watch = threading.Thread(target=interrupt)
    watch.start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.generate_experience(prompts[:6], step=1)
    finally:
        done.set()
        watch.join()
    assert time.monotonic() - begin < 90, "the functions sleep for 100 s"


def test_what_fails_in_a_refilled_rollout_is_told_in_one_line(
    tiny_model: str, tmp_path: Path
) -> None:
    def failing(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        print("looking at", prompts[0])
        if len(completions[0]) % 2:
            raise ValueError("odd")
        return [float(len(completions[0]))]

    config = config_of(tmp_path, tiny_model, grpo={"sampling_rounds": 2}, seed=5)
    engine = make_engine(config, config.actor_model)
    prompts = [engine.renderer.prompt(f"Say {word}.") for word in WORDS]
    lines: list[str] = []
    trainer = PPOTrainer(
        engine, config, num_steps=3, reward_function=failing, print_line=lines.append
    )
    made = trainer.generate_experience(prompts[:6], step=1)
    assert trainer.answering._can_refill()
    assert made.metrics["reward_failed"] > 0
    assert sum("failed on" in line for line in lines) == 1
    assert sum("printed" in line for line in lines) == 4
