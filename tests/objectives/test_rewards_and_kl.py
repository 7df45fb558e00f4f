"""Per-token rewards, KL estimators and the adaptive coefficient."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from tandem.errors import ShapeError
from tandem.objectives.kl import adapted_kl_coef, token_kl
from tandem.objectives.rewards import (
    clipped_scores,
    combined_scores,
    disagreement,
    ensemble_scores,
    group_normalized,
    last_response_token,
    normalized_scores,
    token_rewards,
)


def test_score_sits_on_the_last_response_token_even_when_it_equals_the_pad() -> None:
    # Row 0 ends with EOS at index 3 (whose id may equal the pad's: masks know nothing of ids).
    mask = torch.tensor([[False, True, True, True, False], [False, False, True, False, False]])
    kl = torch.tensor([[9.0, 1.0, -1.0, 2.0, 9.0], [9.0, 9.0, 0.5, 9.0, 9.0]])
    rewards = token_rewards(torch.tensor([10.0, -3.0]), kl, mask, kl_coef=0.1)
    expected = torch.tensor([[0.0, -0.1, 0.1, 9.8, 0.0], [0.0, 0.0, -3.05, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)


def test_what_tokens_got_by_themselves_stays_there_and_the_rest_of_the_score_is_at_the_end() -> (
    None
):
    mask = torch.tensor([[False, True, True, True, False], [False, False, True, False, False]])
    kl = torch.tensor([[9.0, 1.0, -1.0, 2.0, 9.0], [9.0, 9.0, 0.5, 9.0, 9.0]])
    of_tokens = torch.tensor([[0.0, 1.0, 0.0, -3.0, 0.0], [0.0, 0.0, 4.0, 0.0, 0.0]])
    scores = torch.tensor([-2.5, 3.0])  # of the tokens -2 and 4, of others -0.5 and -1
    rewards = token_rewards(scores, kl, mask, kl_coef=0.1, of_tokens=of_tokens)
    expected = torch.tensor([[0.0, 0.9, 0.1, -3.7, 0.0], [0.0, 0.0, 2.95, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)
    with pytest.raises(ShapeError, match="of_tokens"):
        token_rewards(scores, kl, mask, kl_coef=0.1, of_tokens=of_tokens[:, :3])


def test_later_turns_are_stepped_over() -> None:
    mask = torch.tensor([[False, True, False, False, True, False]])
    assert last_response_token(mask).tolist() == [4]


def test_a_row_without_a_response_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"rows \[1\] have none"):
        last_response_token(torch.tensor([[True], [False]]))


def test_estimators_by_hand() -> None:
    logprobs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert token_kl(logprobs, ref, "k1").tolist() == [0.5, -1.0]
    assert token_kl(logprobs, ref, "k2").tolist() == [0.125, 0.5]
    k3 = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    assert token_kl(logprobs, ref, "k3").tolist() == pytest.approx(k3, rel=1e-6)


def test_k1_and_k3_average_to_the_exact_kl_and_k3_varies_less() -> None:
    policy = torch.log_softmax(torch.randn(50), dim=0)
    reference = torch.log_softmax(policy + 0.3 * torch.randn(50), dim=0)
    exact = (policy.exp() * (policy - reference)).sum().item()
    weights = policy.exp()
    k1 = token_kl(policy, reference, "k1")
    k3 = token_kl(policy, reference, "k3")
    for estimate in (k1, k3):
        assert (weights * estimate).sum().item() == pytest.approx(exact, abs=1e-5)
    assert bool((k3 >= 0).all())
    variances = [(weights * (k - exact) ** 2).sum().item() for k in (k1, k3)]
    assert variances[1] < variances[0]


def test_k2_as_a_loss_has_the_gradient_of_the_kl() -> None:
    """Expectation over the policy's own tokens of d(k2)/d(theta) is d(KL)/d(theta); k1's is 0."""
    reference = torch.log_softmax(torch.randn(8), dim=0)
    logits = torch.randn(8, requires_grad=True)
    policy = torch.log_softmax(logits, dim=0)
    exact = (policy.exp() * (policy - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    weights = policy.detach().exp()
    for estimator, expected in (("k2", wanted), ("k1", torch.zeros(8))):
        loss = (weights * token_kl(policy, reference, estimator)).sum()
        (got,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("observed", "expected"), [(6.0, 1.0), (12.0, 1.02), (0.0, 0.98), (6.6, 1.01)]
)
def test_adaptive_coefficient_by_hand(observed: float, expected: float) -> None:
    coef = adapted_kl_coef(1.0, observed, target=6.0, horizon=1000, num_answers=100)
    assert coef == pytest.approx(expected)


def test_adaptive_coefficient_stays_positive_for_huge_rollouts() -> None:
    assert adapted_kl_coef(1.0, 0.0, target=6.0, horizon=1, num_answers=100) > 0


def test_scores_are_normalized_then_clipped_and_counted() -> None:
    scores = normalized_scores(torch.tensor([1.0, 5.0, -9.0]), 1.0, 2.0)
    assert scores.tolist() == [0.0, 2.0, -5.0]
    clipped, was_clipped = clipped_scores(scores, 3.0)
    assert clipped.tolist() == [0.0, 2.0, -3.0]
    assert was_clipped.tolist() == [False, False, True]
    assert clipped_scores(scores, 0.0)[0].tolist() == scores.tolist()


def test_several_rewards_are_a_weighted_sum_and_a_missing_one_adds_nothing() -> None:
    nan = torch.nan
    rewards = torch.tensor([[1.0, 10.0, 5.0], [2.0, nan, nan], [nan, nan, 7.0], [nan, 4.0, nan]])
    found = combined_scores(rewards, [1.0, 0.5, 0.0])
    assert found[[0, 1, 3]].tolist() == [6.0, 2.0, 2.0]
    assert found[2].isnan(), "the only reward that it has weighs nothing"


@pytest.mark.parametrize("size", range(2, 10))
def test_rewards_that_cancel_leave_no_rounding_error_as_a_signal(size: int) -> None:
    """Right answers are the long ones, which another reward of equal weight takes off."""
    group = torch.zeros(size, dtype=torch.long)
    for num_right in range(1, size):
        right = (torch.arange(size) < num_right).float()
        rewards = torch.stack([right, 1 - right, torch.full((size,), 0.1)], dim=1)
        for weights in ([1.0, 1.0, 1.0], [0.3, 0.3, 2.0]):
            assert combined_scores(rewards, weights, group).tolist() == [0.0] * size


def test_weights_that_add_up_to_another_give_its_score() -> None:
    rewards = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    for i in range(1, 40):
        for k in range(1, 40):
            one, other = combined_scores(rewards, [i / 100, k / 100, (i + k) / 100]).tolist()
            assert one == other, (i, k)


def test_rewards_are_normalized_in_their_groups() -> None:
    """By hand: 0, 1, 0, 1 has mean 1/2 and unbiased sd 1/sqrt(3); of two known, 1/sqrt(2)."""
    nan = torch.nan
    rewards = torch.tensor(
        [[0.0, 3.0], [1.0, nan], [0.0, 5.0], [1.0, nan], [7.0, 0.1], [7.0, nan], [7.0, nan]]
    )
    group = torch.tensor([0, 0, 0, 0, 9, 9, 9])
    found = group_normalized(rewards, group, eps=0.0)
    half = 3**0.5 / 2
    assert found[:4, 0].tolist() == pytest.approx([-half, half, -half, half])
    assert found[[0, 2], 1].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert found[4:, 0].tolist() == [0.0] * 3, "all equal: exactly 0"
    assert found[4, 1] == 0.0, "one alone"
    assert found[[1, 3, 5, 6], 1].isnan().all()
    moved = group_normalized(rewards * 1000 + 3, group, eps=0.0)
    torch.testing.assert_close(moved, found, equal_nan=True, atol=1e-4, rtol=1e-4)


def test_an_ensembles_scores_are_those_of_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(7, 4, generator=generator) * 3
    weights, coef = [1.0, 0.0, 0.5, 2.0], 0.3
    counted = [0, 2, 3]
    means, lowest, careful, spread = [], [], [], []
    for row in scores.double().tolist():
        total = sum(weights[k] for k in counted)
        mean = sum(weights[k] * row[k] for k in counted) / total
        variance = sum(weights[k] * (row[k] - mean) ** 2 for k in counted) / total
        means.append(mean)
        lowest.append(min(row[k] for k in counted))
        careful.append(mean - coef * variance)
        spread.append(statistics.pstdev(row))
    expected = {"mean": means, "worst-case": lowest, "uncertainty": careful}
    for how, values in expected.items():
        found = ensemble_scores(scores, weights, how, uncertainty_coef=coef)  # type: ignore[arg-type]
        assert found.tolist() == pytest.approx(values, abs=1e-6), how
    assert disagreement(scores).tolist() == pytest.approx(spread, abs=1e-6)
    alone = ensemble_scores(scores, [0.0, 2.0, 0.0, 0.0], "uncertainty", uncertainty_coef=9.0)
    assert alone.tolist() == scores[:, 1].tolist(), "one model has no variance"
