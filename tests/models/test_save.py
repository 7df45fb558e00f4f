"""A saved folder opens with from_pretrained, has Hugging Face's names, and changes nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tandem.config.lora import LoraConfig
from tandem.errors import ModelError, NumericsError
from tandem.models.build import attention_for
from tandem.models.load import load_causal_lm
from tandem.models.lora import add_lora, lora_parameters
from tandem.models.save import save_model

from .families import EOS, PAD, ragged_batch, scaled, tiny_model, tiny_scalar, tokenizer


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(ragged_batch((7, 7)).token_ids).logits


@pytest.mark.parametrize("adapted", [False, True])
def test_names_and_numbers_are_hugging_faces(family: str, adapted: bool, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "theirs")
    if adapted:
        add_lora(model, LoraConfig(rank=2), seed=0)
        with torch.no_grad():
            for parameter in lora_parameters(model):
                parameter += 0.05  # at 0.1 mistral magnifies a last bit five thousand times
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_model(model, tokenizer(), tmp_path / "ours", base_path="some/base")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())

    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert {w.dtype for w in ours.values()} == {torch.float32}
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours",
        output_loading_info=True,
        # transformers 5.17 runs gemma2 through an attention that drops its softcap.
        attn_implementation=attention_for(model.config),
    )
    assert not any(report.values())
    if adapted:
        assert scaled(logits(loaded.eval()), logits(model), 1e-4)
        adapter = json.loads((tmp_path / "ours/adapter/adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == "some/base"
    else:
        assert torch.equal(logits(loaded.eval()), logits(model))
    configs = [
        json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("ours", "theirs")
    ]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("tied", [False, True])
def test_ties_survive(tied: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    for dtype in (None, torch.bfloat16):
        save_model(model, tokenizer(), tmp_path, dtype=dtype)
        loaded = load_causal_lm(tmp_path)
        shared = loaded.lm_head.weight is loaded.get_input_embeddings().weight
        assert shared == tied
        assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied


def test_another_dtype(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save_model(model, tokenizer(), tmp_path, dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    assert model.dtype == torch.float32


def test_a_weight_that_its_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 7e4
    with pytest.raises(NumericsError, match=r"got lm_head.weight with .* beyond float16's 65504"):
        save_model(model, tokenizer(), tmp_path, dtype=torch.float16)
    assert not list(tmp_path.iterdir())


def test_tokenizer_template_and_generation_config(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.generation_config.max_length = 77
    save_model(model, tokenizer(), tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == tokenizer().chat_template
    assert again.get_vocab() == tokenizer().get_vocab()
    assert GenerationConfig.from_pretrained(tmp_path).max_length == 77


def test_the_adapters_base_is_where_the_model_came_from(tmp_path: Path) -> None:
    model = tiny_model("llama")
    add_lora(model, LoraConfig(rank=2), seed=0)
    with pytest.raises(ModelError, match="must know the base of a model with adapters"):
        save_model(model, tokenizer(), tmp_path)
    save_model(tiny_model("llama"), tokenizer(), tmp_path / "base")
    model = load_causal_lm(tmp_path / "base")
    add_lora(model, LoraConfig(rank=2), seed=0)
    save_model(model, tokenizer(), tmp_path / "out")
    adapter = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "base")


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_a_scalar_model_names_a_pad_token_only_if_it_is_no_eos(pad: int, tmp_path: Path) -> None:
    fast = copy.deepcopy(tokenizer())
    fast.pad_token = fast.convert_ids_to_tokens(pad)
    model = tiny_scalar("llama", pad_token_id=EOS)
    save_model(model, fast, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["pad_token_id"]
    assert written == (pad if pad == PAD else None)
    assert model.config.pad_token_id == EOS, "the model itself is unchanged"
