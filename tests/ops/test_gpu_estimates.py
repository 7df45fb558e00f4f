"""docs/gpu.md tells what follows from the counts of the code as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops import gpu_estimates
from tests.ops.counting import on_meta

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_the_page_has_the_estimates_of_todays_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    on_meta(monkeypatch)
    lines = PAGE.read_text("utf-8").splitlines()
    for row, estimate in gpu_estimates.rows():
        told = [line.split("|")[3].strip() for line in lines if line.startswith(f"| {row}")]
        assert [text.split(",")[0] for text in told] == [estimate], row


def test_counts_of_a_7b_layer_are_those_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by the closed form; in decoding each weight is read once."""
    on_meta(monkeypatch)
    weights = 4 * 4096**2 + 3 * 4096 * 11008
    one, two = (gpu_estimates.decoded("llama-7b", layers, 16) for layers in (1, 2))
    assert sum(two.weights) - sum(one.weights) == 2 * weights
    assert two.flops - one.flops == 2 * 16 * weights
    assert (two.total - one.total, two.num_small - one.num_small) == (9, 3)
    found = gpu_estimates.passes("llama-7b")
    attention = (2 + 4) * 4096 * 8192 * 512
    assert found.flops == pytest.approx(32 * (6 * 8192 * weights + attention), rel=1e-9)
    assert gpu_estimates.num_weights("llama-7b") == pytest.approx(6.74e9, rel=1e-3)
