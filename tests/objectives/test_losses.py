"""Losses against slow loops, and against each other when a step is cut up differently."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.errors import ShapeError
from tandem.objectives.losses import (
    dft_loss,
    explained_variance,
    pairwise_loss,
    sft_loss,
    value_loss,
)
from tandem.objectives.masked import masked_mean, masked_std, masked_sum, whiten


def test_sft_loss_counts_eos_though_it_equals_the_pad() -> None:
    logprobs = torch.tensor([[0.0, -1.0, -2.0, -99.0]])
    mask = torch.tensor([[False, True, True, False]])  # index 2 is EOS, index 3 a pad of that id
    assert sft_loss(logprobs, mask).item() == 3.0


def test_dft_loss_weighs_each_token_by_its_probability_without_a_gradient() -> None:
    logprobs = (-3 * torch.rand(3, 4)).requires_grad_()
    mask = torch.rand(3, 4) < 0.7
    loss = dft_loss(logprobs, mask)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = 0.0
    for i in range(3):
        for t in range(4):
            p = math.exp(logprobs[i, t].item()) if mask[i, t] else 0.0
            expected -= p * logprobs[i, t].item()
            assert gradient[i, t].item() == pytest.approx(-p)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_value_loss_equals_a_slow_loop() -> None:
    values, old, returns = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
    mask = torch.rand(3, 4) < 0.7
    expected, clipped = 0.0, 0
    for i in range(3):
        for t in range(4):
            if mask[i, t]:
                v, o, r = values[i, t].item(), old[i, t].item(), returns[i, t].item()
                near = min(max(v, o - 0.2), o + 0.2)
                expected += 0.5 * max((v - r) ** 2, (near - r) ** 2)
                clipped += (near - r) ** 2 > (v - r) ** 2
    result = value_loss(values, old, returns, mask, value_clip=0.2)
    assert result.loss.item() == pytest.approx(expected, rel=1e-5)
    assert result.clipped.item() == clipped
    plain = value_loss(values, old, returns, mask, value_clip=0.0)
    assert plain.loss.item() == pytest.approx(
        0.5 * ((values - returns) ** 2)[mask].sum().item(), rel=1e-5
    )


def test_pairwise_loss_by_hand() -> None:
    result = pairwise_loss(
        torch.tensor([2.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 3.0]), center_coef=0.1
    )
    bradley_terry = -sum(math.log(1 / (1 + math.exp(-m))) for m in (1.0, 0.0, -2.0))
    assert result.loss.item() == pytest.approx(bradley_terry + 0.1 * (9 + 0 + 16), rel=1e-6)
    assert result.accuracy.item() == 1.5
    assert result.margin.item() == -1.0


def test_masked_statistics_ignore_what_is_masked_even_nan() -> None:
    values = torch.tensor([1.0, 3.0, math.nan])
    mask = torch.tensor([True, True, False])
    assert masked_sum(values, mask).item() == 4.0
    assert masked_mean(values, mask).item() == 2.0
    assert masked_std(values, mask).item() == 1.0
    assert whiten(values, mask).tolist() == [-1.0, 1.0, 0.0]
    assert masked_mean(values, torch.zeros(3).bool()).item() == 0.0


@pytest.mark.parametrize("value", [0.1, -0.3, 5.3, 492.9])
@pytest.mark.parametrize("correction", [0, 1])
def test_whitening_equal_values_gives_zeros(value: float, correction: int) -> None:
    """However many they are, though the mean of so many floats is a rounding error off."""
    for size in (1, 3, 7, 100, 1000, 12345):
        values = torch.full((size,), value)
        assert not whiten(values, torch.ones(size).bool(), correction=correction).any(), size
    values[0] = torch.nan
    assert not whiten(values, torch.arange(len(values)) > 0, correction=correction).any()
    assert not whiten(values, torch.zeros(len(values)).bool(), correction=correction).any()


def test_explained_variance() -> None:
    returns = torch.tensor([[1.0, 2.0, 3.0]])
    mask = torch.ones(1, 3).bool()
    assert explained_variance(returns, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(1, 3), returns, mask) == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones(1, 3), mask) == 0.0
    assert explained_variance(returns, returns, ~mask) == 0.0
    values, mask = torch.arange(1000.0), torch.ones(1000).bool()
    for same in (0.1, 5.3, 492.9):
        assert explained_variance(values, torch.full((1000,), same), mask) == 0.0


def test_losses_refuse_shapes_that_disagree() -> None:
    with pytest.raises(ShapeError, match="must share one shape"):
        pairwise_loss(torch.zeros(2), torch.zeros(3))
