"""Critic and reward model: Hugging Face's class, our alignment, masks that never read a pad id."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig, RobertaConfig

from tandem.config.lora import LoraConfig
from tandem.errors import ModelError
from tandem.models.build import attention_for
from tandem.models.load import load_causal_lm
from tandem.models.lora import add_lora, lora_parameters
from tandem.models.save import save_model
from tandem.models.scalar import (
    load_scalar_model,
    new_scalar_model,
    normalization,
    sequence_scores,
    set_normalization,
    token_values,
)
from tandem.ops import native
from tandem.types import TokenBatch

from .families import (
    EOS,
    TOKEN_IDS,
    ragged_batch,
    saved,
    scaled,
    tiny_config,
    tiny_model,
    tiny_scalar,
    tokenizer,
)


@pytest.fixture
def scalar_folder(tmp_path: Path) -> Path:
    return saved(tiny_scalar("llama"), tmp_path / "scalar")


@torch.no_grad()
def test_scores_and_values_against_hugging_faces_pooling(family: str) -> None:
    model = tiny_scalar(family)
    batch = ragged_batch()
    theirs = model(batch.token_ids, attention_mask=batch.attention_mask.long()).logits
    assert theirs.shape == (4, 1)
    scores, values = sequence_scores(model, batch), token_values(model, batch)
    assert scores.dtype == values.dtype == torch.float32
    assert scaled(scores, theirs[:, 0], 2e-6)
    assert values.shape == batch.token_ids.shape
    for row, n in enumerate(batch.lengths().tolist()):
        assert values[row, 0] == 0
        assert not values[row, n:].any()
        for t in range(1, n):  # the value before token t: what the class says of the row cut there
            prefix = model(batch.token_ids[row : row + 1, :t]).logits[0, 0]
            assert torch.isclose(values[row, t], prefix, atol=2e-5), (row, t)


@pytest.mark.skipif(not native.available(), reason="rows depend on themselves alone in C++")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_scores_and_values_do_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    model = tiny_scalar("llama").to(dtype)
    batch = ragged_batch((9, 5, 21, 2, 17, 30))
    scores, values = sequence_scores(model, batch), token_values(model, batch)
    for rows in ([3], [0, 2], [1, 4, 5], [5, 4, 3, 2, 1]):
        part = batch.select(torch.tensor(rows))
        width = part.token_ids.shape[1]
        assert torch.equal(sequence_scores(model, part), scores[rows]), rows
        assert torch.equal(token_values(model, part), values[rows, :width]), rows


@torch.no_grad()
def test_the_last_real_token_counts_even_if_pad_is_eos() -> None:
    model = tiny_scalar("llama", pad_token_id=EOS)
    batch = ragged_batch((6, 3))
    ids = batch.token_ids.masked_fill(~batch.attention_mask, EOS)
    ids[0, 5] = ids[1, 2] = EOS
    with_eos = TokenBatch(ids, batch.attention_mask, batch.response_mask)
    states = model.model(ids[1:, :3]).last_hidden_state
    alone = model.score(states)[..., 0]
    assert torch.isclose(sequence_scores(model, with_eos)[1], alone[0, 2], atol=1e-5)
    pooled = model(ids[1:, :3]).logits[0, 0]
    assert not torch.isclose(pooled, alone[0, 2], atol=1e-3), "Hugging Face's pooling skips EOS"


def test_gradients_reach_backbone_and_head() -> None:
    model = tiny_scalar("llama")
    sequence_scores(model, ragged_batch()).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_new_head_on_a_language_model(family: str, tmp_path: Path) -> None:
    language_model = tiny_model(family)
    saved(language_model, tmp_path)
    model, same, other = (load_scalar_model(tmp_path, seed=seed) for seed in (1, 1, 2))
    assert not any(module.training for module in model.modules())
    assert model.dtype == torch.float32
    assert model.config.num_labels == 1
    for name, weight in language_model.base_model.state_dict().items():
        assert torch.equal(weight, model.base_model.state_dict()[name])
    assert torch.equal(model.score.weight, same.score.weight)
    assert not torch.equal(model.score.weight, other.score.weight)


def test_the_size_of_a_new_head() -> None:
    model = new_scalar_model(tiny_config("llama", hidden_size=2048, num_hidden_layers=1), seed=0)
    assert model.score.weight.std().item() == pytest.approx(1 / math.sqrt(2049), rel=0.1)


def test_new_scalar_models_follow_their_seed() -> None:
    first, same, other = (new_scalar_model(tiny_config("gpt2"), seed) for seed in (1, 1, 2))
    for (name, weight), twin in zip(first.named_parameters(), same.parameters(), strict=True):
        assert torch.equal(weight, twin), name
    assert not torch.equal(first.score.weight, other.score.weight)


@torch.no_grad()
def test_a_critics_new_head_is_zero_and_a_trained_one_is_kept(
    llama_folder: Path, scalar_folder: Path
) -> None:
    assert not load_scalar_model(llama_folder, seed=5, zero_head=True).score.weight.any()
    assert load_scalar_model(scalar_folder, seed=5, zero_head=True).score.weight.any()
    assert load_scalar_model(llama_folder, seed=5).score.weight.any()


def test_a_saved_scalar_model_opens_anywhere_and_keeps_its_head(
    family: str, tmp_path: Path
) -> None:
    model = tiny_scalar(family)
    set_normalization(model, 0.25, 2.5)
    saved(model, tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(
        tmp_path,
        # transformers 5.17 runs gemma2 through an attention that drops its softcap.
        attn_implementation=attention_for(model.config),
    )
    assert theirs.config.num_labels == 1
    batch = ragged_batch()
    pooled = theirs(batch.token_ids, attention_mask=batch.attention_mask.long()).logits[:, 0]
    assert scaled(sequence_scores(model, batch), pooled, 2e-6)
    ours = load_scalar_model(tmp_path, seed=99)
    assert torch.equal(ours.score.weight, model.score.weight)
    assert normalization(ours) == (0.25, 2.5)


def test_a_new_head_in_place_of_an_old_one(scalar_folder: Path) -> None:
    kept = load_scalar_model(scalar_folder, seed=5)
    renewed = load_scalar_model(scalar_folder, seed=5, from_causal_lm=True)
    assert not torch.equal(kept.score.weight, renewed.score.weight)
    assert torch.equal(kept.model.norm.weight, renewed.model.norm.weight)


def test_a_head_that_is_not_there(llama_folder: Path) -> None:
    with pytest.raises(ModelError, match="must have a scalar head already"):
        load_scalar_model(llama_folder, seed=0, from_causal_lm=False)


def test_a_head_with_two_outputs(scalar_folder: Path) -> None:
    _edit(scalar_folder, num_labels=2)
    with pytest.raises(ModelError, match="a head with 2 outputs"):
        load_scalar_model(scalar_folder, seed=0)


def test_two_backbones_in_one_family(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tiny_model("gpt2")
    monkeypatch.setattr("tandem.models.scalar.load_causal_lm", lambda *_, **__: other)
    other.config = tiny_config("llama")
    with pytest.raises(ModelError, match="one backbone for both heads; got GPT2Model and Llama"):
        load_scalar_model(llama_folder, seed=0)


def test_a_config_that_promises_a_head_the_files_lack(folder: Path) -> None:
    _edit(folder, architectures=["LlamaForSequenceClassification"], num_labels=1)
    with pytest.raises(ModelError, match=r"1 \(score.weight\) missing"):
        load_scalar_model(folder, seed=0)


def test_without_architectures_the_files_tell(folder: Path, scalar_folder: Path) -> None:
    _edit(folder, architectures=None)
    assert load_scalar_model(folder, seed=0).config.num_labels == 1
    trained = load_scalar_model(scalar_folder, seed=0).score.weight
    _edit(scalar_folder, architectures=None)
    assert torch.equal(load_scalar_model(scalar_folder, seed=0).score.weight, trained)
    (folder / "model.safetensors").write_bytes(b"123")
    with pytest.raises(ModelError, match="must be complete safetensors files"):
        load_scalar_model(folder, seed=0)


def test_weights_missing_from_the_backbone(folder: Path) -> None:
    _edit(folder, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"model.layers.2.input_layernorm.weight.* missing"):
        load_scalar_model(folder, seed=0)


def test_a_scalar_model_is_no_language_model(scalar_folder: Path) -> None:
    with pytest.raises(ModelError, match="LlamaForSequenceClassification"):
        load_causal_lm(scalar_folder)


def test_a_head_of_another_name() -> None:
    config = RobertaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, is_decoder=True,
    )  # fmt: skip
    with pytest.raises(ModelError, match="RobertaForSequenceClassification must score with a lin"):
        new_scalar_model(config, 0)


def test_an_encoder_is_refused() -> None:
    with pytest.raises(ModelError, match="'bert', an encoder"):
        new_scalar_model(BertConfig(), seed=0)


def test_an_adapter_of_a_scalar_model(scalar_folder: Path, tmp_path: Path) -> None:
    model = load_scalar_model(scalar_folder, seed=0)
    add_lora(model, LoraConfig(rank=2), seed=1)
    with torch.no_grad():
        for parameter in [*lora_parameters(model), model.score.weight]:
            parameter += 0.1
    set_normalization(model, -1.0, 3.0)
    save_model(model, tokenizer(), tmp_path / "out")
    batch = ragged_batch()
    expected = sequence_scores(model, batch)
    live = load_scalar_model(tmp_path / "out" / "adapter", seed=0)
    assert torch.equal(sequence_scores(live, batch), expected)
    assert normalization(live) == (-1.0, 3.0)
    merged = load_scalar_model(tmp_path / "out", seed=0)
    assert scaled(sequence_scores(merged, batch), expected)
    assert normalization(merged) == (-1.0, 3.0)


def test_normalization() -> None:
    model = tiny_scalar("llama")
    assert normalization(model) == (0.0, 1.0)
    for mean, std in [(math.nan, 1.0), (0.0, 0.0), (0.0, math.inf), (0.0, -1.0)]:
        with pytest.raises(ModelError, match="finite mean and a positive sd"):
            set_normalization(model, mean, std)


def _edit(folder: Path, **changes: object) -> None:
    """Change config.json; None removes a key, num_labels becomes its labels."""
    config = json.loads((folder / "config.json").read_text()) | changes
    if "num_labels" in changes:
        n = config.pop("num_labels")
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(n)}
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None or k == "pad_token_id"})
    )


def test_states_in_float32_meet_a_head_in_half_precision() -> None:
    """Mamba's residuals stay float32 whatever its weights are."""
    config = AutoConfig.for_model("mamba", **TOKEN_IDS, hidden_size=32, num_hidden_layers=1)
    model = new_scalar_model(config, seed=0).bfloat16()
    assert sequence_scores(model, ragged_batch()).dtype == torch.float32
