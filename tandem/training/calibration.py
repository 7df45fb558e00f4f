"""How far a reward model's sureness holds: pairs by confidence, and how many of them are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from tandem.objectives.losses import wins_of


@dataclass(frozen=True, slots=True)
class Reliability:
    """Pairs by how sure the reward model is of them.

    confidence: mean of sigmoid(|margin|). accuracy: how many it has right, a tie half. pairs: how
    many there are.
    """

    confidence: float
    accuracy: float
    pairs: int


def reliability(margins: Tensor, num_bins: int = 10) -> list[Reliability]:
    """The reliability table behind `calibration_error`, its empty bins left out.

    Args:
        margins: (B,) chosen minus rejected score, raw reward-model units.
    Source: arXiv:1706.04599.
    """
    confidence = torch.sigmoid(margins.abs().double())
    right = wins_of(margins).double()
    bins = ((confidence - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    return [
        Reliability(
            float(confidence[bins == index].mean()),
            float(right[bins == index].mean()),
            int((bins == index).sum()),
        )
        for index in bins.unique()
    ]


def calibration_error(margins: Tensor, num_bins: int = 10) -> float:
    """Expected calibration error of P(chosen wins) = sigmoid(margin).

    Pairs are binned by the confidence in whichever answer is favoured, 0.5 to 1; per bin the mean
    confidence is compared with the share of pairs that were right, weighted by the bin's size.
    Source: arXiv:1706.04599.
    """
    return sum(
        abs(row.confidence - row.accuracy) * (row.pairs / len(margins))
        for row in reliability(margins, num_bins)
    )


def reliability_table(bins: Sequence[dict[str, Any]]) -> Table:
    """How often the reward model is right, by how sure it is."""
    table = Table(title="Reward model on held-out pairs: sure and right", title_justify="left")
    for name in ("pairs", "sigmoid(margin)", "right"):
        table.add_column(name, justify="right")
    for row in bins:
        table.add_row(str(row["pairs"]), f"{row['confidence']:.3f}", f"{row['accuracy']:.3f}")
    return table
