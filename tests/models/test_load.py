"""Language models in: equal to transformers' own, complete, quiet, without dropout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tandem.config.lora import LoraConfig
from tandem.errors import ModelError
from tandem.models.build import attention_for, set_dropout
from tandem.models.load import (
    check_vocabulary,
    load_causal_lm,
    load_tokenizer,
    new_causal_lm,
    require_embeddings,
)
from tandem.models.lora import add_lora, is_adapted, lora_parameters
from tandem.models.save import save_model

from .families import ragged_batch, saved, scaled, tiny_config, tiny_model, tokenizer


def test_equal_to_transformers_own_loading(family: str, tmp_path: Path) -> None:
    saved(tiny_model(family), tmp_path)
    ours = load_causal_lm(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = ragged_batch((7, 7)).token_ids
    assert not ours.training
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert scaled(ours(ids).logits, theirs(ids).logits)


def test_weights_in_bf16_become_float32(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save_model(model, tokenizer(), tmp_path, dtype=torch.bfloat16)
    loaded = load_causal_lm(tmp_path)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16().float())


def test_attention_is_sdpa_but_for_capped_logits() -> None:
    assert tiny_model("llama").config._attn_implementation == "sdpa"
    assert attention_for(tiny_config("llama")) is None
    assert attention_for(tiny_config("gemma2")) == "eager"
    capped = tiny_model("gemma2")
    assert capped.config._attn_implementation == "eager"
    ids = ragged_batch((7, 7)).token_ids
    uncapped = tiny_model("gemma2", attn_logit_softcapping=None)
    assert not scaled(capped(ids).logits, uncapped(ids).logits, 1e-3), "the cap must act"


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_dropout_is_as_asked(family: str, rate: float) -> None:
    model = new_causal_lm(tiny_config(family), seed=0, dropout=rate).train()
    ids = ragged_batch((7, 7)).token_ids
    assert torch.equal(model(ids).logits, model(ids).logits) == (rate == 0.0)


def test_dropout_of_a_loaded_model(tmp_path: Path) -> None:
    saved(tiny_model("opt"), tmp_path)
    model = load_causal_lm(tmp_path, dropout=0.25)
    assert (model.config.dropout, model.config.attention_dropout) == (0.25, 0.25)
    assert model.model.decoder.layers[0].dropout == 0.25


def test_dropout_has_many_names() -> None:
    for family in ("opt", "gpt2", "gpt_neox", "phi", "starcoder2", "xglm", "bert", "mpt"):
        config = AutoConfig.for_model(family)
        set_dropout(config, 0.0)
        rates = {k: v for k, v in config.to_dict().items() if "drop" in k and v is not None}
        assert rates, family
        assert not any(rates.values()), rates
    config = AutoConfig.for_model("opt", layerdrop=0.5)
    set_dropout(config, 0.1)
    assert (config.dropout, config.layerdrop) == (0.1, 0.0)
    outer = PreTrainedConfig()
    outer.inner = config
    set_dropout(outer, 0.0)
    assert config.dropout == 0.0


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_dropout_outside_its_range(rate: float) -> None:
    with pytest.raises(ModelError, match=r"dropout must be in \[0, 1\)"):
        new_causal_lm(tiny_config("llama"), seed=0, dropout=rate)


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("bert", "'bert', an encoder\\."),
        ("t5", "'t5', an encoder-decoder"),
        ("vit", "'vit', no causal language model"),
    ],
)
def test_what_is_no_decoder_is_refused_by_name(family: str, found: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=found):
        load_causal_lm(tmp_path)


def test_a_missing_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 \(model.layers.1.mlp.up_proj.weight\) missing"):
        load_causal_lm(folder)


def test_weights_left_over(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights |= {f"extra.{i}": torch.zeros(1) for i in range(4)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"4 \(extra.0, extra.1, extra.2, ...\) left over"):
        load_causal_lm(folder)


def test_nothing_reaches_the_terminal(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = load_causal_lm(folder)
    save_model(model, load_tokenizer(folder), tmp_path / "again")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError):
        load_causal_lm(folder)
    assert capfd.readouterr() == ("", "")


def test_an_adapter_folder_loads_its_base_and_the_adapter_live(
    folder: Path, tmp_path: Path
) -> None:
    model = load_causal_lm(folder)
    add_lora(model, LoraConfig(rank=2), seed=1)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.1
    save_model(model, tokenizer(), tmp_path / "out")
    loaded = load_causal_lm(tmp_path / "out" / "adapter")
    ids = ragged_batch((7, 7)).token_ids
    assert is_adapted(loaded)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    again = load_tokenizer(tmp_path / "out" / "adapter")
    assert again.get_vocab() == tokenizer().get_vocab()


def test_new_models_follow_their_seed_and_leave_torchs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    state = torch.random.get_rng_state()
    first, same, other = (new_causal_lm(tiny_config("llama"), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not seeded, "no GPU's"
    assert torch.equal(first.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert not first.training


def test_tokenizer_with_its_template(folder: Path) -> None:
    loaded = load_tokenizer(folder)
    chat = [{"role": "user", "content": "w1 w2"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == "user w1 w2 "
    assert loaded("w1 w2").input_ids == tokenizer()("w1 w2").input_ids


def test_a_model_without_a_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match="must have a tokenizer that transformers reads"):
        load_tokenizer(folder)


def test_a_tokenizer_with_ids_beyond_the_embedding() -> None:
    check_vocabulary(tiny_model("llama"), tokenizer())
    small = new_causal_lm(tiny_config("llama", vocab_size=50), seed=0)
    with pytest.raises(ModelError, match=r"below the model's 50 embeddings; got 98 \('w94'\)"):
        check_vocabulary(small, tokenizer())
    require_embeddings(small, torch.arange(50)[None])
    with pytest.raises(ModelError, match=r"below the 50 embeddings of .* got 50\. Let roll"):
        require_embeddings(small, torch.arange(51)[None])
