"""A weight kept in another form than a matrix of floats, in the place of a layer's weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x, a weight and a bias to x by the weight plus the bias."""


class StoredWeight(nn.Module, ABC):
    """What every such form offers its layer.

    Attributes:
        shape, dtype: the weight's own.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its numbers are."""

    @abstractmethod
    def product(self, x: Tensor, bias: Tensor | None, *, turned: bool, product: Product) -> Tensor:
        """product(x, W, bias).

        Args:
            turned: the weight is stored (in, out), as Conv1D's.
            product: the linear that the layer computes with a weight of floats.
        """

    @abstractmethod
    def dequantized(self) -> Tensor:
        """The weight as floats again: a new tensor in its own dtype."""

    def numel(self) -> int:
        """Numbers of the weight, in whatever form it is kept."""
        return self.shape.numel()
