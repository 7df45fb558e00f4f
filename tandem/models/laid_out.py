"""Frozen weights kept as decoding reads them, and no other way: one copy instead of two.

A model that only answers needs its linear layers' weights for products without gradient. Laid out
once (`dense.pack_weight`), they serve every forward, and decoding in one call
(`generation.native_runner`) reads the very same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.errors import ModelError
from tandem.models.stored import Product, StoredWeight
from tandem.ops import dense, native


class LaidOutWeight(StoredWeight):
    """A weight (out, in) as decoding reads it.

    Attributes:
        group: what layers over one input share, laid out as one weight. Not a buffer: its float32
            words stand for numbers of another type, and no cast may touch them.
        words: this weight's part of it.
    """

    def __init__(self, group: Tensor, words: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.training = False
        self.group, self.words = group, words

    @property
    def device(self) -> torch.device:
        """The device of the words."""
        return self.words.device

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As the parameter that it stands for."""
        destination[prefix.removesuffix(".")] = self.dequantized()

    def product(self, x: Tensor, bias: Tensor | None, *, turned: bool, product: Product) -> Tensor:
        """(..., in) -> (..., out), always the bits of `dense.linear`; without gradient to the
        weight or x. No layer whose weight is `turned` has one.

        Raises:
            ModelError: a gradient to x is wanted, or x is of another type or device.
        """
        if x.dtype != self.dtype or x.device != self.device:
            raise ModelError(
                f"a weight laid out for decoding must meet {self.dtype} on {self.device}; got "
                f"{x.dtype} on {x.device}. Load the model again, in that type."
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise ModelError(
                "a weight laid out for decoding must not be trained through; got an input with "
                "gradient. Load the model again."
            )
        outputs, inputs = self.shape
        return dense.linear_packed(x, self.words, outputs, inputs, bias)

    def dequantized(self) -> Tensor:
        """The weight again, of finite numbers: a new tensor. A sum of one is that number."""
        outputs, inputs = self.shape
        ones = torch.eye(inputs, dtype=self.dtype)
        return dense.linear_packed(ones, self.words, outputs, inputs).t().contiguous()


def lay_out(weights: Sequence[Tensor]) -> list[LaidOutWeight] | None:
    """Weights (out_i, in) of layers over one input, in one piece of memory; None where a part of
    that is not the layout of its own weight: sizes that panels do not divide.

    The weights are not changed, nor freed.
    """
    parts = [dense.pack_weight(weight) for weight in weights]
    group = parts[0] if len(parts) == 1 else dense.pack_weight(torch.cat(list(weights)))
    native.prefer_large_pages(group)
    laid, start = [], 0
    for weight, part in zip(weights, parts, strict=True):
        words = group[start : start + part.numel()]
        start += part.numel()
        # By bits: as numbers a pair of bfloat16 may be NaN.
        if words.shape != part.shape or not torch.equal(
            words.view(torch.int32), part.view(torch.int32)
        ):
            return None
        laid.append(LaidOutWeight(group, words, weight.shape, weight.dtype))
    return laid if start == group.numel() else None
