"""Rows that begin with the same prompt run it once, and compute what each row computes alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.engine.forward import response_logprobs, sequence_scores, token_values
from tandem.models import packed
from tandem.models.beginnings import prompt_groups
from tandem.models.lora import add_lora
from tandem.models.packed import packed_rows, predictor_states, shares_prompts
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.ops import attention, native
from tandem.types import TokenBatch

from .alike_rows import BATCHES, GROUPS, grouped_batch
from .families import tiny_model, tiny_scalar


def unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "shares_prompts", lambda model: False)


def gradients(
    model: PreTrainedModel, forward: Callable[[], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs, and the gradient of their sum with other weights each."""
    model.zero_grad()
    found = forward()
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    return found.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def require_same(
    model: PreTrainedModel,
    forward: Callable[[], Tensor],
    monkeypatch: pytest.MonkeyPatch,
    within: float = 1e-6,
) -> None:
    """The outputs to the last bit (with the C++ operations), the gradients within rounding."""
    shared, ours = gradients(model, forward)
    unshared(monkeypatch)
    alone, theirs = gradients(model, forward)
    if native.available() and attention._native(torch.float32):
        assert torch.equal(shared, alone)
    assert torch.allclose(shared, alone, atol=1e-5)
    assert ours.keys() == theirs.keys()
    assert ours
    # A gradient that is zero by the formula (OPT's key biases) is rounding of the others' size.
    largest = max(float(gradient.norm()) for gradient in theirs.values())
    for name, gradient in ours.items():
        apart = float((gradient - theirs[name]).norm())
        assert apart <= within * float(theirs[name].norm()) + 1e-7 * largest, name


def test_tokens_stand_once() -> None:
    batch = TokenBatch(
        torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0], [5, 6, 8, 9], [5, 6, 7, 0]]),
        torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]).bool(),
        torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]).bool(),
    )
    assert [(group.rows, group.prompt_tokens) for group in prompt_groups(batch)] == [
        ([0, 2], 2),
        ([1], 1),
        ([3], 0),
    ]
    rows = packed_rows(batch, batch.attention_mask, shares=True)
    assert rows.token_ids.tolist() == [5, 6, 7, 8, 9, 8, 9, 5, 6, 7]
    assert rows.positions.tolist() == [0, 1, 2, 2, 3, 0, 1, 0, 1, 2]
    assert rows.step.cu_seqlens.tolist() == [0, 2, 3, 5, 7, 10]
    assert rows.step.prefixes is not None
    assert rows.step.prefixes.tolist() == [-1, 0, 0, -1, -1]
    assert rows.step.max_length == 4
    assert rows.asked is not None
    assert torch.equal(rows.token_ids[rows.asked], batch.token_ids[batch.attention_mask])
    assert rows.step.wanted is None


def test_tokens_that_nothing_asked_for_depends_on() -> None:
    real = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    answered = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 1, 0, 1], [0, 1, 0, 0, 0]])
    ids = torch.tensor([[5, 6, 7, 8, 0], [5, 6, 9, 0, 0], [5, 6, 7, 3, 4], [5, 6, 0, 0, 0]])
    batch = TokenBatch(ids, real.bool(), answered.bool())
    asked = answered.bool().roll(-1, 1)
    before = real.bool() & (asked.flip(1).cumsum(1) > 0).flip(1)
    rows = packed_rows(batch, before, asked, shares=True)
    # The prompt 5 6 of three rows, the answers 7 and 7 3, whose other row is the prompt alone; then
    # the prompt 5.
    assert rows.token_ids.tolist() == [5, 6, 7, 7, 3, 5]
    assert rows.positions.tolist() == [0, 1, 2, 2, 3, 0]
    assert rows.step.cu_seqlens.tolist() == [0, 2, 3, 5, 6]
    assert rows.step.prefixes is not None
    assert rows.step.prefixes.tolist() == [-1, 0, 0, -1]
    assert rows.step.wanted is not None
    assert rows.step.wanted.rows.tolist() == [1, 2, 4, 5]
    assert rows.asked is not None
    assert rows.asked.tolist() == [0, 1, 0, 0, 2, 3]
    alone = packed_rows(batch, before, asked)
    assert alone.token_ids.tolist() == [5, 6, 7, 5, 6, 5, 6, 7, 3, 5]
    assert alone.step.wanted is not None
    assert alone.step.wanted.rows.tolist() == [1, 2, 4, 6, 8, 9]
    assert alone.asked is None


@pytest.mark.parametrize("groups", GROUPS)
def test_logprobs_and_gradients(family: str, groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model(family), grouped_batch(GROUPS[groups])
    assert shares_prompts(model)
    require_same(model, lambda: response_logprobs(model, batch)[0], monkeypatch)


@pytest.mark.parametrize("count", range(1, 10))
def test_every_number_of_answers(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    batch = grouped_batch([(21, range(1, count + 1)), (4, range(count, 0, -1))])
    rows = packed_rows(batch, batch.attention_mask, shares=True)
    assert (rows.step.prefixes is None) == (count == 1)
    require_same(model, lambda: response_logprobs(model, batch)[0], monkeypatch)


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
@pytest.mark.parametrize("function", [token_values, sequence_scores])
def test_values_and_scores(
    family: str,
    function: Callable[[PreTrainedModel, TokenBatch], Tensor],
    rows: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = tiny_scalar(family), BATCHES[rows]
    require_same(model, lambda: function(model, batch), monkeypatch)


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_plain_torch_writes_the_sequences_out(
    family: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_native", lambda dtype: False)
    model, batch = tiny_model(family), BATCHES[rows]
    # torch's own kernels add up in another order for other shapes.
    require_same(model, lambda: response_logprobs(model, batch)[0], monkeypatch, within=4e-6)


@pytest.mark.parametrize("rows", BATCHES)
def test_gradient_checkpointing_and_adapters(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model("llama").train(), BATCHES[rows]
    add_lora(model, LoraConfig(rank=2), seed=1)
    enable_gradient_checkpointing(model)
    require_same(model, lambda: response_logprobs(model, batch)[0], monkeypatch)


@pytest.mark.parametrize("rows", BATCHES)
def test_bfloat16_forward_is_the_same(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model("llama").bfloat16(), BATCHES[rows]
    with torch.no_grad():
        shared = predictor_states(model, batch)
        unshared(monkeypatch)
        assert torch.equal(shared, predictor_states(model, batch))


def test_dropout_draws_for_every_row() -> None:
    model = tiny_model("llama", attention_dropout=0.1)
    assert shares_prompts(model)
    model.config.attention_dropout = 0.1
    assert shares_prompts(model.eval())
    assert not shares_prompts(model.train())


def test_a_rope_that_follows_the_length_shares_nothing() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 8,
    }
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=64)
    assert not shares_prompts(model)
