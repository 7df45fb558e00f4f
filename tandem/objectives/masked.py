"""Sums, means and whitening over the tokens that a mask selects."""

from __future__ import annotations

from torch import Tensor

from tandem.errors import ShapeError


def require_same_shape(**tensors: Tensor) -> None:
    """Raise ShapeError, naming each tensor's shape, unless all are the same."""
    if len({tuple(tensor.shape) for tensor in tensors.values()}) > 1:
        found = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ShapeError(f"tensors must share one shape; got {found}. Align them by token first.")


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` where `mask` holds, as a scalar in float32.

    Values off the mask may be anything, NaN included: they are replaced, not multiplied by zero.
    """
    require_same_shape(values=values, mask=mask)
    return values.float().masked_fill(~mask, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask` holds; 0 if it holds nowhere."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_std(values: Tensor, mask: Tensor) -> Tensor:
    """Population standard deviation of `values` where `mask` holds; 0 if it holds nowhere."""
    mean = masked_mean(values, mask)
    return masked_mean((values.float() - mean) ** 2, mask).sqrt()


def whiten(values: Tensor, mask: Tensor, *, epsilon: float = 1e-8, correction: int = 0) -> Tensor:
    """`values` shifted and scaled to mean 0 and sd 1 over the mask; 0 off the mask.

    Where all selected values are equal the result is 0, not a magnified rounding error.

    Args:
        correction: 1 divides the squares by n - 1 rather than by n.
    """
    # From one of them on: the mean of equal values may be a rounding error off, also of theirs.
    first = mask.flatten().int().argmax().view(1)
    values = values.float() - values.float().flatten().index_select(0, first)
    std = masked_std(values, mask)
    if correction:
        count = mask.sum()
        std = std * (count / (count - correction).clamp(min=1)).sqrt()
    centered = values - masked_mean(values, mask)
    scale = (std > epsilon) / std.clamp(min=epsilon)
    return (centered * scale).masked_fill(~mask, 0.0)
