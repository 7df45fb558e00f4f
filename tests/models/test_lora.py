"""Adapters: the formula, the bits of the base, the switch, what trains, what the names mean."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandem.config.lora import LoraConfig
from tandem.errors import ModelError
from tandem.models.load import new_causal_lm
from tandem.models.lora import (
    LoraConv1D,
    LoraLinear,
    adapters_off,
    add_lora,
    is_adapted,
    keep_start,
    lora_layers,
    lora_parameters,
    match_targets,
    require_targets,
    train_adapters,
)

from .families import merged_state_dict, ragged_batch, scaled, tiny_model, tiny_scalar

CONFIG = LoraConfig(rank=3, alpha=6.0)


def adapted(family: str, config: LoraConfig = CONFIG) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model with adapters that act, and its untouched twin."""
    plain = tiny_model(family)
    model = copy.deepcopy(plain)
    add_lora(model, config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model, plain


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    batch = ragged_batch((7, 7))
    return model(batch.token_ids).logits


def unchanged(plain: PreTrainedModel) -> torch.Tensor:
    """The plain model's logits by the adapted layers' own product, which sums in its own order."""
    fresh = copy.deepcopy(plain)
    add_lora(fresh, CONFIG, seed=1)
    return logits(fresh)


def test_on_off_and_merged(family: str) -> None:
    model, plain = adapted(family)
    expected = unchanged(plain)
    with_adapters = logits(model)
    assert not scaled(with_adapters, expected, 1e-2), "the adapters must act"
    with adapters_off(model):
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), with_adapters)

    merged = copy.deepcopy(plain)
    state = merged_state_dict(model)
    assert state.keys() == plain.state_dict().keys()
    merged.load_state_dict(state)
    assert scaled(logits(merged), with_adapters)
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), "the base must not move"


def test_new_adapters_change_no_output(family: str) -> None:
    plain = tiny_model(family)
    expected = logits(plain)
    names = add_lora(plain, CONFIG, seed=1)
    on = logits(plain)
    assert scaled(on, expected, 2e-6)  # torch's product and Tandem's
    with adapters_off(plain):
        assert torch.equal(logits(plain), on)
    assert len(names) == len(lora_layers(plain))


