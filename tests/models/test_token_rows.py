"""Trained rows of a few tokens: against PEFT in both directions, and against whole matrices."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.errors import ModelError
from tandem.models.adapter import load_adapter, save_adapter
from tandem.models.frozen import freeze_quantized
from tandem.models.lm_head import vocabulary_logits
from tandem.models.load import load_causal_lm
from tandem.models.lora import adapters_off, add_lora, keep_start, lora_parameters
from tandem.models.packed import predictor_states, response_tokens
from tandem.models.shared import share_base
from tandem.models.token_layers import token_layers, token_rows, trained_tokens

from .families import (
    logits,
    merged_state_dict,
    ragged_batch,
    saved,
    scaled,
    tiny_model,
    tiny_scalar,
)

TOKENS = (90, 7, 33)
CONFIG = LoraConfig(rank=3, alpha=7.0)
FAMILIES = ["gemma2", "gpt2", "gpt_neox", "llama", "opt", "qwen2"]


def adapted(plain: PreTrainedModel) -> PreTrainedModel:
    """A copy with adapters and rows that are not at their start."""
    model = copy.deepcopy(plain)
    add_lora(model, CONFIG, seed=1, tokens=TOKENS)
    move(model)
    return model


def move(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def packed_logits(model: PreTrainedModel) -> torch.Tensor:
    """The twin's."""
    return vocabulary_logits(model, predictor_states(model, ragged_batch()))


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    batch = ragged_batch()
    found = vocabulary_logits(model, predictor_states(model, batch))
    return nn.functional.cross_entropy(found, response_tokens(batch, len(found)))


