"""Scores against grades: by hand, by slow loops, and cut into parts."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.errors import ShapeError
from tandem.objectives.grades import (
    Scale,
    explained,
    grade_loss,
    pearson,
    scale_of,
    spearman,
)


def test_a_squared_error_by_hand_and_its_gradient() -> None:
    scores = torch.tensor([1.0, -0.5, 0.0], requires_grad=True)
    grades = torch.tensor([0.0, 0.5, 2.0])
    loss = grade_loss(scores, grades)
    loss.backward()
    assert loss.item() == 1.0 + 1.0 + 4.0
    assert scores.grad is not None
    assert scores.grad.tolist() == [2.0, -2.0, -4.0]  # 2 (score - grade)
    with pytest.raises(ShapeError):
        grade_loss(scores, grades[:2])


def test_parts_of_a_step_add_up_to_it_and_half_precision_is_summed_in_float32() -> None:
    torch.manual_seed(1)
    scores, grades = torch.randn(9), torch.randn(9)
    parts = [grade_loss(scores[i : i + 2], grades[i : i + 2]) for i in range(0, 9, 2)]
    assert torch.stack(parts).sum() == pytest.approx(float(grade_loss(scores, grades)), rel=1e-6)
    assert grade_loss(scores.bfloat16(), grades).dtype == torch.float32


def test_a_scale_is_of_the_population_and_undone_by_its_own_formula() -> None:
    grades = torch.tensor([0.0, 4.0, 4.0, 0.0, 2.0])
    scale = scale_of(grades)
    assert scale == Scale(2.0, math.sqrt(16 / 5))
    standard = scale.standardized(grades)
    assert float(standard.mean()) == pytest.approx(0.0, abs=1e-7)
    assert float(standard.std(correction=0)) == pytest.approx(1.0)
    assert (scale.mean + scale.std * standard).tolist() == pytest.approx(grades.tolist())
    assert scale_of(torch.tensor([0.1, 0.1, 0.1])) is None
    assert scale_of(torch.zeros(0)) is None


def test_what_scores_explain() -> None:
    grades = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    assert explained(grades, grades) == 1.0
    assert explained(torch.zeros(4), grades) == 0.0  # as good as the mean
    assert explained(-grades, grades) == -3.0
    assert explained(torch.ones(4), torch.zeros(4)) == 0.0


def slow_ranks(values: list[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (1 + sum(o == value for o in values)) / 2
        for value in values
    ]


def slow_pearson(x: list[float], y: list[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    both = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    of_x, of_y = sum((a - mean_x) ** 2 for a in x), sum((b - mean_y) ** 2 for b in y)
    return both / math.sqrt(of_x * of_y)


def test_correlations_equal_slow_loops_with_ties() -> None:
    torch.manual_seed(2)
    for _ in range(20):
        x = torch.randn(12)
        y = torch.randint(0, 5, (12,)).float()
        x[3] = x[7]
        a, b = x.tolist(), y.tolist()
        assert pearson(x, y) == pytest.approx(slow_pearson(a, b), abs=1e-6)
        assert spearman(x, y) == pytest.approx(slow_pearson(slow_ranks(a), slow_ranks(b)), abs=1e-6)


def test_correlations_know_order_and_have_no_value_without_spread() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 10.0])
    assert spearman(x, x.exp()) == pytest.approx(1.0)
    assert spearman(x, -x) == pytest.approx(-1.0)
    assert pearson(x, 3 * x - 1) == pytest.approx(1.0)
    assert pearson(x, torch.ones(4)) is None
    assert spearman(torch.ones(4), x) is None
    assert pearson(torch.zeros(0), torch.zeros(0)) is None
