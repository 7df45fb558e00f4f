"""Models that a later stage could not use are refused before the first one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tandem.errors import ModelError
from tandem.models.scalar import check_scalar_model
from tandem.training.make_engine import make_engine
from tests.tiny import tiny_config, tiny_llama, tiny_tokenizer
from tests.training import letter_rewards
from tests.training.runs import ran

REWARD = f"{letter_rewards.__file__}:starts_early"


def scalar_model(folder: Path, *, outputs: int = 1, said: int | None = None) -> str:
    """A tiny Llama with a head; its config says another number of outputs where `said` does."""
    tokenizer = tiny_tokenizer()
    config = tiny_llama(len(tokenizer)).config
    config.num_labels, config.pad_token_id = outputs, tokenizer.pad_token_id
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    model.config.num_labels = outputs if said is None else said
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def t5(folder: Path) -> str:
    tokenizer = tiny_tokenizer()
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **sizes)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def unusable(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("unusable")
    pickled = folder / "pickled"
    scalar_model(pickled)
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"")
    return {
        "two outputs": scalar_model(folder / "two", outputs=2),
        "encoder-decoder": t5(folder / "t5"),
        "language model": tiny_model,
        "pickled": str(pickled),
    }


@pytest.mark.parametrize(
    ("stages", "knob", "model", "part"),
    [
        ("sft ppo", "reward_model", "two outputs", "must score with one number; got a head with 2"),
        ("sft ppo", "reward_model", "encoder-decoder", "must be a decoder; got family 't5'"),
        ("sft ppo", "reward_model", "language model", "must have a scalar head already"),
        ("sft ppo", "reward_model", "pickled", "must have safetensors weights"),
        ("sft reward", "reward_model", "two outputs", "must score with one number"),
        ("sft reward ppo", "reward_model", "encoder-decoder", "must be a decoder"),
        ("sft reward ppo", "scoring__reward_models", "language model", "a scalar head already"),
        ("sft dpo", "reference_model", "encoder-decoder", "must be a decoder"),
    ],
)
def test_a_model_that_a_later_stage_cannot_use_is_refused_before_the_first(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    unusable: dict[str, str],
    stages: str,
    knob: str,
    model: str,
    part: str,
) -> None:
    given: object = unusable[model] if knob.endswith("model") else [unusable[model]]
    changes: dict[str, object] = {"stages": stages.split(), knob: given}
    config = tiny_config(tmp_path / "run", tiny_model, preferences, **changes)
    lines: list[str] = []
    with pytest.raises(ModelError, match=part):
        ran(config, lines=lines)
    assert not (tmp_path / "run").exists()
    assert not any(line.startswith("reading") for line in lines), "data come after it"


def test_heads_are_counted_in_the_files(tmp_path: Path, tiny_model: str) -> None:
    """A config that does not say how many outputs a head has means 2."""
    check_scalar_model(scalar_model(tmp_path / "one", said=2), needs_head=True)
    check_scalar_model(tiny_model)
    with pytest.raises(ModelError, match="a head with 2 outputs"):
        check_scalar_model(scalar_model(tmp_path / "two", outputs=2, said=1))


def opt(folder: Path) -> str:
    """A tiny OPT, whose blocks have no MLP of their own, with the tiny Llama's tokenizer."""
    tokenizer = tiny_tokenizer()
    config = OPTConfig(
        vocab_size=len(tokenizer), hidden_size=32, word_embed_proj_dim=32, ffn_dim=64,
        num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("stages", "knob"), [("sft reward", "reward_model"), ("sft ppo", "critic_model")]
)
def test_a_model_that_cannot_recompute_a_part_is_refused_before_the_first_stage(
    tmp_path: Path, tiny_model: str, preferences: str, stages: str, knob: str
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=stages.split(),
        gradient_checkpointing=True, recompute="mlp", ppo__reward_function=REWARD,
        scoring__self_test=False, **{knob: opt(tmp_path / "opt")},
    )  # fmt: skip
    with pytest.raises(ModelError, match="family 'opt' must keep their mlp in a module of its own"):
        ran(config)
    assert not (tmp_path / "run").exists()


def test_adapters_of_a_later_stage_are_compared_before_the_first(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    made = tiny_config(tmp_path / "made", tiny_model, preferences, stages=["reward"], lora__rank=4)
    ran(made)
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft", "ppo"], lora__rank=2,
        parallel__frozen_weights="int8", reward_model=str(tmp_path / "made" / "reward"),
        sft__max_steps=1, ppo__steps=1,
    )  # fmt: skip
    with pytest.raises(ModelError, match="got rank 2, alpha 16 for rank 4"):
        ran(config)
    assert not (tmp_path / "run").exists()
    ran(replace(config, lora=made.lora))


def neox(folder: Path, *, scalar: bool) -> str:
    """A tiny GPT-NeoX with the tiny Llama's tokenizer."""
    tokenizer = tiny_tokenizer()
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, num_labels=1,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    kind = GPTNeoXForSequenceClassification if scalar else GPTNeoXForCausalLM
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("stages", "scalar", "targets", "part"),
    [
        ("sft reward", False, "q_proj v_proj", "of gpt_neox; got 'q_proj v_proj', which match no"),
        ("sft ppo", True, "q_proj v_proj", "of gpt_neox; got 'q_proj v_proj', which match none"),
        ("sft reward", False, "q_proj query_key_value wq", "llama or gpt_neox; got 'wq'"),
        ("sft grpo", True, "q_proj wq", "of llama; got 'wq', which matches none"),
    ],
)
def test_targets_of_another_family_are_refused_before_the_first_stage(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    stages: str,
    scalar: bool,
    targets: str,
    part: str,
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=stages.split(),
        reward_model=neox(tmp_path / "neox", scalar=scalar),
        lora={"rank": 2, "targets": targets.split()},
    )  # fmt: skip
    with pytest.raises(ModelError, match=part):
        ran(config)
    assert not (tmp_path / "run").exists()


def test_models_of_two_families_are_adapted_by_one_list_of_names(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft", "reward", "ppo"],
        reward_model=neox(tmp_path / "neox", scalar=False), ppo__steps=1, sft__max_steps=1,
        reward__max_steps=1, lora={"rank": 2, "targets": ["q_proj", "v_proj", "query_key_value"]},
    )  # fmt: skip
    path = ran(config)
    found = {
        name: json.loads((path / name / "adapter/adapter_config.json").read_text())
        for name in ("sft", "reward", "ppo/actor", "ppo/critic")
    }
    targets = {name: sorted(adapter["target_modules"]) for name, adapter in found.items()}
    assert targets["sft"] == targets["ppo/actor"] == ["q_proj", "v_proj"]
    assert targets["reward"] == targets["ppo/critic"] == ["query_key_value"]


def test_an_engine_of_ones_own_finds_targets_of_none_of_its_models(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    lora = {"rank": 2, "targets": ["q_proj", "wq"]}
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["grpo"], lora=lora)
    with pytest.raises(ModelError, match="got 'wq', which matches none"):
        make_engine(config, tiny_model)
