"""Rates of products and memory: figures that can be, and the cut that was chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.ops import dense, native
from tandem.ops.rates import memory_rate, product_rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_has_four_rates_and_a_cut(dtype: torch.dtype) -> None:
    rate = product_rate(64, 128, 96, dtype, seconds=0.01)
    assert (rate.rows, rate.inputs, rate.outputs) == (64, 128, 96)
    assert rate.dtype == {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    for figure in (rate.forward, rate.training, rate.torch_forward, rate.torch_training):
        assert 0.001 < figure < 1e5
    if native.available() and "avx512f" in native.instruction_sets():
        assert not rate.cut or "x" in rate.cut or rate.cut == "still measuring"
        assert rate.cut or not torch.ops.tandem.why_no_amx(dtype == torch.bfloat16)


def test_a_product_too_small_to_choose_has_no_cut() -> None:
    assert product_rate(64, 64, 64, torch.float32, seconds=0.001).cut == ""


def test_calls_go_through_as_many_bytes_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    linear = dense.linear

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        seen.add(weight.data_ptr())
        return linear(x, weight)

    monkeypatch.setattr(dense, "linear", counted)
    one = 4 * (64 * 64 + 64 * 64)  # a smaller product is repeated more often for the clock
    product_rate(64, 64, 64, torch.float32, seconds=0.001)
    same = len(seen)
    seen.clear()
    product_rate(64, 64, 64, torch.float32, seconds=0.001, from_memory=5 * one - 1)
    assert same == 2, "forward and training"
    assert len(seen) == 2 * 5


def test_memory_has_a_rate() -> None:
    assert 1e7 < memory_rate(megabytes=4, repeats=1) < 1e13
