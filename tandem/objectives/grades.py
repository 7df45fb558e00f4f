"""Scores against grades: the loss of a reward model that learns them, and how well they agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.objectives.masked import require_same_shape


@dataclass(frozen=True, slots=True)
class Scale:
    """Where the grades of a data set lie. mean, std: in its units; std is above 0.

    A score s in standardized units is the grade mean + std * s.
    """

    mean: float
    std: float

    def standardized(self, grades: Tensor) -> Tensor:
        """Grades of mean 0 and standard deviation 1 over the data set, float32."""
        return ((grades.double() - self.mean) / self.std).float()


def scale_of(grades: Tensor) -> Scale | None:
    """Mean and standard deviation (of the population) of (B,) grades; None if they do not vary, or
    by less than a float32 number can tell."""
    if len(grades) == 0 or float(grades.min()) == float(grades.max()):
        return None
    exact = grades.double()
    mean, std = float(exact.mean()), float(exact.std(correction=0))
    return Scale(mean, std) if std > max(1e-30, 1e-7 * abs(mean)) else None


def grade_loss(scores: Tensor, grades: Tensor) -> Tensor:
    """Squared error of a reward model's scores, summed. Denominator: answers.

        (score - grade)^2

    Args:
        scores: (B,) at the last real token, with gradient. grades: (B,) standardized, so that a
            mean error of 1 is that of predicting the mean.
    Source: HelpSteer2's reward models (arXiv:2406.08673).
    """
    require_same_shape(scores=scores, grades=grades)
    return (scores.float() - grades.float()).square().sum()


def pearson(x: Tensor, y: Tensor) -> float | None:
    """Pearson's correlation of (B,) x and y; None if one of them does not vary."""
    require_same_shape(x=x, y=y)
    if len(x) == 0 or bool(x.min() == x.max()) or bool(y.min() == y.max()):
        return None
    x, y = (values.double() - values.double().mean() for values in (x, y))
    return float((x * y).sum() / (x.norm() * y.norm()))


def spearman(x: Tensor, y: Tensor) -> float | None:
    """Spearman's correlation: Pearson's of the ranks, equal values sharing their mean rank."""
    return pearson(_ranks(x), _ranks(y))


def explained(scores: Tensor, grades: Tensor) -> float:
    """1 - squared error / squared error of predicting 0, the mean of standardized grades: 1 is
    perfect, 0 as good as the mean, below 0 worse."""
    base = float(grades.double().square().sum())
    error = float((scores.double() - grades.double()).square().sum())
    return 1 - error / base if base > 0 else 0.0


def _ranks(values: Tensor) -> Tensor:
    """(B,) float64: from 1, ties at the mean of their ranks."""
    _, which, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - (counts - 1) / 2).double()[which]
