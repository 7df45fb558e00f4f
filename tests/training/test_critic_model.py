"""A critic that starts from another model than the reward model or the policy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
)

from tandem import make_engine
from tandem.checkpoint.folder import read_manifest
from tandem.config.load import check_config
from tandem.config.stages import stage_of
from tandem.data.render import Renderer
from tandem.errors import CheckpointError, ConfigError, ModelError
from tandem.models.scalar import check_scalar_model
from tandem.predict.memory import Device, Models, StageCase, stage_memory
from tandem.predict.models import config_of, configs_beside
from tandem.predict.rows import Rows
from tandem.predict.work import work_of
from tandem.training.forecast import models_in_use
from tests.data.built_tokenizers import sentencepiece
from tests.tiny import save_tiny_model, tiny_config, tiny_llama, tiny_tokenizer
from tests.training import letter_rewards
from tests.training.runs import ran, ran_with_stops, weights_of

REWARD = f"{letter_rewards.__file__}:starts_early"
ALONE: dict[str, Any] = {"stages": ["ppo"], "ppo__steps": 2, "ppo__reward_function": REWARD}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A language model of the policy's tokenizer and half its width."""
    folder = tmp_path_factory.mktemp("narrow")
    save_tiny_model(folder, seed=7)
    config = tiny_llama(len(tiny_tokenizer())).config
    config.update({"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1})
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def test_it_starts_from_a_smaller_language_model_with_a_head_of_zeros(
    tmp_path: Path, tiny_model: str, preferences: str, narrow: str
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, critic_model=narrow, **ALONE)
    engine = make_engine(config, tiny_model)
    assert engine.critic is not None
    assert engine.critic.config.hidden_size == 16
    source = AutoModelForCausalLM.from_pretrained(narrow)
    for name, value in engine.critic.model.state_dict().items():
        assert torch.equal(value, source.model.state_dict()[name])
    assert not engine.critic.score.weight.any()
    lines: list[str] = []
    run = ran(config, lines=lines)
    assert f"ppo: the critic starts from {narrow}" in lines
    ran_with_stops(config, tmp_path / "again", [("ppo", 2)])
    again, whole = weights_of(tmp_path / "again", "ppo"), weights_of(run, "ppo")
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_a_reward_model_judges_and_another_estimates(
    tmp_path: Path, tiny_model: str, preferences: str, narrow: str
) -> None:
    """The scores stay the reward model's; the critic is a classifier of its own, head and all."""
    torch.manual_seed(5)
    shape = AutoModelForCausalLM.from_pretrained(narrow).config
    shape.num_labels, shape.pad_token_id = 1, 0
    classifier = AutoModelForSequenceClassification.from_config(shape)
    start = tmp_path / "values"
    save_tiny_model(start, seed=1)
    classifier.save_pretrained(start)
    knobs = {"sft__max_steps": 1, "reward__max_steps": 1, "ppo__steps": 1}
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, critic_model=str(start), **knobs
    )
    run = ran(config)
    facts = read_manifest(run / "ppo").facts["made_from"]
    assert facts["critic_model"] == str(start)
    assert "model.safetensors" in facts["the files of critic_model"]
    engine = make_engine(config, run / "sft", reward_model=run / "reward")
    assert engine.critic is not None
    assert engine.scorer is not None
    assert torch.equal(engine.critic.score.weight, classifier.score.weight)
    assert engine.critic.config.hidden_size == 16
    assert engine.scorer.models[0].config.hidden_size == 32


def test_a_critic_is_no_reward_model(tmp_path: Path, tiny_model: str, preferences: str) -> None:
    """Nor is its adapter; what a reward stage makes of it is one."""
    brief = {"lora__rank": 2, "sft__max_steps": 1, "reward__max_steps": 1, "ppo__steps": 1}
    run = ran(tiny_config(tmp_path / "run", tiny_model, preferences, **brief))
    critic = run / "ppo/critic"
    for folder in (critic, critic / "adapter"):
        given = {"stages": ["ppo"], "reward_model": str(folder), "lora__rank": 2}
        config = tiny_config(tmp_path / "judged", tiny_model, preferences, **given)
        with pytest.raises(ModelError, match="must score whole answers; got a critic") as early:
            ran(config)
        assert not (tmp_path / "judged").exists(), "before anything is read"
        assert str(folder) in str(early.value)
        with pytest.raises(ModelError, match="a critic is for --critic-model"):
            make_engine(config, tiny_model, reward_model=folder)
    for folder in (run / "reward", run / "reward/adapter"):
        check_scalar_model(folder, needs_head=True)
    check_scalar_model(critic)
    again = {"stages": ["reward"], "reward_model": str(critic), **brief}
    learned = ran(tiny_config(tmp_path / "again", tiny_model, preferences, **again)) / "reward"
    assert "value_head" not in json.loads((learned / "config.json").read_text())
    for folder in (learned, learned / "adapter"):
        check_scalar_model(folder, needs_head=True)
    engine = make_engine(config, tiny_model, reward_model=learned, critic=critic)
    assert engine.critic is not None


def test_the_forecast_counts_its_shape(
    tmp_path: Path, tiny_model: str, preferences: str, narrow: str
) -> None:
    config = tiny_config(tmp_path, tiny_model, preferences, critic_model=narrow, **ALONE)
    whole = config_of(tiny_model)
    models = Models.of(whole, whole, **configs_beside(config))
    assert models.critic.width == 16
    assert models.value.width == 32
    device = Device(on_cpu=True, half=False)

    def resting(of: Models, **changes: Any) -> dict[str, float]:
        ours = tiny_config(tmp_path, tiny_model, preferences, **{**ALONE, **changes})
        stage = stage_of("ppo")
        work = work_of(ours, stage, 1, Rows(), of.positions)
        sizes = stage_memory(StageCase(ours, stage, of, work, device, 1)).resting
        return {name: size for name, size in sizes.items() if name.startswith("critic")}

    engine = make_engine(config, tiny_model)
    assert engine.critic is not None
    size = 4 * sum(weight.numel() for weight in engine.critic.parameters())
    assert resting(models)["critic: weights"] == size
    assert resting(Models.of(whole, whole))["critic: weights"] > 1.5 * size


def test_a_forecast_knows_when_the_critic_starts_from_the_policy(
    tmp_path: Path, tiny_model: str, preferences: str, narrow: str
) -> None:
    """A reward model of another template gives it no start."""
    config = tiny_config(tmp_path, tiny_model, preferences, reward_model=narrow)
    run: Any = SimpleNamespace(
        config=config, policy_source=lambda _: tiny_model, reward_source=lambda _: narrow
    )
    own, other = tiny_tokenizer(), tiny_tokenizer()
    other.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"

    def width(theirs: PreTrainedTokenizerBase) -> int:
        rows: Any = SimpleNamespace(renderer=Renderer(own), reward_renderer=Renderer(theirs))
        return models_in_use(run, "ppo", rows).critic.width

    assert (width(own), width(other)) == (16, 32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"stages": ["sft", "reward"]}, ConfigError, "critic_model must be empty where no stage"),
        ({"stages": ["grpo"], "grpo__reward_function": REWARD}, ConfigError, "must be empty"),
    ],
)
def test_a_stage_without_a_critic_has_none_to_name(
    tmp_path: Path, tiny_model: str, preferences: str, narrow: str,
    changes: dict[str, Any], error: type[Exception], message: str,
) -> None:  # fmt: skip
    config = tiny_config(tmp_path, tiny_model, preferences, critic_model=narrow, **changes)
    with pytest.raises(error, match=message):
        check_config(config)


