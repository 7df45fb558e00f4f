"""Advantages without a critic: figures of reference code, and what must not change them."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tandem.errors import ShapeError
from tandem.objectives.advantages import (
    Baseline,
    Scale,
    critic_free_advantages,
    group_normalized,
    has_signal,
)
from tandem.objectives.policy import aggregation
from tandem.objectives.rewards import overlong_penalty

SCORES = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])
LENGTHS = (2, 4, 3, 1, 2, 2, 4, 3)
GROUP = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
MASK = torch.arange(5) < 1 + torch.tensor(LENGTHS)[:, None]
MASK[:, 0] = False  # a prompt of one token

BASELINES: tuple[Baseline, ...] = ("none", "group-mean", "leave-one-out", "length-weighted")
SCALES: tuple[Scale, ...] = ("none", "group-std", "batch-std", "whiten")


def rewards_of(scores: Tensor) -> Tensor:
    rewards = torch.zeros(MASK.shape)
    rewards[torch.arange(len(scores)), torch.tensor(LENGTHS)] = scores
    return rewards


def per_answer(scores: Tensor, baseline: Baseline, scale: Scale) -> Tensor:
    found = critic_free_advantages(rewards_of(scores), GROUP, MASK, baseline=baseline, scale=scale)
    assert not found[~MASK].any()
    last = found[torch.arange(len(scores)), torch.tensor(LENGTHS)]
    torch.testing.assert_close(found, last[:, None] * MASK)  # one number on all of its tokens
    return last


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("group-mean", "group-std", [0.866, -0.866, -0.866, 0.866, -0.5, -0.5, 1.5, -0.5]),
        ("group-mean", "none", [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, 0.75, -0.25]),
        ("leave-one-out", "none",
         [0.6667, -0.6667, -0.6667, 0.6667, -0.3333, -0.3333, 1, -0.3333]),
        ("length-weighted", "none",
         [0.7, -0.3, -0.3, 0.7, -0.3636, -0.3636, 0.6364, -0.3636]),
        ("none", "whiten",
         [1.3801, -0.6901, -0.6901, 1.3801, -0.6901, -0.6901, 1.3801, -0.6901]),
        ("group-mean", "whiten",
         [1.0546, -0.914, -0.914, 1.0546, -0.4218, -0.4218, 1.5468, -0.4218]),
        ("group-mean", "batch-std",
         [0.9659, -0.9659, -0.9659, 0.9659, -0.483, -0.483, 1.4489, -0.483]),
    ],
)  # fmt: skip
def test_the_figures_of_verl(baseline: Baseline, scale: Scale, expected: list[float]) -> None:
    """What the functions of verl 1dda039b give (batch-std: TRL's formula)."""
    assert per_answer(SCORES, baseline, scale).tolist() == pytest.approx(expected, abs=6e-5)


def test_the_weight_of_a_token_in_each_normalization() -> None:
    def weight(by: str) -> list[float]:
        weights, units = aggregation(MASK, by, max_tokens=4)  # type: ignore[arg-type]
        whole = torch.ones(MASK.shape) if weights is None else weights
        return (whole[:, 1] / units).tolist()

    assert weight("token") == pytest.approx([0.04762] * 8, abs=1e-5)
    assert weight("sequence") == pytest.approx(
        [0.0625, 0.03125, 0.04167, 0.125, 0.0625, 0.0625, 0.03125, 0.04167], abs=1e-5
    )
    assert weight("constant") == pytest.approx([0.03125] * 8)


@pytest.mark.parametrize(("baseline", "scale"), [*itertools.product(BASELINES[1:], SCALES[:3])])
def test_a_constant_added_to_a_groups_scores_changes_nothing(
    baseline: Baseline, scale: Scale
) -> None:
    shifted = SCORES + torch.where(GROUP == 1, 3.0, 0.0)
    if scale == "batch-std":
        shifted = SCORES + 3.0  # the deviation of all scores sees one group's constant
    torch.testing.assert_close(
        per_answer(shifted, baseline, scale), per_answer(SCORES, baseline, scale),
        atol=1e-5, rtol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize(("baseline", "scale"), [*itertools.product(BASELINES, SCALES)])
def test_scores_times_a_number(baseline: Baseline, scale: Scale) -> None:
    times = 1.0 if scale != "none" else 7.0
    torch.testing.assert_close(
        per_answer(7 * SCORES, baseline, scale), times * per_answer(SCORES, baseline, scale),
        atol=1e-3, rtol=1e-3,
    )  # fmt: skip


def test_sums_of_groups_and_rloo_as_a_multiple() -> None:
    for baseline in ("group-mean", "leave-one-out"):
        found = per_answer(SCORES, baseline, "none")
        assert torch.zeros(2).index_add(0, GROUP, found).abs().max() < 1e-6
    weighted = per_answer(SCORES, "length-weighted", "none") * torch.tensor(LENGTHS)
    assert torch.zeros(2).index_add(0, GROUP, weighted).abs().max() < 1e-6
    torch.testing.assert_close(
        per_answer(SCORES, "leave-one-out", "none"),
        4 / 3 * per_answer(SCORES, "group-mean", "none"),
    )


@pytest.mark.parametrize(("baseline", "scale"), [*itertools.product(BASELINES[1:], SCALES[:3])])
def test_a_group_of_equal_scores_adds_exactly_0(baseline: Baseline, scale: Scale) -> None:
    scores = torch.where(GROUP == 0, 0.1, SCORES)  # 0.1 has no exact mean in float32
    assert per_answer(scores, baseline, scale)[GROUP == 0].tolist() == [0.0] * 4
    assert has_signal(scores, GROUP).tolist() == [False] * 4 + [True] * 4


def test_without_a_baseline_a_token_gets_the_rewards_from_it_on() -> None:
    rewards = torch.tensor([[9.0, 1.0, 0.0, 2.0, 9.0]])
    mask = torch.tensor([[False, True, False, True, False]])
    found = critic_free_advantages(rewards, GROUP[:1], mask, baseline="none", scale="none")
    assert found.tolist() == [[0.0, 3.0, 0.0, 2.0, 0.0]]


def test_groups_need_not_lie_together_and_names_of_groups_do_not_matter() -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    for baseline, scale in itertools.product(BASELINES, SCALES):
        whole = critic_free_advantages(
            rewards_of(SCORES), GROUP, MASK, baseline=baseline, scale=scale
        )
        mixed = critic_free_advantages(
            rewards_of(SCORES)[order], 7 - 3 * GROUP[order], MASK[order],
            baseline=baseline, scale=scale,
        )  # fmt: skip
        torch.testing.assert_close(mixed, whole[order])


def test_the_soft_overlong_penalty_by_hand() -> None:
    """DAPO's own numbers: 20,480 tokens, the last 4,096 of them the buffer."""
    lengths = torch.tensor([1, 16384, 18432, 20480])
    found = overlong_penalty(lengths, max_tokens=20480, buffer=0.2)
    assert found.tolist() == [0.0, 0.0, 0.5, 1.0]


@pytest.mark.parametrize("max_tokens", [6, 100, 256, 512, 1000, 1024])
@pytest.mark.parametrize("buffer", [0.07, 0.2, 0.3, 0.7, 1.0])
def test_the_overlong_penalty_is_exact_at_both_ends(max_tokens: int, buffer: float) -> None:
    """A right answer at the limit, 1 - 1, scores as a wrong short one: their group has no
    signal. So has one of answers that end where the penalty begins."""
    cache = Fraction(str(buffer)) * max_tokens
    lengths = torch.arange(math.floor(max_tokens - cache), max_tokens + 1)
    found = overlong_penalty(lengths, max_tokens=max_tokens, buffer=buffer)
    exact = [max(0, 1 - (max_tokens - n) / cache) for n in lengths.tolist()]
    assert found.tolist() == pytest.approx([float(part) for part in exact], abs=1e-7)
    assert (float(found[0]), float(found[-1])) == (0.0, 1.0)
    scores = torch.stack([1 - found[-1], -found[0]])
    assert not has_signal(scores, torch.zeros(2, dtype=torch.long)).any()


def test_tensors_must_agree() -> None:
    with pytest.raises(ShapeError):
        critic_free_advantages(
            torch.zeros(2, 3), GROUP[:2], torch.zeros(2, 4).bool(), baseline="none", scale="none"
        )
    with pytest.raises(ShapeError):
        has_signal(torch.zeros(2), GROUP)
    assert group_normalized(SCORES, GROUP).shape == (8,)
