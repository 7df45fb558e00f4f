"""The scan of advantages against the slow loop: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.objectives.test_advantages import recursive_advantages, slow_advantages
from tests.ops.test_paged_gpu import DEVICE, kernels

pytestmark = [
    kernels,
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


def scanned(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> list[Tensor]:
    from tandem.ops.advantages_gpu import advantages_gpu

    given = (x.to(DEVICE) for x in (rewards, values, mask))
    return [x.cpu() for x in advantages_gpu(*given, gamma, lam)]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 33])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0), (0.0, 1.0)])
def test_the_scan_is_the_definition(
    length: int, gamma: float, lam: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 8; rows without a response, with gaps, and whole."""
    from tandem.ops import advantages_gpu

    monkeypatch.setattr(advantages_gpu, "_BLOCK", 8)
    rewards, values = torch.randn(5, length), torch.randn(5, length)
    mask = torch.rand(5, length) < 0.6
    mask[0], mask[1] = False, True
    advantages, returns = scanned(rewards, values, mask, gamma, lam)
    for i in range(5):
        chosen = mask[i]
        expected = slow_advantages(
            rewards[i][chosen].tolist(), values[i][chosen].tolist(), gamma, lam
        )
        wanted = torch.tensor(expected)
        assert torch.allclose(advantages[i][chosen], wanted, atol=1e-5, rtol=1e-5)
        assert torch.allclose(returns[i][chosen], wanted + values[i][chosen], atol=1e-5)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0)])
def test_thousands_of_tokens(gamma: float, lam: float) -> None:
    """Products of factors below 1 vanish; what is off the response may be anything."""
    rewards, values = torch.randn(2, 5000), torch.randn(2, 5000)
    mask = torch.ones(2, 5000, dtype=torch.bool)
    mask[0, :40], mask[1, 2000:2100] = False, False
    expected = recursive_advantages(rewards, values, mask, gamma=gamma, lam=lam)
    returns = (expected + values).masked_fill(~mask, 0.0)
    values = values.masked_fill(~mask, torch.nan)
    ours, ours_returns = scanned(rewards, values, mask, gamma, lam)
    assert torch.allclose(ours, expected, atol=1e-4, rtol=1e-5)
    assert torch.allclose(ours_returns, returns, atol=1e-4, rtol=1e-5)


def test_no_rows_have_no_advantages() -> None:
    none = torch.zeros(0, 5)
    assert all(x.shape == (0, 5) for x in scanned(none, none, none.bool(), 1.0, 1.0))
