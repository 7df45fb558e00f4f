"""GAE against a hand-worked table, a slow loop from the definition, and limits of lambda."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.errors import ShapeError
from tandem.objectives import advantages as module
from tandem.objectives.advantages import (
    generalized_advantages,
    group_normalized,
    leave_one_out,
    over_tokens,
)
from tests.ops.counting import Launches, on_meta


def test_hand_worked_table() -> None:
    # prompt, then three response tokens; gamma = 0.5, lam = 0.5
    rewards = torch.tensor([[0.0, 0.0, 0.0, 4.0]])
    values = torch.tensor([[9.0, 1.0, 2.0, 3.0]])
    mask = torch.tensor([[False, True, True, True]])
    # delta_3 = 4 - 3 = 1; delta_2 = 0 + 1.5 - 2 = -0.5; delta_1 = 0 + 1 - 1 = 0
    # A_3 = 1; A_2 = -0.5 + 0.25 = -0.25; A_1 = 0 - 0.0625
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.0, -0.0625, -0.25, 1.0]]
    assert returns.tolist() == [[0.0, 0.9375, 1.75, 4.0]]


def slow_advantages(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> list[float]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, straight from the definition."""
    n = len(rewards)
    next_values = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * next_values[t] - values[t] for t in range(n)]
    return [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, n)) for t in range(n)
    ]


def recursive_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """A_t = delta_t + gamma lam A_{t+1}, token by token from the end, in float64."""
    advantages = torch.zeros(rewards.shape)
    for i in range(len(rewards)):
        next_value = next_advantage = 0.0
        for t in reversed(mask[i].nonzero().flatten().tolist()):
            value = float(values[i, t])
            next_advantage *= gamma * lam
            next_advantage += float(rewards[i, t]) + gamma * next_value - value
            next_value = value
            advantages[i, t] = next_advantage
    return advantages


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1))
def test_equals_the_definition_for_any_mask(seed: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(3, 7, generator=generator)
    values = torch.randn(3, 7, generator=generator)
    mask = torch.rand(3, 7, generator=generator) < 0.6
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=gamma, lam=lam)
    for i in range(3):
        chosen = mask[i]
        expected = slow_advantages(
            rewards[i][chosen].tolist(), values[i][chosen].tolist(), gamma, lam
        )
        torch.testing.assert_close(
            advantages[i][chosen], torch.tensor(expected), atol=1e-5, rtol=1e-5
        )
    assert not advantages[~mask].any()
    assert not returns[~mask].any()
    torch.testing.assert_close(returns[mask], (advantages + values)[mask])


