"""What is changed on a model after its twin exists reaches the twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.engine.forward import response_logprobs
from tandem.errors import ModelError
from tandem.models import twin as twins
from tandem.models.lora import add_lora
from tandem.models.packed import drops_now, hidden_states, shares_prompts
from tandem.models.scalar import sequence_scores, token_values
from tandem.models.selfcheck import check_twin
from tandem.models.twin import compares_once, kv_shapes, twin_of

from .families import FAMILIES, ragged_batch, scaled, tiny_model, tiny_scalar


def own_states(model: PreTrainedModel, lengths: tuple[int, ...] = (9, 5)) -> Tensor:
    batch = ragged_batch(lengths)
    rows = []
    for ids, mask in zip(batch.token_ids, batch.attention_mask, strict=True):
        output = model.base_model(input_ids=ids[mask][None], use_cache=False)
        rows.append(output.last_hidden_state[0])
    return torch.cat(rows)


@pytest.mark.parametrize("size", [98, 100, 112, 60])
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_that_are_resized(size: int, tied: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    check_twin(model)
    model.resize_token_embeddings(size)
    assert check_twin(model).gap < 1e-5
    assert twin_of(model).lm_head.out_features == size  # type: ignore[union-attr]


def set_dropout(model: PreTrainedModel, rate: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name in ("dropout", "attention_dropout"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, rate)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "llama"])
def test_dropout_that_is_switched(family: str) -> None:
    model = tiny_model(family).train()
    batch = ragged_batch()
    without = hidden_states(model, batch)
    assert not drops_now(model)
    set_dropout(model, 0.3)
    assert drops_now(model)
    assert not drops_now(model.eval())
    model.train()
    assert not torch.equal(hidden_states(model, batch), hidden_states(model, batch))
    set_dropout(model, 0.0)
    assert not drops_now(model)
    assert torch.equal(hidden_states(model, batch), without)


@pytest.mark.parametrize("rate", [1, 0.3, np.float64(0.3)])
def test_dropout_is_seen_whatever_its_rate_is_kept_as(rate: Any) -> None:
    model = tiny_model("llama").train()
    assert shares_prompts(model)
    attention: Any = model.get_submodule("model.layers.1.self_attn")
    attention.attention_dropout = rate
    assert not shares_prompts(model)
    attention.attention_dropout = 0.0
    assert shares_prompts(model)
    model.config.attention_dropout = rate
    assert not shares_prompts(model)


def test_dropout_of_adapters_is_seen() -> None:
    model = tiny_model("llama").train()
    add_lora(model, LoraConfig(rank=2, dropout=0.1), seed=1)
    assert drops_now(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert not drops_now(model)


def test_a_call_compares_once_and_the_next_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_scalar("llama")
    twin, batch = twin_of(model), ragged_batch()
    compared: list[PreTrainedModel] = []
    update = twins.Modules.update

    def counted(self: Any, model: PreTrainedModel) -> bool:
        compared.append(model)
        return update(self, model)

    monkeypatch.setattr(twins.Modules, "update", counted)
    for forward in (token_values, sequence_scores, hidden_states):
        compared.clear()
        forward(model=model, batch=batch)
        assert compared == [model]
    policy = tiny_model("llama")
    twin_of(policy)
    compared.clear()
    response_logprobs(policy, batch)
    assert compared == [policy]

    @compares_once
    def fails(model: PreTrainedModel) -> None:
        assert twin_of(model) is twin
        raise KeyError

    with pytest.raises(KeyError):
        fails(model)
    assert not twins._compared.twins
    model.model.norm.variance_epsilon = 0.5  # type: ignore[union-attr]
    assert twin_of(model) is not twin


@torch.no_grad()
def test_a_window_that_is_taken_from_the_config() -> None:
    model = tiny_model("mistral").eval()
    narrow = hidden_states(model, ragged_batch((9, 5)))
    assert scaled(narrow, own_states(model))
    model.config.sliding_window = None
    wide = hidden_states(model, ragged_batch((9, 5)))
    assert not scaled(wide, narrow, 1e-3)
    assert scaled(wide, own_states(model))


@torch.no_grad()
def test_an_epsilon_and_a_scale_of_one_layer() -> None:
    model: Any = tiny_model("llama").eval()
    hidden_states(model, ragged_batch((9, 5)))
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5
    assert scaled(hidden_states(model, ragged_batch((9, 5))), own_states(model))
    model.model.layers[0].self_attn.scaling = 0.9
    assert scaled(hidden_states(model, ragged_batch((9, 5))), own_states(model))


def swapped(layers: nn.ModuleList) -> list[nn.Module]:
    layers[0], layers[1] = layers[1], layers[0]
    return list(layers)


def in_two_places(layers: nn.ModuleList) -> list[nn.Module]:
    old = list(layers)
    layers[1].mlp = layers[0].mlp  # type: ignore[union-attr]
    return old


def replaced_and_kept(layers: nn.ModuleList) -> list[nn.Module]:
    old: Any = layers[1]
    kept = old.mlp.up_proj
    old.mlp.up_proj = nn.Linear(kept.in_features, kept.out_features, bias=False)
    return [kept]


def replaced_and_freed(layers: nn.ModuleList) -> list[nn.Module]:
    replaced_and_kept(layers)
    return []


def gone(layers: nn.ModuleList) -> list[nn.Module]:
    old = list(layers)
    del layers[1]
    return old


@pytest.mark.parametrize(
    "change", [swapped, in_two_places, replaced_and_kept, replaced_and_freed, gone]
)
@torch.no_grad()
def test_a_tree_that_is_changed(change: Any) -> None:
    model: Any = tiny_model("llama").eval()
    before = hidden_states(model, ragged_batch((9, 5)))
    held = change(model.model.layers)  # the old modules live on, or do not
    model.config.num_hidden_layers = len(model.model.layers)
    now = hidden_states(model, ragged_batch((9, 5)))
    assert not scaled(now, before, 1e-3)
    assert scaled(now, own_states(model))
    del held


@pytest.mark.parametrize("family", FAMILIES)
def test_a_twin_is_not_made_anew_for_nothing(family: str, tmp_path: Any) -> None:
    model = tiny_model(family)
    twin = twin_of(model)
    model.train()
    model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]]))
    hidden_states(model, ragged_batch())
    model.eval()
    model.save_pretrained(tmp_path)
    model.config.eos_token_id = 3
    assert twin_of(model) is twin


def test_a_changed_config_needs_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    shapes, twin = kv_shapes(model), twin_of(model)
    monkeypatch.setattr(twins, "_recorded", None)  # which all ranks would have to run
    model.config.rms_norm_eps = 0.5
    assert twin_of(model) is not twin
    assert kv_shapes(model) == shapes


def wrapped(module: Any) -> None:
    """What a wrapper does to an object: its new forward calls the old one."""
    old = module.forward
    module.forward = lambda *args, **kwargs: old(*args, **kwargs)


def test_a_forward_set_on_an_object_is_computed_or_refused() -> None:
    model: Any = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    check_twin(model)
    mlp.forward = lambda x: 3 * type(mlp).forward(mlp, x)  # after the twin was made
    assert check_twin(model).gap < 1e-5
    del mlp.forward
    assert check_twin(model).gap < 1e-5
    wrapped(model.model.layers[1].self_attn)
    with pytest.raises(ModelError, match=r"Module 'model.layers.1.self_attn' has a forward set on"):
        check_twin(model)
    del model.model.layers[1].self_attn.forward
    wrapped(model)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM must compute by its class's forward;"):
        twin_of(model)
