"""The budget of logits in bytes."""

from __future__ import annotations

import pytest
import torch

from tandem.ops.logits import BUDGET_BYTES, rows_at_once


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("vocabulary", [512, 50_257, 128_256, 151_936, 262_144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_many_rows_as_fit(kind: str, vocabulary: int, dtype: torch.dtype) -> None:
    rows = rows_at_once(vocabulary, dtype, torch.device(kind))
    budget = BUDGET_BYTES.get(kind, BUDGET_BYTES["cpu"])
    assert rows * vocabulary * dtype.itemsize <= budget
    assert (rows + 1) * vocabulary * dtype.itemsize > budget


def test_a_row_is_made_whatever_it_takes() -> None:
    assert rows_at_once(2**40, torch.float32, torch.device("cpu")) == 1