@pytest.mark.parametrize("length", [1, 2, 3, 33, 200])
def test_equals_the_recursion_at_any_length(length: int) -> None:
    rewards, values = torch.randn(4, length), torch.randn(4, length)
    mask = torch.rand(4, length) < 0.7
    mask[0] = False
    advantages, _ = generalized_advantages(rewards, values, mask, gamma=0.97, lam=0.9)
    expected = recursive_advantages(rewards, values, mask, gamma=0.97, lam=0.9)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    rewards, values = torch.randn(4, 30), torch.randn(4, 30)
    mask = torch.rand(4, 30) < 0.7
    before = generalized_advantages(rewards, values, mask, gamma=0.97, lam=0.9)
    torch.set_default_dtype(dtype)
    try:
        after = generalized_advantages(rewards, values, mask, gamma=0.97, lam=0.9)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(before, after, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_rows_are_scanned_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards, values = torch.randn(7, 9), torch.randn(7, 9)
    mask = torch.rand(7, 9) < 0.7
    whole = generalized_advantages(rewards, values, mask, gamma=0.97, lam=0.9)
    for most in (1, 20):
        monkeypatch.setattr(module, "_CPU_NUMBERS", most)
        parts = generalized_advantages(rewards, values, mask, gamma=0.97, lam=0.9)
        assert all(map(torch.equal, whole, parts))


def test_a_row_does_not_depend_on_its_neighbors_or_on_padding() -> None:
    rewards, values = torch.randn(4, 40), torch.randn(4, 40)
    mask = torch.zeros(4, 40, dtype=torch.bool)
    mask[:, 5:21] = True
    mask[2, 21:] = True
    whole, _ = generalized_advantages(rewards, values, mask, gamma=0.97, lam=0.9)
    alone, _ = generalized_advantages(
        rewards[:1, :21], values[:1, :21], mask[:1, :21], gamma=0.97, lam=0.9
    )
    assert torch.equal(whole[:1, :21], alone)
    later = [torch.nn.functional.pad(x[:1, :21], (3, 0)) for x in (rewards, values, mask)]
    shifted, _ = generalized_advantages(*later, gamma=0.97, lam=0.9)
    assert torch.equal(shifted[:, 3:], alone)


def test_advantages_are_one_launch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/ops/test_advantages_gpu.py compares the kernel with the definition."""
    on_meta(monkeypatch)
    rewards = torch.zeros(64, 512, device="meta")
    mask = torch.zeros(64, 512, dtype=torch.bool, device="meta")
    with Launches() as launches:
        generalized_advantages(rewards, rewards, mask, gamma=1.0, lam=0.95)
    assert launches.seen == {"tandem.advantages_gpu": 1}


def test_lambda_1_is_the_return_minus_the_value() -> None:
    rewards, values = torch.randn(2, 5), torch.randn(2, 5)
    mask = torch.ones(2, 5, dtype=torch.bool)
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=1.0, lam=1.0)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(advantages, to_go - values)
    torch.testing.assert_close(returns, to_go)


def test_what_stands_off_the_response_changes_nothing() -> None:
    mask = torch.tensor([[False, True, True, False]])
    rewards, values = torch.randn(1, 4), torch.randn(1, 4)
    before = generalized_advantages(rewards, values, mask, gamma=0.9, lam=0.9)
    noise: Tensor = torch.where(mask, 0.0, 100.0)
    after = generalized_advantages(rewards, values + noise, mask, gamma=0.9, lam=0.9)
    torch.testing.assert_close(before, after)


def test_no_tokens_have_no_advantages_and_rewards_may_have_a_gradient() -> None:
    nothing = torch.zeros(3, 0)
    advantages, returns = generalized_advantages(nothing, nothing, nothing.bool(), gamma=1, lam=1)
    assert advantages.shape == returns.shape == (3, 0)
    rewards = torch.randn(2, 4, requires_grad=True)
    mask = torch.ones(2, 4, dtype=torch.bool)
    advantages, _ = generalized_advantages(rewards, torch.randn(2, 4), mask, gamma=1, lam=1)
    advantages[:, 1].sum().backward()
    assert rewards.grad is not None
    assert rewards.grad.tolist() == [[0.0, 1.0, 1.0, 1.0]] * 2


def test_refuses_shapes_that_disagree() -> None:
    with pytest.raises(ShapeError, match=r"must share one shape; got rewards \(1, 2\)"):
        generalized_advantages(
            torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2).bool(), gamma=1, lam=1
        )


SCORES = torch.tensor([1.0, 5.0, 2.0, 0.1, 3.0, 0.1, 7.0])
GROUPS = torch.tensor([4, 9, 4, 2, 4, 2, 9])  # rows of a group need not lie together


def others(row: int) -> list[float]:
    return [float(s) for s, g in zip(SCORES, GROUPS, strict=True) if g == GROUPS[row]]


@pytest.mark.parametrize("scale", [True, False])
def test_group_normalized_equals_a_slow_loop(scale: bool) -> None:
    found = group_normalized(SCORES, GROUPS, scale=scale, epsilon=1e-6)
    for row in range(len(SCORES)):
        scores = others(row)
        mean = sum(scores) / len(scores)
        std = (sum((s - mean) ** 2 for s in scores) / (len(scores) - 1)) ** 0.5
        expected = (float(SCORES[row]) - mean) / (std + 1e-6 if scale else 1.0)
        assert float(found[row]) == pytest.approx(expected, abs=1e-5)
    assert found[GROUPS == 2].tolist() == [0.0, 0.0], "equal scores teach nothing, to the bit"


def test_leave_one_out_equals_a_slow_loop_and_is_a_multiple_of_the_centered_scores() -> None:
    found = leave_one_out(SCORES, GROUPS)
    for row in range(len(SCORES)):
        scores = others(row)
        rest = (sum(scores) - float(SCORES[row])) / (len(scores) - 1)
        assert float(found[row]) == pytest.approx(float(SCORES[row]) - rest, abs=1e-5)
    four = torch.tensor([0.3, -1.0, 2.0, 0.7])
    one = torch.zeros(4, dtype=torch.long)
    torch.testing.assert_close(
        leave_one_out(four, one), 4 / 3 * group_normalized(four, one, scale=False)
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(-3, 3))
def test_groups_sum_to_zero_and_do_not_see_a_constant(seed: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(12, generator=generator)
    group = torch.randint(4, (12,), generator=generator)
    for function in (group_normalized, leave_one_out):
        found = function(scores, group)
        sums = torch.zeros(4).index_add(0, group, found)
        torch.testing.assert_close(sums, torch.zeros(4), atol=1e-4, rtol=0)
        torch.testing.assert_close(function(scores + shift, group), found, atol=1e-4, rtol=1e-4)


def test_a_group_of_one_has_no_signal_and_tensors_must_agree() -> None:
    alone = torch.tensor([3.0])
    assert group_normalized(alone, torch.tensor([0])).item() == 0.0
    assert leave_one_out(alone, torch.tensor([0])).item() == 0.0
    mask = torch.tensor([[False, True, False, True]])
    assert over_tokens(alone, mask).tolist() == [[0.0, 3.0, 0.0, 3.0]]
    with pytest.raises(ShapeError):
        leave_one_out(alone, torch.tensor([0, 1]))
