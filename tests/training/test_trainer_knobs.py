"""A loop of one's own: what the configuration names is used as in a stage, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tandem import PPOTrainer, build_config, make_engine
from tandem.config.schema import RunConfig
from tandem.errors import ConfigError
from tandem.types import Experience

MINE = """
def length(completions, **columns):
    return [float(len(text) % 5) for text in completions]

def doubled(logprobs, old_logprobs, advantages, response_mask):
    return -2 * (logprobs - old_logprobs).exp() * advantages

def scores(made):
    return made.scores[:, None] * made.batch.response_mask, made.rewards

def more(messages, **columns):
    return "Go on." if len(messages) == 2 else None
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of functions."""
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    return tmp_path / "mine.py"


def configured(folder: Path, **knobs: Any) -> RunConfig:
    ppo = {"prompts_per_step": 2, "minibatch_size": 2, **knobs.pop("ppo", {})}
    values = {"stages": ["ppo"], "ppo": ppo, "output_dir": str(folder / "run"),
              "sampling": {"max_new_tokens": 4, "min_new_tokens": 2}}  # fmt: skip
    return build_config(values | knobs)


def made_by(
    config: RunConfig, model: str, **given: Any
) -> tuple[PPOTrainer, Experience, dict[str, float]]:
    engine = make_engine(config, model)
    trainer = PPOTrainer(engine, config, num_steps=1, print_line=lambda line: None, **given)
    prompts = [engine.renderer.prompt(text) for text in ("What is rain?", "Who?")]
    made = trainer.generate_experience(prompts, step=1)
    return trainer, made, trainer.train_rlhf(made, step=1)


def test_functions_that_knobs_name_are_used_without_being_passed(
    tmp_path: Path, tiny_model: str, mine: Path
) -> None:
    named = {
        "reward_function": [f"{mine}:length"],
        "loss_function": f"{mine}:doubled",
        "advantage_function": f"{mine}:scores",
    }
    _, made, metrics = made_by(configured(tmp_path, ppo=named), tiny_model)
    lengths = torch.tensor([float(len(text) % 5) for text in made.rollout.responses])
    torch.testing.assert_close(made.scores + (~made.rollout.finished).float(), lengths)
    mask = made.batch.response_mask
    torch.testing.assert_close(made.advantages, made.scores[:, None] * mask)
    expected = -2 * float(made.advantages.sum() / mask.sum())
    assert metrics["policy_loss"] == pytest.approx(expected, abs=1e-5)


def test_what_is_passed_comes_before_what_knobs_name(
    tmp_path: Path, tiny_model: str, mine: Path
) -> None:
    config = configured(tmp_path, ppo={"reward_function": [f"{mine}:length"]})
    _, made, _ = made_by(config, tiny_model, reward_function=lambda completions: [7.0])
    assert (made.scores + (~made.rollout.finished).float()).tolist() == [7.0, 7.0]


def test_an_environment_that_a_knob_names_is_talked_to(
    tmp_path: Path, tiny_model: str, mine: Path
) -> None:
    knobs = {"environment": f"{mine}:more", "reward_function": [f"{mine}:length"]}
    _, made, _ = made_by(configured(tmp_path, ppo=knobs), tiny_model)
    went_on = [len(prompt.messages) == 3 for prompt in made.rollout.prompts]
    assert made.metrics["conversation_answers"] == 1 + sum(went_on) / 2
    assert made.metrics["environment_failed"] == 0


def test_texts_that_a_knob_names_must_be_passed(
    tmp_path: Path, tiny_model: str, mine: Path
) -> None:
    knobs = {"ptx_data": ["texts.jsonl"], "reward_function": [f"{mine}:length"]}
    config = configured(tmp_path, ppo=knobs)
    engine = make_engine(config, tiny_model)
    with pytest.raises(ConfigError, match=r"the texts of ppo\.ptx_data, .* got no ptx_rows"):
        PPOTrainer(engine, config)
    source = engine.renderer.prompt("hi").source
    PPOTrainer(engine, config, ptx_rows=[engine.renderer.document("Some text.", source)])


def test_the_reward_model_of_the_configuration_scores(tmp_path: Path, tiny_model: str) -> None:
    folder = str(tmp_path / "scorer")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained(
        folder
    )
    config = configured(tmp_path, reward_model=folder)
    trainer, made, _ = made_by(config, tiny_model)
    assert trainer.engine.scorer is not None
    assert "reward_raw" in made.metrics
    trained_there = configured(tmp_path, reward_model=folder, stages=["reward", "ppo"])
    assert make_engine(trained_there, tiny_model).scorer is None, "where the stage would start"