def test_the_base_keeps_its_bits_over_a_thousand_switches() -> None:
    model, plain = adapted("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    expected = unchanged(plain)
    for _ in range(1000):
        with adapters_off(model):
            pass
        merged_state_dict(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with adapters_off(model):
        assert torch.equal(logits(model), expected)


def test_the_switch_nests_and_survives_errors() -> None:
    model, plain = adapted("gpt2")
    on, off = logits(model), unchanged(plain)
    with adapters_off(model):
        with adapters_off(model):
            assert torch.equal(logits(model), off)
        assert torch.equal(logits(model), off)

    def fail() -> None:
        with adapters_off(model):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(logits(model), on)


def test_without_adapters_nothing_is_dropped() -> None:
    """A model in training is a reference without dropout, as a frozen copy of it is."""
    model = new_causal_lm(tiny_model("llama").config, seed=0, dropout=0.5)
    add_lora(model, CONFIG, seed=1)
    expected = logits(model.eval())
    model.train()
    assert not scaled(logits(model), expected, 1e-2), "the dropout must act"
    with adapters_off(model):
        assert torch.equal(logits(model), expected)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_an_adapted_layer_follows_the_formula(kind: type) -> None:
    base = nn.Linear(5, 4) if kind is nn.Linear else Conv1D(4, 5)
    layer = LoraLinear(base, 2, 6.0, 0.0) if kind is nn.Linear else LoraConv1D(base, 2, 6.0, 0.0)
    assert layer.weight is base.weight
    assert layer.bias is base.bias
    with torch.no_grad():
        layer.lora_A.weight.normal_()
        layer.lora_B.weight.normal_()
    x = torch.randn(3, 7, 5)
    weight = base.weight if kind is nn.Linear else base.weight.T
    full = weight + 3.0 * layer.lora_B.weight @ layer.lora_A.weight
    torch.testing.assert_close(layer(x), x @ full.T + base.bias)
    stored = full if kind is nn.Linear else full.T
    torch.testing.assert_close(layer.merged_weight(), stored)


def test_a_bf16_base_beside_float32_adapters() -> None:
    base = nn.Linear(5, 4).bfloat16()
    layer = LoraLinear(base, 2, 6.0, 0.0)
    x = torch.randn(3, 5, dtype=torch.bfloat16)
    nn.init.normal_(layer.lora_B.weight)
    nn.init.normal_(layer.lora_A.weight)
    assert layer.lora_A.weight.dtype == torch.float32
    assert layer(x).dtype == torch.bfloat16
    update = 3.0 * x.float() @ layer.lora_A.weight.T @ layer.lora_B.weight.T
    torch.testing.assert_close(layer(x), base(x) + update.bfloat16())
    assert layer.merged_weight().dtype == torch.bfloat16


def test_dropout_is_on_the_adapters_input_alone() -> None:
    layer = LoraLinear(nn.Linear(50, 4), 2, 6.0, 0.5).train()
    x = torch.randn(3, 50)
    assert torch.equal(layer(x), layer(x)), "B is zero: only the base speaks"
    nn.init.normal_(layer.lora_A.weight)
    nn.init.normal_(layer.lora_B.weight)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_adapters_start_from_the_seed_and_from_zeros() -> None:
    models = [tiny_model("llama") for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        add_lora(model, CONFIG, seed)
    first, same, other = (lora_layers(model)[0][1].lora_A.weight for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    for _, layer in lora_layers(models[0]):
        bound = 1 / math.sqrt(layer.lora_A.weight.shape[1])
        assert 0.8 * bound < layer.lora_A.weight.abs().max() <= bound
        assert not layer.lora_B.weight.any()


def test_adapters_and_a_scalar_head_alone_train(family: str) -> None:
    for model, head in ((tiny_model(family), False), (tiny_scalar(family), True)):
        names = add_lora(model, CONFIG, seed=1)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        expected = {f"{n}.lora_{x}.weight" for n in names for x in "AB"}
        assert trained == expected | ({"score.weight"} if head else set())
        assert {id(p) for p in lora_parameters(model)} == {
            id(p) for n, p in model.named_parameters() if n in expected
        }


def test_adapters_are_trained_on() -> None:
    model = tiny_scalar("llama")
    add_lora(model, CONFIG, seed=1)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    model.requires_grad_(False)
    train_adapters(model)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trained


def test_all_linear_leaves_the_heads_out() -> None:
    model = tiny_model("llama")
    per_layer = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    names = match_targets(model, ["all-linear"])
    assert len(names) == 2 * len(per_layer)
    assert {n.rsplit(".", 1)[-1] for n in names} == set(per_layer)
    assert not any("score" in n for n in match_targets(tiny_scalar("llama"), ["all-linear"]))


def test_endings_of_names() -> None:
    model = tiny_model("llama")
    assert add_lora(model, LoraConfig(rank=1, targets=("0.self_attn.q_proj", "down_proj")), 0) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    ]


@pytest.mark.parametrize("target", ["proj", "lm_head", "c_attn"])
def test_a_target_that_matches_nothing(target: str) -> None:
    with pytest.raises(ModelError, match=f"got '{target}', which matches none.*down_proj, gate_p"):
        match_targets(tiny_model("llama"), [target])
    with pytest.raises(ModelError, match=f"of llama; got '{target}', which matches none"):
        require_targets([tiny_model("llama")], ["q_proj", target])


def test_targets_of_models_of_different_families() -> None:
    llama, neox = tiny_model("llama"), tiny_scalar("gpt_neox")
    both = ["q_proj", "v_proj", "query_key_value"]
    require_targets([llama, neox], both)
    assert {n.rsplit(".", 1)[-1] for n in match_targets(llama, both)} == {"q_proj", "v_proj"}
    assert {n.rsplit(".", 1)[-1] for n in match_targets(neox, both)} == {"query_key_value"}
    with pytest.raises(ModelError, match="of llama or gpt_neox; got 'c_attn', which matches none"):
        require_targets([llama, neox], [*both, "c_attn"])
    with pytest.raises(ModelError, match="of gpt_neox; got 'q_proj v_proj', which match none"):
        require_targets([llama, neox], both[:2])


def test_adapting_needs_a_rank_and_happens_once() -> None:
    model = tiny_model("llama")
    with pytest.raises(ModelError, match=r"lora.rank must be at least 1 to adapt; got 0"):
        add_lora(model, LoraConfig(rank=0), seed=0)
    assert not is_adapted(model)
    add_lora(model, CONFIG, seed=0)
    assert is_adapted(model)
    with pytest.raises(ModelError, match="must get its adapters once"):
        add_lora(model, CONFIG, seed=0)


def test_adapters_that_are_trained_on_keep_their_start(family: str) -> None:
    model, _ = adapted(family)
    start = logits(model)
    names = set(merged_state_dict(model))
    keep_start(model)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.1
    moved = logits(model)
    assert not scaled(moved, start, 1e-2)
    with adapters_off(model):
        assert torch.equal(logits(model), start), "off is where it started, not the base"
    assert torch.equal(logits(model), moved)
    assert [p for p in model.parameters() if p.requires_grad] == lora_parameters(model)
    assert match_targets(model, ("all-linear",)) == [name for name, _ in lora_layers(model)]
    merged = merged_state_dict(model)
    assert set(merged) == names
    fresh = tiny_model(family)
    fresh.load_state_dict(merged)
    assert scaled(logits(fresh), moved, 1e-4)