def test_a_critic_that_cannot_read_the_policy_s_tokens_is_refused(
    tmp_path: Path, tiny_model: str, preferences: str, narrow: str
) -> None:
    foreign, tokenizer = tmp_path / "foreign", sentencepiece()
    tiny_llama(len(tokenizer)).save_pretrained(foreign)
    tokenizer.save_pretrained(foreign)
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, critic_model=str(foreign), **ALONE
    )
    with pytest.raises(ModelError, match=r"critic model .* must have the policy's tokens"):
        ran(config)
    short = tmp_path / "short"
    save_tiny_model(short, seed=1)
    settings = tiny_llama(len(tiny_tokenizer())).config
    settings.update({"max_position_embeddings": 20})
    AutoModelForCausalLM.from_config(settings).save_pretrained(short)
    with pytest.raises(ConfigError, match="must fit the critic model's 20 positions"):
        ran(replace(config, critic_model=str(short)))


def test_another_critic_is_another_run(
    tmp_path: Path, tiny_model: str, preferences: str, narrow: str
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, critic_model=narrow, **ALONE)
    ran(config)
    with pytest.raises(CheckpointError, match=r"changed: .*critic_model"):
        ran(replace(config, critic_model=tiny_model))


@pytest.mark.parametrize("role", ["reward_model", "critic_model", "reference_model"])
def test_a_token_that_the_tokenizer_and_another_model_lack_is_not_drawn(
    tmp_path: Path, tiny_model: str, preferences: str, role: str
) -> None:
    """The policy's embeddings were padded, as many are, and it prefers a token past the others'."""
    tokenizer = tiny_tokenizer()
    wide = tiny_llama(len(tokenizer) + 8)
    wide.config.eos_token_id = wide.generation_config.eos_token_id = tokenizer.eos_token_id
    wide.save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    other = tiny_model
    if role == "reward_model":
        ran(tiny_config(tmp_path / "made", tiny_model, preferences, stages=["reward"]))
        other = str(tmp_path / "made" / "reward")
    token = len(tokenizer) + 3
    config = tiny_config(
        tmp_path / "run", str(tmp_path / "wide"), preferences,
        sampling__logit_bias=[f"{token}:50"], **{**ALONE, role: other},
    )  # fmt: skip
    lines: list[str] = []
    run = ran(config, lines=lines)
    assert any(
        line.endswith("never drawn: the policy's last 8 tokens, which its tokenizer lacks")
        for line in lines
    )
    assert (run / "evaluation.json").is_file(), "the models are compared, by the reward model too"