@pytest.mark.parametrize("family", FAMILIES)
def test_new_rows_change_nothing_and_the_switch_gives_the_base_back(family: str) -> None:
    plain = tiny_model(family)
    without = copy.deepcopy(plain)
    add_lora(without, CONFIG, seed=1)
    model = copy.deepcopy(plain)
    add_lora(model, CONFIG, seed=1, tokens=TOKENS)
    expected = packed_logits(without)
    assert torch.equal(packed_logits(model), expected)
    move(model)
    moved = packed_logits(model)
    assert not scaled(moved, expected, 1e-2)
    with adapters_off(model):
        assert torch.equal(packed_logits(model), expected)
    assert torch.equal(packed_logits(model), moved)
    keep_start(model)
    move(model)
    with adapters_off(model):
        assert torch.equal(packed_logits(model), moved)
    assert not torch.equal(packed_logits(model), moved)
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), "the base must not move"


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_whole_matrices(family: str) -> None:
    """With the rows in the matrices, and these trained whole; a tied head adds to the embedding."""
    model = adapted(tiny_model(family))
    whole = copy.deepcopy(model)
    for _, layer in token_layers(whole):
        with torch.no_grad():
            layer.weight.copy_(layer.merged_weight())
        layer.weight.requires_grad_(True)
        layer.lora_tokens.weight.requires_grad_(False)
        layer.lora_tokens.switch.on = False
    loss_of(model).backward()
    loss_of(whole).backward()
    rows = dict(token_layers(model))
    for name, layer in token_layers(whole):
        ours = rows[name].lora_tokens.weight.grad
        theirs = layer.weight.grad[sorted(TOKENS)]
        assert ours is not None
        assert theirs.abs().max() > 1e-6
        assert scaled(1e3 * ours, 1e3 * theirs, 1e-5), name
    for ours, theirs in zip(lora_parameters(model), lora_parameters(whole), strict=True):
        assert scaled(1e3 * ours.grad, 1e3 * theirs.grad)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_ours(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = tiny_model(family)
    model = adapted(plain)
    save_adapter(model, tmp_path, "base")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path).eval()
    assert scaled(logits(theirs), logits(model))
    ours = copy.deepcopy(plain)
    load_adapter(ours, tmp_path)
    assert torch.equal(logits(ours), logits(model))
    assert trained_tokens(ours) == tuple(sorted(TOKENS))
    trained = {n for n, p in ours.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in model.named_parameters() if p.requires_grad}
    # Without the rows its logits are others: they matter.
    for rows in token_rows(model):
        rows.switch.on = False
    assert not scaled(logits(theirs), logits(model), 1e-3)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("family", "indices"),
    [
        ("qwen2", [9, 4, 60]),
        ("qwen2", {"embed_tokens": [9, 4], "lm_head": [9, 4]}),
        ("llama", {"embed_tokens": [9, 4], "lm_head": [4, 8, 2]}),
        ("llama", [9, 4]),
    ],
)
def test_we_read_pefts(family: str, indices: object, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = tiny_model(family)
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", trainable_token_indices=indices,
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(copy.deepcopy(plain), config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter += torch.randn(parameter.shape)
    theirs.save_pretrained(tmp_path)
    ours = copy.deepcopy(plain)
    load_adapter(ours, tmp_path)
    assert scaled(logits(ours), logits(theirs))
    assert scaled(packed_logits(ours), packed_logits_of(theirs))
    assert not scaled(logits(ours), logits(plain), 1e-2)


def packed_logits_of(theirs: nn.Module) -> torch.Tensor:
    """The same tokens' logits by another model's own forward."""
    batch = ragged_batch()
    before = batch.response_mask.roll(-1, 1)
    return logits(theirs)[before]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_has_the_rows_in_its_matrices(family: str, tmp_path: Path) -> None:
    plain = tiny_model(family)
    plain.name_or_path = "base"
    model = adapted(plain)
    merged = load_causal_lm(saved(model, tmp_path))
    assert scaled(logits(merged), logits(model))
    embedding = merged.get_input_embeddings().weight
    rows = token_rows(model)[0]
    assert torch.equal(embedding[rows.token_ids], rows.weight), "to the bit"
    others = [i for i in range(len(embedding)) if i not in TOKENS]
    assert torch.equal(embedding[others], plain.get_input_embeddings().weight[others])


def test_a_scalar_model_trains_its_embedding(tmp_path: Path) -> None:
    plain = tiny_scalar("llama")
    model = adapted(plain)
    assert [name for name, _ in token_layers(model)] == ["model.embed_tokens"]
    save_adapter(model, tmp_path, "base")
    ours = copy.deepcopy(plain)
    load_adapter(ours, tmp_path)
    assert torch.equal(logits(ours), logits(model))


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # own head, tied head
def test_quantized_and_shared_matrices_stay_what_they_are(family: str) -> None:
    first = tiny_model(family)
    add_lora(first, CONFIG, seed=1, tokens=TOKENS)
    other = copy.deepcopy(first)
    for model in (first, other):
        freeze_quantized(model, "nf4")
    move(first)
    alone = packed_logits(other)
    share_base(first, other)
    assert other.get_input_embeddings().weight is first.get_input_embeddings().weight
    assert torch.equal(packed_logits(other), alone), "each has its own rows"
    assert not torch.equal(packed_logits(first), alone)
    merged = merged_state_dict(first)
    head = "lm_head.weight"
    assert torch.equal(merged[head][sorted(TOKENS)], token_rows(first)[-1].weight)


def test_a_folder_with_rows_is_loaded_live(tmp_path: Path) -> None:
    folder = saved(tiny_model("qwen2"), tmp_path / "base")
    model = adapted(load_causal_lm(folder))
    save_adapter(model, tmp_path / "adapter", folder)
    assert torch.equal(logits(load_causal_lm(tmp_path / "adapter")), logits(model))


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokens that the model has, 0 to 98; got 99 for 'model"):
        add_lora(tiny_model("llama"), CONFIG, seed=1, tokens=(3, 99))
    biased = tiny_model("llama")
    biased.lm_head.bias = nn.Parameter(torch.zeros(99))
    with pytest.raises(ModelError, match=r"head without a bias, .* got one at 'lm_head'"):
        add_lora(biased, CONFIG, seed=1, tokens=TOKENS)
    limited = tiny_model("llama")
    limited.model.embed_tokens.max_norm = 1.0
    with pytest.raises(ModelError, match=r"find a plain nn.Embedding and nn.Linear; got Embedding"):
        add_lora(limited, CONFIG, seed=1, tokens=TOKENS)


@pytest.mark.parametrize(
    ("indices", "found"),
    [
        ({"q_proj": [1, 2]}, r"rows of model.embed_tokens, each token once; got .*'q_proj'"),
        ({"model.embed_tokens": [7, 7, 33]}, "each token once"),
        ({"embed_tokens": [7, 33, 90], "lm_head": [7]}, "the same tokens of an embedding and"),
        ({"model.embed_tokens": [7, 33]}, r"lora_tokens.weight' with shape \(2, 32\); got \(3, 32"),
        (None, "got weight 'model.embed_tokens.token_adapter"),
    ],
)
def test_rows_of_a_folder_that_do_not_fit_are_refused(
    indices: object, found: str, tmp_path: Path
) -> None:
    save_adapter(adapted(tiny_model("qwen2")), tmp_path, "base")
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    assert config["trainable_token_indices"] == {"model.embed_tokens": sorted(TOKENS)}
    file.write_text(json.dumps(config | {"trainable_token_indices": indices}))
    with pytest.raises(ModelError, match=found):
        load_adapter(tiny_model("qwen2"), tmp_path)
