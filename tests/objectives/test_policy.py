"""Policy losses against slow loops, at ratio 1, and when a step is cut up differently."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.errors import ShapeError
from tandem.objectives.masked import masked_sum
from tandem.objectives.policy import (
    PolicyLoss,
    aggregation,
    capped_reinforce_loss,
    policy_loss,
    sequence_ratio_loss,
)


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
    less = policy_loss(logprobs - 0.5, logprobs, adv, mask, clip_low=0.2, clip_high=0.2)
    assert less.max_ratio.item() == pytest.approx(math.exp(-0.5))  # other places have none


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


def test_sums_do_not_depend_on_how_a_step_is_cut() -> None:
    new, old, adv = torch.randn(6, 5), torch.randn(6, 5), torch.randn(6, 5)
    mask = torch.rand(6, 5) < 0.5
    whole = policy_loss(new, old, adv, mask, clip_low=0.2, clip_high=0.2).loss
    parts = sum(
        policy_loss(new[i], old[i], adv[i], mask[i], clip_low=0.2, clip_high=0.2).loss
        for i in torch.arange(6).split(4)
    )
    torch.testing.assert_close(whole, parts)


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

    weights, count = aggregation(mask, "constant", max_tokens=10)
    assert (weights, count) == (None, 20), "neither a row's length nor the longest's matters"


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """new, old, advantages, mask, weights."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(3, 5, generator=generator)
    new = old + 0.6 * torch.randn(3, 5, generator=generator)
    advantages = torch.randn(3, 5, generator=generator)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    return new, old, advantages, mask, torch.rand(3, 5, generator=generator)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_the_dual_clip_equals_a_slow_loop(seed: int) -> None:
    new, old, advantages, mask, weights = drawn(seed)
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}
    found = policy_loss(new, old, advantages, mask, **bounds, token_weights=weights)
    total, low, high = 0.0, 0, 0
    for row, t in mask.nonzero().tolist():
        ratio, a = math.exp(new[row, t] - old[row, t]), float(advantages[row, t])
        if a > 0:
            total -= float(weights[row, t]) * min(ratio, 1.28) * a
            high += ratio > 1.28
        else:
            total -= float(weights[row, t]) * min(max(ratio, 0.8), 1.5) * a
            low += ratio < 0.8
            high += ratio > 1.5
    assert float(found.loss) == pytest.approx(total, abs=1e-4)
    assert (int(found.clipped_low), int(found.clipped_high)) == (low, high)
    assert int(found.clipped) == low + high


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_cispo_equals_a_slow_loop_and_cuts_no_gradient(seed: int) -> None:
    new, old, advantages, mask, weights = drawn(seed)
    advantages[0] = 0.0  # what has no weight loses none
    leaf = new.clone().requires_grad_()
    found = capped_reinforce_loss(leaf, old, advantages, mask, max_ratio=1.3, token_weights=weights)
    found.loss.backward()
    total, high = 0.0, 0
    gradient = torch.zeros_like(old)
    for row, t in mask.nonzero().tolist():
        ratio = math.exp(new[row, t] - old[row, t])
        weight = float(weights[row, t]) * min(ratio, 1.3) * float(advantages[row, t])
        total -= weight * float(new[row, t])
        gradient[row, t] = -weight
        high += ratio > 1.3 and advantages[row, t] != 0
    assert found.loss.item() == pytest.approx(total, abs=1e-3)
    assert (int(found.clipped_low), int(found.clipped_high)) == (0, high)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, gradient, atol=1e-5, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_gspo_equals_a_slow_loop(seed: int) -> None:
    new, old, _, mask, _ = drawn(seed)
    mask[:, 0] = True
    advantages = torch.tensor([1.0, -0.5, 2.0])[:, None].expand(3, 5)
    weights, count = aggregation(mask, "sequence")
    found = sequence_ratio_loss(
        new, old, advantages, mask, clip_low=0.1, clip_high=0.05, token_weights=weights
    )
    total, low, high = 0.0, 0, 0
    for row in range(3):
        gaps = [float(new[row, t] - old[row, t]) for t in range(5) if mask[row, t]]
        ratio, a = math.exp(sum(gaps) / len(gaps)), float(advantages[row, 0])
        total -= min(ratio * a, min(max(ratio, 0.9), 1.05) * a)
        low += len(gaps) * (a < 0 and ratio < 0.9)
        high += len(gaps) * (a > 0 and ratio > 1.05)
    assert float(found.loss) / count == pytest.approx(total / 3, abs=1e-4)
    assert (int(found.clipped_low), int(found.clipped_high)) == (low, high)


def test_at_ratio_1_all_losses_have_the_gradient_of_reinforce() -> None:
    _, old, _, mask, weights = drawn(3)
    mask[:, 0] = True
    advantages = torch.tensor([1.0, -0.5, 2.0])[:, None].expand(3, 5)
    clip = {"clip_low": 0.2, "clip_high": 0.28}

    def gradient(found: PolicyLoss, logprobs: Tensor) -> Tensor:
        return torch.autograd.grad(found.loss, logprobs)[0]

    logprobs = old.clone().requires_grad_()
    inputs = (logprobs, old, advantages, mask)
    reinforce = torch.where(mask, -weights * advantages, 0.0)
    for found in (
        policy_loss(*inputs, **clip, token_weights=weights),
        policy_loss(*inputs, **clip, dual_clip=3.0, token_weights=weights),
        capped_reinforce_loss(*inputs, max_ratio=5.0, token_weights=weights),
    ):
        torch.testing.assert_close(gradient(found, logprobs), reinforce)
        assert int(found.clipped) == 0
    by_sequence, _ = aggregation(mask, "sequence")
    assert by_sequence is not None
    torch.testing.assert_close(
        gradient(sequence_ratio_loss(*inputs, **clip, token_weights=by_sequence), logprobs),
        torch.where(mask, -by_sequence * advantages, 0.0),
    )
    by_token = torch.arange(15.0).reshape(3, 5) - 7
    means = (by_token * by_sequence).sum(dim=1, keepdim=True)
    torch.testing.assert_close(
        gradient(sequence_ratio_loss(logprobs, old, by_token, mask, **clip), logprobs),
        torch.where(mask, -means, 0.0),
    )


def test_policy_losses_refuse_shapes_that_disagree() -> None:
    one, two = torch.zeros(1, 2), torch.zeros(1, 3)
    with pytest.raises(ShapeError, match="must share one shape"):
        capped_reinforce_loss(one, one, two, one.bool(), max_ratio=5.0)
    with pytest.raises(ShapeError, match="must share one shape"):
        sequence_ratio_loss(one, two, one, one.bool(), clip_low=0.1, clip_high=0.1)
