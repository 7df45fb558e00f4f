"""The real tokens of a batch side by side give what each row gives alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.config.parallel import Recompute
from tandem.errors import ShapeError
from tandem.models.packed import (
    hidden_states,
    last_states,
    narrows,
    predictor_states,
    response_tokens,
)
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.twin import supports_packing, twin_of
from tandem.models.twin_layers import TwinGatedMLP
from tandem.ops import layer, native
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
    assert response_tokens(batch, 3).tolist() == [7, 8, 2]


@pytest.mark.parametrize("asks", [predictor_states, last_states])
@pytest.mark.parametrize("recompute", [None, "layers", "mlp", "attention"])
def test_what_nobody_asks_for_is_left_out(
    family: str, asks: Callable[..., Tensor], recompute: Recompute | None
) -> None:
    """The bits of all tokens' states, and the gradients of those asked for."""
    model = tiny_model(family).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if recompute is not None:
        if family == "opt" and recompute == "mlp":
            pytest.skip("no module of its own")
        enable_gradient_checkpointing(model, recompute)
    # One token, two turns, an answer before other text, and a row without any.
    batch = ragged_batch((9, 2, 21, 6, 4))
    answered = batch.response_mask & False
    answered[0, 4:9] = answered[1, 1] = answered[2, 3:5] = answered[2, 12:17] = True
    answered[3, 2:4] = True
    batch = TokenBatch(batch.token_ids, batch.attention_mask, answered)
    asked = answered.roll(-1, 1)
    if asks is last_states:
        asked = torch.zeros_like(answered)
        asked[torch.arange(5), batch.lengths() - 1] = True

    def found_of(states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
        (states * weights).sum().backward()
        named = model.named_parameters()
        return states.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}

    states, ours = found_of(asks(model, batch))
    whole, theirs = found_of(hidden_states(model, batch)[asked[batch.attention_mask]])
    if native.available():
        assert torch.equal(states, whole)
    assert scaled(states, whole, 1e-5)
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.norm()) for gradient in theirs.values())
    for name, gradient in ours.items():
        apart = float((gradient - theirs[name]).norm())
        assert apart <= 1e-6 * float(theirs[name].norm()) + 1e-7 * largest, name


def test_rows_without_any_answer_run_all_the_same() -> None:
    model, batch = tiny_model("llama"), ragged_batch((4, 2))
    batch = TokenBatch(batch.token_ids, batch.attention_mask, batch.response_mask & False)
    states = predictor_states(model, batch)
    assert states.shape == (0, model.config.hidden_size)
    states.sum().backward()
    assert all(p.grad is not None for p in model.model.layers.parameters())


@pytest.mark.parametrize("plain", [True, False])
def test_the_last_block_goes_on_with_few(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its MLP, be it part of one operation or a module of its own."""
    if plain and not native.available():
        pytest.skip(native.why_not())
    rows: list[int] = []
    after, gated = layer.after_attention, TwinGatedMLP.forward

    def counted(attended: Tensor, *others: Any, **keywords: Any) -> Tensor:
        rows.append(attended.shape[1])
        return after(attended, *others, **keywords)

    def run(self: TwinGatedMLP, x: Tensor) -> Tensor:
        rows.append(x.shape[1])
        return gated(self, x)

    monkeypatch.setattr(layer, "after_attention", counted)
    monkeypatch.setattr(TwinGatedMLP, "forward", run)
    if not plain:
        monkeypatch.setattr(layer, "takes", lambda x: False)
    model, batch = tiny_model("llama"), ragged_batch((9, 5))
    assert narrows(model)
    twin_of(model)
    rows.clear()
    answers = int(batch.response_mask.sum())
    with torch.no_grad():
        assert len(predictor_states(model, batch)) == answers
        last_states(model, batch)
        hidden_states(model, batch)
    assert rows == [12, answers, 14, 2, 14, 14]


def test_a_response_that_nothing_precedes() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ShapeError, match="must not hold at index 0"):
        predictor_states(tiny_model("llama"), TokenBatch(torch.ones(1, 2).long(), mask, mask))
