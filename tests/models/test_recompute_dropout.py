"""Recomputed layers drop out what their first forward did."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.config.parallel import Recompute
from tandem.models.load import new_causal_lm
from tandem.models.lora import add_lora, lora_parameters
from tandem.models.packed import hidden_states
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.types import TokenBatch

from .alike_rows import grouped_batch
from .families import ragged_batch, tiny_config

ROWS = {"ragged": ragged_batch, "shared prompts": lambda: grouped_batch([(20, (4, 7)), (5, (3,))])}


def _gradients(model: PreTrainedModel, batch: TokenBatch, seed: int) -> dict[str, Tensor]:
    model.train()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    hidden_states(model, batch).square().sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("recompute", ["layers", "mlp", "attention"])
@pytest.mark.parametrize("lora_rate", [None, 0.0, 0.3])
def test_dropout_is_the_same_again(
    family: str, recompute: Recompute, lora_rate: float | None, rows: str
) -> None:
    if family == "opt" and recompute == "mlp":
        pytest.skip("OPT's MLP is not a module")
    rate = 0.3 if lora_rate != 0.3 else 0.0
    plain = new_causal_lm(tiny_config(family), seed=0, dropout=rate)
    if lora_rate is not None:
        add_lora(plain, LoraConfig(rank=2, dropout=lora_rate), seed=0)
        with torch.no_grad():
            for parameter in lora_parameters(plain):
                parameter += 0.1
    recomputed = copy.deepcopy(plain)
    enable_gradient_checkpointing(recomputed, recompute)
    batch = ROWS[rows]()
    expected, other = _gradients(plain, batch, 1), _gradients(plain, batch, 2)
    found = _gradients(recomputed, batch, 1)
    assert found.keys() == expected.keys()
    assert any(not torch.equal(other[name], expected[name]) for name in expected), "it drops out"
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
