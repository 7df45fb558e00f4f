"""Gradient checkpointing gives the same gradients, LoRA-only included, and does recompute."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.config.parallel import Recompute
from tandem.errors import ModelError
from tandem.models.load import new_causal_lm
from tandem.models.lora import add_lora, lora_parameters
from tandem.models.packed import hidden_states
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.twin import supports_packing, twin_of
from tests.ops.counting import kept as counted

from .families import ragged_batch, tiny_model

NAMES = {"mlp": "mlp", "self_attn": "attention", "attn": "attention", "attention": "attention"}


def _gradients(model: PreTrainedModel) -> tuple[dict[str, Tensor], int]:
    """Gradients by name, and how often a part of the first layer ran."""
    runs = 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1

    assert supports_packing(model)
    twin = twin_of(model.train())
    blocks = [m for name, m in twin.named_modules() if ".0." in name and not list(m.children())]
    hook = next(m for m in blocks if hasattr(m, "weight")).register_forward_hook(count)
    hidden_states(model, ragged_batch()).square().sum().backward()
    hook.remove()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, runs


def _model(family: str, lora_only: bool) -> PreTrainedModel:
    """A tiny one; with adapters, which then are all that is trained, these are not zero."""
    model = tiny_model(family)
    if lora_only:
        add_lora(model, LoraConfig(rank=2), seed=0)
        with torch.no_grad():
            for parameter in lora_parameters(model):
                parameter += 0.1
    return model


@pytest.mark.parametrize("lora_only", [False, True])
def test_gradients_are_the_same(family: str, lora_only: bool) -> None:
    plain = _model(family, lora_only)
    checkpointed = copy.deepcopy(plain)
    enable_gradient_checkpointing(checkpointed)
    expected, runs = _gradients(plain)
    found, runs_again = _gradients(checkpointed)
    if lora_only:
        assert len(found) == len(lora_parameters(checkpointed))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (runs, runs_again) == (1, 2), "the backward pass must run the layers again"


@pytest.mark.parametrize("recompute", ["mlp", "attention"])
@pytest.mark.parametrize("lora_only", [False, True])
def test_parts_give_the_same_gradients(family: str, recompute: Recompute, lora_only: bool) -> None:
    """To the bit, shared prompts included; and the part runs twice, the other once."""
    if family == "opt" and recompute == "mlp":
        pytest.skip("OPT's MLP is not a module")
    plain = _model(family, lora_only)
    parted = copy.deepcopy(plain)
    enable_gradient_checkpointing(parted, recompute)
    found, kept = [], []
    for model in (plain, parted):
        runs = Counter[str]()
        assert supports_packing(model)  # found out by a forward
        twin = twin_of(model.train())
        for name, module in twin.named_modules():
            if ".0." in name and name.split(".")[-1] in NAMES:
                kind = NAMES[name.split(".")[-1]]
                inner = next(m for m in module.modules() if not list(m.children()))
                inner.register_forward_hook(lambda *_, kind=kind, runs=runs: runs.update([kind]))
        with counted() as storages:
            states = hidden_states(model, ragged_batch())
        states.square().sum().backward()
        kept.append(sum(storages.values()))
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        again = 2 if model is parted else 1
        assert runs[recompute] == again
        other = "attention" if recompute == "mlp" else "mlp"
        assert family == "opt" or runs[other] == 1
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][name], found[0][name]) for name in found[0])
    assert kept[1] < kept[0]


def test_a_family_without_the_part() -> None:
    with pytest.raises(ModelError, match=r"keep their mlp in a module .* got self_attn, .*fc1"):
        enable_gradient_checkpointing(tiny_model("opt"), "mlp")


def test_a_family_that_runs_by_its_own_forward_is_refused() -> None:
    bloom = AutoConfig.for_model("bloom", vocab_size=99, hidden_size=32, n_layer=2, n_head=4)
    model = new_causal_lm(bloom, seed=0)
    enable_gradient_checkpointing(model, "mlp")
    with pytest.raises(ModelError, match=r"must be layers: .*bloom.* Use --recompute layers"):
        hidden_states(model.train(), ragged_batch())
    with torch.no_grad():
        hidden_states(model, ragged_batch())


def test_no_hook_stays_on_the_embeddings() -> None:
    model = tiny_model("llama")
    enable_gradient_checkpointing(model)
    assert not model.get_input_embeddings()._forward_hooks
    with torch.inference_mode():
        model.train()(ragged_batch((4, 4)).token_ids, use_cache=False)


def test_a_family_without_support() -> None:
    model = tiny_model("llama")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match="family 'llama' must support gradient checkpointing"):
        enable_gradient_checkpointing(model)
