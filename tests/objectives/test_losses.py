"""Losses against slow loops, and against each other when a step is cut up differently."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import ShapeError
from tandem.objectives.losses import (
    dpo_loss,
    explained_variance,
    pairwise_loss,
    sft_loss,
    value_loss,
)
from tandem.objectives.masked import masked_mean, masked_std, masked_sum, whiten
from tandem.objectives.policy import aggregation, policy_loss


def test_sft_loss_counts_eos_though_it_equals_the_pad() -> None:
    logprobs = torch.tensor([[0.0, -1.0, -2.0, -99.0]])
    mask = torch.tensor([[False, True, True, False]])  # index 2 is EOS, index 3 a pad of that id
    assert sft_loss(logprobs, mask).item() == 3.0


def slow_policy_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    adv: torch.Tensor,
    mask: torch.Tensor,
    low: float,
    high: float,
    weights: torch.Tensor,
) -> tuple[float, int]:
    total, clipped = 0.0, 0
    for i in range(new.shape[0]):
        for t in range(new.shape[1]):
            if mask[i, t]:
                ratio = math.exp(new[i, t].item() - old[i, t].item())
                a = adv[i, t].item()
                bounded = min(max(ratio, 1 - low), 1 + high)
                total -= weights[i, t].item() * min(ratio * a, bounded * a)
                clipped += bounded * a < ratio * a
    return total, clipped


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.05, 0.5), st.floats(0.05, 0.5), st.booleans())
def test_policy_loss_equals_a_slow_loop(
    seed: int, low: float, high: float, is_weighted: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(3, 5, generator=generator)
    new = old + 0.4 * torch.randn(3, 5, generator=generator)
    adv = torch.randn(3, 5, generator=generator)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    weights = torch.rand(3, 5, generator=generator) if is_weighted else None
    result = policy_loss(new, old, adv, mask, clip_low=low, clip_high=high, token_weights=weights)
    ones = torch.ones(3, 5)
    expected, clipped = slow_policy_loss(
        new, old, adv, mask, low, high, ones if weights is None else weights
    )
    assert result.loss.item() == pytest.approx(expected, abs=1e-4)
    assert result.clipped.item() == clipped


def test_policy_loss_of_an_unchanged_policy() -> None:
    """Ratio 1, KL 0, and the gradient of plain policy gradient: -A on each response token."""
    logprobs = torch.randn(2, 4, requires_grad=True)
    adv = torch.randn(2, 4)
    mask = torch.tensor([[False, True, True, True], [False, False, True, False]])
    result = policy_loss(logprobs, logprobs.detach(), adv, mask, clip_low=0.2, clip_high=0.2)
    result.loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.where(mask, -adv, 0.0))
    assert result.kl.item() == 0.0
    assert result.abs_log_ratio.item() == 0.0
    assert result.ratio.item() == mask.sum().item()
    assert result.max_ratio.item() == 1.0


def test_the_clip_stops_the_gradient_only_where_it_would_go_further() -> None:
    old = torch.zeros(1, 4)
    new = torch.tensor([[0.5, 0.5, -0.5, -0.5]], requires_grad=True)
    adv = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    policy_loss(new, old, adv, torch.ones(1, 4).bool(), clip_low=0.2, clip_high=0.2).loss.backward()
    assert new.grad is not None
    assert (new.grad == 0).tolist() == [[True, False, False, True]]


def test_values_off_the_response_never_reach_a_loss() -> None:
    mask = torch.tensor([[False, True]])
    bad = torch.tensor([[math.nan, 1.0]], requires_grad=True)
    zero = torch.zeros(1, 2)
    result = policy_loss(bad, zero, zero + 1, mask, clip_low=0.2, clip_high=0.2)
    result.loss.backward()
    assert math.isfinite(result.loss.item())
    assert bad.grad is not None
    assert bad.grad.tolist()[0][0] == 0.0


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


def test_dpo_loss_by_hand_and_at_the_reference() -> None:
    zero = torch.zeros(2)
    start = dpo_loss(zero, zero, zero, zero, beta=0.1)
    assert start.loss.item() == pytest.approx(2 * math.log(2))
    result = dpo_loss(
        torch.tensor([-1.0]),
        torch.tensor([-5.0]),
        torch.tensor([-2.0]),
        torch.tensor([-4.0]),
        beta=0.5,
        label_smoothing=0.1,
    )
    margin = 0.5 * (1.0 - (-1.0))
    expected = -0.9 * math.log(1 / (1 + math.exp(-margin))) - 0.1 * math.log(
        1 / (1 + math.exp(margin))
    )
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)
    assert (result.chosen_reward.item(), result.rejected_reward.item()) == (0.5, -0.5)


def test_sums_do_not_depend_on_how_a_step_is_cut() -> None:
    new, old, adv = torch.randn(6, 5), torch.randn(6, 5), torch.randn(6, 5)
    mask = torch.rand(6, 5) < 0.5
    whole = policy_loss(new, old, adv, mask, clip_low=0.2, clip_high=0.2).loss
    parts = sum(
        policy_loss(new[i], old[i], adv[i], mask[i], clip_low=0.2, clip_high=0.2).loss
        for i in torch.arange(6).split(4)
    )
    torch.testing.assert_close(whole, parts)


def test_masked_statistics_ignore_what_is_masked_even_nan() -> None:
    values = torch.tensor([1.0, 3.0, math.nan])
    mask = torch.tensor([True, True, False])
    assert masked_sum(values, mask).item() == 4.0
    assert masked_mean(values, mask).item() == 2.0
    assert masked_std(values, mask).item() == 1.0
    assert whiten(values, mask).tolist() == [-1.0, 1.0, 0.0]
    assert masked_mean(values, torch.zeros(3).bool()).item() == 0.0


def test_whitening_equal_values_gives_zeros() -> None:
    mask = torch.ones(3).bool()
    assert whiten(torch.full((3,), 0.1), mask).tolist() == [0.0, 0.0, 0.0]


def test_explained_variance() -> None:
    returns = torch.tensor([[1.0, 2.0, 3.0]])
    mask = torch.ones(1, 3).bool()
    assert explained_variance(returns, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(1, 3), returns, mask) == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones(1, 3), mask) == 0.0


def test_losses_refuse_shapes_that_disagree() -> None:
    with pytest.raises(ShapeError, match="must share one shape"):
        pairwise_loss(torch.zeros(2), torch.zeros(3))


def test_aggregation_by_token_and_by_sequence() -> None:
    """Two answers of one and three tokens, one row without any."""
    mask = torch.tensor([[False, True, False, False], [False, True, True, True], [False] * 4])
    losses = torch.tensor([[0.0, 6.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0], [9.0] * 4])
    weights, count = aggregation(mask, "token")
    assert (weights, count) == (None, 4)
    weights, count = aggregation(mask, "sequence")
    assert weights is not None
    mean = masked_sum(losses * weights, mask) / count
    assert (count, mean.item()) == (2, pytest.approx((6.0 + 2.0) / 2))
