"""Runs of indices along a dimension of a weight, as the ranks of tensor-parallel generation divide
it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Span = tuple[int, int]
"""The first index, and the one after the last."""

Spans = Sequence[Sequence[Span]]
"""What each rank in turn holds of a dimension, in ascending order and apart: of 4 rows, two ranks
hold the halves [[(0, 2)], [(2, 4)]]."""


def taken(tensor: Tensor, dim: int, spans: Sequence[Span]) -> Tensor:
    """What lies in the spans, side by side; a new tensor."""
    return torch.cat([tensor.narrow(dim, first, last - first) for first, last in spans], dim)


def within(spans: Sequence[Span], held: Span) -> list[Span]:
    """Of spans of a whole, what lies in a part of it that is held, counted from its first."""
    first, last = held
    inside = [(max(start, first) - first, min(end, last) - first) for start, end in spans]
    return [(start, end) for start, end in inside if start < end]


def length(spans: Sequence[Span]) -> int:
    """How many indices there are."""
    return sum(last - first for first, last in spans)
