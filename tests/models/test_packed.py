"""The real tokens of a batch side by side give what each row gives alone."""

from __future__ import annotations

import pytest
import torch

from tandem.errors import ShapeError
from tandem.models.packed import (
    hidden_states,
    last_states,
    predictor_states,
)
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.twin import supports_packing
from tandem.types import TokenBatch

from .families import ragged_batch, scaled, tiny_model


@torch.no_grad()
def test_each_row_is_the_row_alone_in_the_models_own_forward(family: str) -> None:
    model = tiny_model(family)
    assert supports_packing(model)
    batch = ragged_batch((9, 5, 21, 1))
    parts = hidden_states(model, batch).split(batch.lengths().tolist())
    for row, part in enumerate(parts):
        ids = batch.token_ids[row : row + 1, : len(part)]
        own = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        assert scaled(part, own, 1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_padded_forward(family: str, checkpointing: bool) -> None:
    model = tiny_model(family).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch = ragged_batch((9, 5, 21, 1))
    weights = torch.randn(batch.token_ids.numel(), generator=torch.Generator().manual_seed(1))
    weights = weights.view_as(batch.token_ids)[batch.attention_mask][:, None]

    padded = model.base_model(
        batch.token_ids, attention_mask=batch.attention_mask.long(), use_cache=False
    ).last_hidden_state[batch.attention_mask]
    (padded * weights).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    if checkpointing:
        enable_gradient_checkpointing(model)
    (hidden_states(model, batch) * weights).sum().backward()
    ours = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == expected.keys()
    # A gradient that is zero by the formula (OPT's key biases) is rounding of the others' size.
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in ours.items():
        apart = (gradient - expected[name]).norm()
        assert apart <= 1e-5 * expected[name].norm() + 1e-7 * largest, name


def test_states_are_those_of_the_tokens_they_speak_of() -> None:
    model = tiny_model("llama")
    ids = torch.tensor([[5, 6, 7, 8], [1, 2, 0, 0]])
    real = torch.tensor([[True] * 4, [True, True, False, False]])
    answered = torch.tensor([[False, False, True, True], [False, True, False, False]])
    batch = TokenBatch(ids, real, answered)
    with torch.no_grad():
        states = hidden_states(model, batch)
        assert torch.equal(predictor_states(model, batch), states[[1, 2, 4]])
        assert torch.equal(last_states(model, batch), states[[3, 5]])


def test_a_response_that_nothing_precedes() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ShapeError, match="must not hold at index 0"):
        predictor_states(tiny_model("llama"), TokenBatch(torch.ones(1, 2).long(), mask, mask))
