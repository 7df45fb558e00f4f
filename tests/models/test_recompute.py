"""Gradient checkpointing gives the same gradients, LoRA-only included, and does recompute."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.schema import LoraConfig
from tandem.errors import ModelError
from tandem.models.lora import add_lora, lora_parameters
from tandem.models.packed import hidden_states
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.twin import supports_packing, twin_of

from .families import ragged_batch, tiny_model


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


@pytest.mark.parametrize("lora_only", [False, True])
def test_gradients_are_the_same(family: str, lora_only: bool) -> None:
    plain = tiny_model(family)
    if lora_only:
        add_lora(plain, LoraConfig(rank=2), seed=0)
        with torch.no_grad():
            for parameter in lora_parameters(plain):
                parameter += 0.1
    checkpointed = copy.deepcopy(plain)
    enable_gradient_checkpointing(checkpointed)
    expected, runs = _gradients(plain)
    found, runs_again = _gradients(checkpointed)
    if lora_only:
        assert len(found) == len(lora_parameters(checkpointed))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (runs, runs_again) == (1, 2), "the backward pass must run the layers again"


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
