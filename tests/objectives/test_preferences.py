"""Preference losses against slow loops and values by hand, and what must hold of each."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.objectives.losses import pairwise_loss
from tandem.objectives.preferences import (
    AnswerLogprobs,
    PairLossName,
    kto_baseline,
    kto_loss,
    log1mexp,
    log_odds,
    pair_loss,
)

NAMES: tuple[PairLossName, ...] = get_args(PairLossName)
AGAINST_REFERENCE: tuple[PairLossName, ...] = (
    *("sigmoid", "cdpo", "robust", "ipo", "apo-zero", "apo-down"),
)


def side(seed: int, size: int = 6, *, grad: bool = False) -> AnswerLogprobs:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 9, (size,), generator=generator)
    total = -tokens * (0.05 + torch.rand(size, generator=generator))
    reference = total + torch.randn(size, generator=generator)
    return AnswerLogprobs(total.requires_grad_(grad), tokens, reference)


def slow(
    name: str, chosen: AnswerLogprobs, rejected: AnswerLogprobs, beta: float, e: float, gamma: float
) -> float:
    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    total = 0.0
    assert chosen.reference is not None
    assert rejected.reference is not None
    for i in range(len(chosen.total)):
        c, r = chosen.total[i].item(), rejected.total[i].item()
        nc, nr = chosen.tokens[i].item(), rejected.tokens[i].item()
        hc, hr = c - chosen.reference[i].item(), r - rejected.reference[i].item()
        plain, swapped = (-math.log(sigmoid(s * beta * (hc - hr))) for s in (1, -1))
        if name in ("sigmoid", "cdpo"):
            total += (1 - e) * plain + e * swapped
        elif name == "robust":
            total += ((1 - e) * plain - e * swapped) / (1 - 2 * e)
        elif name == "ipo":
            total += (hc / nc - hr / nr - 1 / (2 * beta)) ** 2
        elif name == "apo-zero":
            total += 1 - sigmoid(beta * hc) + sigmoid(beta * hr)
        elif name == "apo-down":
            total += sigmoid(beta * hc) + 1 - sigmoid(beta * (hc - hr))
        elif name == "simpo":
            total += -math.log(sigmoid(beta * (c / nc - r / nr) - gamma))
        else:
            odds = [math.exp(p) / (1 - math.exp(p)) for p in (c / nc, r / nr)]
            total += -c / nc - beta * math.log(sigmoid(math.log(odds[0] / odds[1])))
    return total


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(0, 2**20),
    st.floats(0.05, 2.5),
    st.floats(0, 0.4),
    st.floats(0, 2),
    st.floats(0, 2),
)
def test_a_loss_by_name_equals_a_slow_loop(
    name: PairLossName, seed: int, beta: float, e: float, gamma: float, sft: float
) -> None:
    chosen, rejected = side(seed), side(seed + 1)
    found = pair_loss(
        name, chosen, rejected, beta=beta, label_smoothing=e, gamma=gamma, sft_coef=sft
    )
    expected = slow(name, chosen, rejected, beta, e, gamma)
    for total, tokens in zip(chosen.total.tolist(), chosen.tokens.tolist(), strict=True):
        expected += sft * -total / tokens
    assert found.loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_losses_by_hand() -> None:
    """One pair: 2 tokens at -1 nat with log-ratio 0.4, 4 tokens at -2 nats with log-ratio -0.8."""
    chosen = AnswerLogprobs(*(torch.tensor([v]) for v in (-2.0, 2.0, -2.4)))
    rejected = AnswerLogprobs(*(torch.tensor([v]) for v in (-8.0, 4.0, -7.2)))
    # d = 1.2 summed, 0.2 + 0.2 = 0.4 per token; log-probs per token -1 and -2.
    log_sigmoid_12, log_sigmoid_minus_12 = -0.2632825, -1.4632825
    odds = -0.5413249 - -1.8545865  # -1 - log(1 - e^-1), -2 - log(1 - e^-2)
    expected = {
        "sigmoid": 0.2632825,
        "cdpo": -0.9 * log_sigmoid_12 - 0.1 * log_sigmoid_minus_12,
        "robust": (-0.9 * log_sigmoid_12 + 0.1 * log_sigmoid_minus_12) / 0.8,
        "ipo": (0.4 - 0.5) ** 2,
        "apo-zero": (1 - 0.5986877) + 0.3100255,  # sigmoid(0.4), sigmoid(-0.8)
        "apo-down": 0.5986877 + (1 - 0.7685248),  # sigmoid(1.2)
        "simpo": math.log1p(math.exp(-(1.0 - 0.5))),
        "orpo": 1.0 + math.log1p(math.exp(-odds)),
    }
    for name in NAMES:
        smoothing = 0.1 if name in ("cdpo", "robust") else 0.0
        found = pair_loss(name, chosen, rejected, beta=1.0, label_smoothing=smoothing, gamma=0.5)
        assert found.loss.item() == pytest.approx(expected[name], rel=1e-5), name
        assert found.accuracy.item() == 1.0
    plain = pair_loss("sigmoid", chosen, rejected, beta=0.5)
    assert (plain.chosen_reward.item(), plain.rejected_reward.item()) == pytest.approx((0.2, -0.4))
    summed = pair_loss("ipo", chosen, rejected, beta=1.0, average=False)
    assert summed.loss.item() == pytest.approx((1.2 - 0.5) ** 2)
    assert summed.chosen_reward.item() == pytest.approx(0.4)


def test_equal_answers_lose_what_the_formula_says() -> None:
    """At margin 0: log 2 for the sigmoids, 1 / (2 beta)^2 for ipo, and a tie for the accuracy."""
    both = side(3, 4)
    expected = {
        "sigmoid": math.log(2),
        "cdpo": math.log(2),
        "robust": math.log(2),
        "ipo": 25.0,
        "apo-zero": 1.0,
        "apo-down": 0.5 + torch.sigmoid(0.1 * both.log_ratio).mean().item(),
        "simpo": math.log1p(math.exp(0.3)),
        "orpo": -both.mean.mean().item() + 0.1 * math.log(2),
    }
    for name in NAMES:
        found = pair_loss(name, both, both, beta=0.1, label_smoothing=0.2, gamma=0.3)
        assert found.loss.item() / 4 == pytest.approx(expected[name], rel=1e-5), name
        assert found.accuracy.item() == 2.0


def test_swapped_sides_mirror_the_margin() -> None:
    """cdpo at e equals its swap at 1 - e; robust is unbiased: mixing its swap in by the share of
    wrong labels gives the loss of right ones back."""
    chosen, rejected, e = side(1), side(2), 0.2
    plain = pair_loss("sigmoid", chosen, rejected, beta=0.5).loss
    right = pair_loss("robust", chosen, rejected, beta=0.5, label_smoothing=e).loss
    wrong = pair_loss("robust", rejected, chosen, beta=0.5, label_smoothing=e).loss
    torch.testing.assert_close((1 - e) * right + e * wrong, plain)
    smooth = pair_loss("cdpo", chosen, rejected, beta=0.5, label_smoothing=e).loss
    mirrored = (1 - e) * plain + e * pair_loss("sigmoid", rejected, chosen, beta=0.5).loss
    torch.testing.assert_close(smooth, mirrored)
    for name in NAMES:
        forth = pair_loss(name, chosen, rejected, beta=0.5)
        back = pair_loss(name, rejected, chosen, beta=0.5)
        assert forth.accuracy + back.accuracy == len(chosen.total)
        assert (forth.chosen_reward, forth.rejected_reward) == (
            back.rejected_reward,
            back.chosen_reward,
        )


def test_without_smoothing_cdpo_is_sigmoid_to_the_bit_and_robust_to_rounding() -> None:
    chosen, rejected = side(1), side(2)
    dpo = pair_loss("sigmoid", chosen, rejected, beta=0.3)
    assert torch.equal(pair_loss("cdpo", chosen, rejected, beta=0.3).loss, dpo.loss)
    torch.testing.assert_close(pair_loss("robust", chosen, rejected, beta=0.3).loss, dpo.loss)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_raises_the_chosen_answer_and_sums_over_pairs(name: PairLossName) -> None:
    """Where ipo is below its target; a step cut in two adds up to the same gradient. apo-down
    lowers the chosen answers too, but less."""
    chosen, rejected = side(5, grad=True), side(6, grad=True)
    loss = pair_loss(name, chosen, rejected, beta=0.05).loss
    whole = torch.autograd.grad(loss, [chosen.total, rejected.total])
    assert (whole[1] > 0).all()
    assert (whole[0] < (whole[1] if name == "apo-down" else 0)).all()

    def part(answers: AnswerLogprobs, rows: slice) -> AnswerLogprobs:
        assert answers.reference is not None
        return AnswerLogprobs(answers.total[rows], answers.tokens[rows], answers.reference[rows])

    cuts = (slice(0, 2), slice(2, 6))
    losses = [pair_loss(name, part(chosen, c), part(rejected, c), beta=0.05).loss for c in cuts]
    split = torch.autograd.grad(sum(losses, torch.zeros(())), [chosen.total, rejected.total])
    torch.testing.assert_close(whole, split)


def test_a_reference_free_loss_reads_none_and_the_others_need_one() -> None:
    bare = AnswerLogprobs(torch.tensor([-1.0]), torch.tensor([2]))
    for name in NAMES:
        if name in AGAINST_REFERENCE:
            with pytest.raises(AssertionError):
                pair_loss(name, bare, bare, beta=1.0)
        else:
            assert pair_loss(name, bare, bare, beta=1.0).loss.isfinite()


def test_log1mexp_and_log_odds_at_both_ends() -> None:
    x = torch.tensor([-1e-6, -1e-3, -0.5, -math.log(2), -1.0, -20.0, -90.0], dtype=torch.float32)
    exact = torch.log(-torch.expm1(x.double()))
    torch.testing.assert_close(log1mexp(x).double(), exact, rtol=1e-5, atol=1e-30)
    certain = torch.tensor([0.0, -1e-9, -200.0], requires_grad=True)
    odds = log_odds(certain)
    assert odds.isfinite().all()
    odds.sum().backward()
    assert certain.grad is not None
    assert certain.grad.isfinite().all()
    assert odds[2].item() == -200.0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**20), st.floats(0, 2), st.floats(0.5, 2), st.floats(0.5, 2))
def test_kto_equals_a_slow_loop(seed: int, z: float, good: float, bad: float) -> None:
    answers = side(seed)
    labels = torch.rand(6, generator=torch.Generator().manual_seed(seed)) < 0.5
    found = kto_loss(answers, labels, z, beta=0.3, desirable_weight=good, undesirable_weight=bad)
    assert answers.reference is not None
    loss, rewards = 0.0, {True: 0.0, False: 0.0}
    for i in range(6):
        h = answers.total[i].item() - answers.reference[i].item()
        sign, weight = (1, good) if labels[i] else (-1, bad)
        loss += weight * (1 - 1 / (1 + math.exp(-sign * 0.3 * (h - z))))
        rewards[bool(labels[i])] += 0.3 * h
    assert found.loss.item() == pytest.approx(loss, rel=1e-4)
    assert found.desirable_reward.item() == pytest.approx(rewards[True], abs=1e-4)
    assert found.undesirable_reward.item() == pytest.approx(rewards[False], abs=1e-4)


def test_kto_at_the_reference_and_its_limits() -> None:
    """Half the weights at h = z; nothing to gain or lose where h is far on the right side."""
    zero = torch.zeros(2)
    labels = torch.tensor([True, False])
    start = kto_loss(AnswerLogprobs(zero, zero + 1, zero), labels, 0.0, beta=0.1)
    assert start.loss.item() == 1.0
    far = AnswerLogprobs(torch.tensor([500.0, -500.0]), zero + 1, zero)
    assert kto_loss(far, labels, 0.0, beta=0.1).loss.item() == pytest.approx(0.0, abs=1e-6)
    # Swapping both labels and the sign of h - z changes nothing.
    h = torch.tensor([0.7, -0.2])
    one = kto_loss(AnswerLogprobs(h, zero + 1, zero), labels, 0.0, beta=1.0).loss
    other = kto_loss(AnswerLogprobs(-h, zero + 1, zero), ~labels, 0.0, beta=1.0).loss
    torch.testing.assert_close(one, other)


def test_the_baseline_is_a_mean_that_is_never_negative() -> None:
    assert kto_baseline(torch.tensor([1.0, 2.0, 0.0])) == 1.0
    assert kto_baseline(torch.tensor([-3.0, 1.0])) == 0.0
    assert kto_baseline(torch.zeros(0)) == 0.0


def test_pairwise_loss_with_margins_and_weights_by_hand() -> None:
    """A ranking of three (pairs weigh a third each) beside a pair that asks for a margin of 1."""
    scores = torch.tensor([2.0, 1.0, -1.0])
    better, worse = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])
    ranked = pairwise_loss(scores[better], scores[worse], weights=torch.full((3,), 1 / 3))
    slow_mean = sum(math.log1p(math.exp(-m)) for m in (1.0, 3.0, 2.0)) / 3
    assert ranked.loss.item() == pytest.approx(slow_mean, rel=1e-6)
    assert ranked.accuracy.item() == pytest.approx(1.0)
    asked = pairwise_loss(torch.tensor([2.0]), torch.tensor([1.0]), margins=torch.tensor([1.0]))
    assert asked.loss.item() == pytest.approx(math.log(2))
    assert asked.margin.item() == 1.0
    plain = pairwise_loss(scores[better], scores[worse])
    same = pairwise_loss(
        scores[better], scores[worse], weights=torch.ones(3), margins=torch.zeros(3)
    )
    assert torch.equal(plain.loss, same.loss)
