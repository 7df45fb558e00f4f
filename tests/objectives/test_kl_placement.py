"""Where the KL goes, by its exact gradient: sums over all tokens of a vocabulary of five."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from torch import Tensor

from tandem.objectives.advantages import critic_free_advantages
from tandem.objectives.kl import KLLoss, kl_loss, token_kl
from tandem.objectives.masked import masked_sum
from tandem.objectives.policy import policy_loss
from tandem.objectives.rewards import token_rewards

LOGITS = torch.tensor([0.3, -0.2, 0.8, -1.0, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.0, 0.5, 0.2, -0.3, 0.4], dtype=torch.float64).log_softmax(0)
TRUE = [0.0464, -0.1114, 0.1902, -0.0501, -0.0751]
FORWARD = [0.0662, -0.1306, 0.1792, -0.0587, -0.0561]


def in_loss(placement: KLLoss, sampled_by: Tensor) -> Tensor:
    """The expected gradient at LOGITS over tokens that the policy of these logits samples."""
    logits = LOGITS.clone().requires_grad_()
    old = sampled_by.log_softmax(0)
    kl = kl_loss(logits.log_softmax(0), REFERENCE, old, placement)
    (old.exp() * kl).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_the_kl_itself() -> None:
    logprobs = LOGITS.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - REFERENCE)).sum()
    assert float(exact) == pytest.approx(0.1379, abs=5e-5)
    for estimator in ("k1", "k3"):
        found = (logprobs.exp() * token_kl(logprobs, REFERENCE, estimator)).sum()
        assert float(found) == pytest.approx(float(exact))


@pytest.mark.parametrize(
    ("placement", "expected"),
    [("k2-in-loss", TRUE), ("k3-times-ratio", TRUE), ("forward-k3-in-loss", FORWARD)],
)
def test_the_gradient_of_a_kl_in_the_loss(placement: KLLoss, expected: list[float]) -> None:
    assert in_loss(placement, LOGITS).tolist() == pytest.approx(expected, abs=6e-5)


def test_only_the_ratio_keeps_the_gradient_exact_on_later_minibatches() -> None:
    older = LOGITS + torch.tensor([0.5, 0.0, -0.5, 0.2, 0.0], dtype=torch.float64)
    assert in_loss("k3-times-ratio", older).tolist() == pytest.approx(TRUE, abs=6e-5)
    for placement in get_args(KLLoss):
        if placement != "k3-times-ratio":
            assert in_loss(placement, older).tolist() != pytest.approx(TRUE, abs=6e-3)


@pytest.mark.parametrize(("estimator", "is_exact"), [("k1", True), ("k2", False), ("k3", False)])
def test_the_gradient_of_a_kl_in_the_reward(estimator: str, is_exact: bool) -> None:
    """By the stage's own functions: token rewards, advantages, policy loss."""
    logits = LOGITS.float().requires_grad_()
    logprobs = logits.log_softmax(0)[:, None]
    old, mask = logprobs.detach(), torch.ones(5, 1, dtype=torch.bool)
    kl = token_kl(old, REFERENCE.float()[:, None], estimator)  # type: ignore[arg-type]
    rewards = token_rewards(torch.zeros(5), kl, mask, kl_coef=1.0)
    advantages = critic_free_advantages(
        rewards, torch.arange(5), mask, baseline="none", scale="none"
    )
    found = policy_loss(
        logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.2, token_weights=old.exp()
    )
    found.loss.backward()
    assert logits.grad is not None
    is_true = logits.grad.tolist() == pytest.approx(TRUE, abs=6e-5)
    assert is_true == is_exact


def test_k1_in_the_reward_counts_what_a_token_does_to_later_ones() -> None:
    """Answers of two tokens over three: the exact gradient of the whole answer's KL."""
    torch.manual_seed(0)
    first = torch.randn(3, requires_grad=True)
    second = torch.randn(3, 3, requires_grad=True)
    ref_first, ref_second = torch.randn(3).log_softmax(0), torch.randn(3, 3).log_softmax(1)
    answers = list(itertools.product(range(3), repeat=2))
    a, b = (torch.tensor(column) for column in zip(*answers, strict=True))

    def logprobs() -> Tensor:
        return torch.stack([first.log_softmax(0)[a], second.log_softmax(1)[a, b]], dim=1)

    reference = torch.stack([ref_first[a], ref_second[a, b]], dim=1)
    chances = logprobs().sum(1).exp()
    kl = (chances * (logprobs() - reference).sum(1)).sum()
    exact = torch.autograd.grad(kl, [first, second])

    new, mask = logprobs(), torch.ones(9, 2, dtype=torch.bool)
    old = new.detach()
    rewards = token_rewards(torch.zeros(9), old - reference, mask, kl_coef=1.0)
    weights = chances.detach()[:, None].expand(9, 2)

    def gradient(values: Tensor) -> tuple[Tensor, ...]:
        found = policy_loss(
            new, old, values, mask, clip_low=0.2, clip_high=0.2, token_weights=weights
        )
        return torch.autograd.grad(found.loss, [first, second], retain_graph=True)

    to_go = critic_free_advantages(rewards, torch.arange(9), mask, baseline="none", scale="none")
    torch.testing.assert_close(gradient(to_go), exact, atol=1e-6, rtol=1e-4)
    # Whatever is summed over the whole answer first has the same expectation ...
    whole = rewards.sum(dim=1, keepdim=True).expand(9, 2)
    torch.testing.assert_close(gradient(whole), exact, atol=1e-6, rtol=1e-4)
    # ... but a KL per token in the loss does not see the second token's distribution change.
    per_token = masked_sum(weights * kl_loss(new, reference, old, "k2-in-loss"), mask)
    found = torch.autograd.grad(per_token, [first, second], retain_graph=True)
    torch.testing.assert_close(found[1], exact[1], atol=1e-6, rtol=1e-4)
    assert not torch.allclose(found[0], exact[0], atol=1e-3)
