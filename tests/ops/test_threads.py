"""Products by several threads: the bits of one, however unevenly their panels would be shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.ops import native
from tandem.ops.blockwise import INT8, NF4, quantize, reads_rows
from tandem.ops.blockwise import linear as linear_by_codes
from tandem.ops.dense import linear, linear_packed, pack_weight

pytestmark = pytest.mark.skipif(not native.available(), reason="no C++ operations")

COUNTS = (2, 3, 8, 16)
"""More threads than cores are right too, and share work as as many cores would."""
SHAPES = (
    # rows, outputs, inputs: panels that threads cannot share evenly, the last of them narrow.
    (1, 576, 192),
    (7, 65, 33),
    (33, 576, 576),
    (70, 192, 1536),
    (300, 192, 576),
    (520, 577, 130),
    # A weight larger than the second cache, and one of which panels are packed in parts.
    (100, 2112, 384),
    (130, 200, 2500),
)


def normal(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def by_the_weight(x: Tensor, weight: Tensor, given: Tensor) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    made = linear(x, weight)
    return [made, *torch.autograd.grad(made, (x, weight), given)]


def packed(x: Tensor, weight: Tensor, given: Tensor) -> list[Tensor]:
    return [linear_packed(x, pack_weight(weight), *weight.shape)]


def by_codes(x: Tensor, weight: Tensor, given: Tensor) -> list[Tensor]:
    outputs, inputs = weight.shape
    return [
        linear_by_codes(x, *quantize(weight.float().flatten(), code), outputs, code)
        for code in (NF4, INT8)
        if reads_rows(inputs, code)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", [by_the_weight, packed, by_codes])
def test_the_number_of_threads_does_not_matter(
    way: Callable[[Tensor, Tensor, Tensor], list[Tensor]],
    dtype: torch.dtype,
    threads: Callable[[int], None],
) -> None:
    for rows, outputs, inputs in SHAPES:
        x, weight = normal(rows, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype)
        given = normal(rows, outputs, dtype=dtype)
        threads(1)
        alone = way(x, weight, given)
        for count in COUNTS:
            threads(count)
            for one, several in zip(alone, way(x, weight, given), strict=True):
                assert torch.equal(one, several), (rows, outputs, inputs, count)
