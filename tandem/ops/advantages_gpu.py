# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""Generalized advantage estimation on a GPU: one kernel, a program per row.

What a token does to the advantage A' and the value V' of the next response token is

    A = a + b V' + c A'        V = v + w V'

with a = r - V_t, b = gamma, c = gamma lam, v = V_t, w = 0 on the response, and A', V' unchanged off
it. Two such maps in a row are one again, so blocks of a row are scanned from the end, and the next
block starts from what the last one left. Nothing is divided: factors only shrink, whatever the
length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.ops.jit_gpu import jit, tl, triton

_BLOCK = 1024  # tokens that are scanned at once


@torch.library.custom_op("tandem::advantages_gpu", mutates_args=())
def advantages_gpu(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, as `objectives.advantages.generalized_advantages`.

    Args:
        rewards, values: (B, T) float32. response_mask: (B, T) bool.
    """
    rewards, values = rewards.contiguous(), values.contiguous()
    mask = response_mask.contiguous().view(torch.uint8)
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    rows, length = rewards.shape
    if rewards.numel():
        block = min(_BLOCK, triton.next_power_of_2(length))
        _scan_row[(rows,)](
            rewards, values, mask, advantages, returns, length, gamma, gamma * lam, BLOCK=block,
            enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
    return advantages, returns


@advantages_gpu.register_fake
def _(rewards: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rewards), torch.empty_like(rewards)


@jit
def _then(a1, b1, c1, v1, w1, a2, b2, c2, v2, w2):  # type: ignore[no-untyped-def]
    """The map of the later tokens, 1, and then that of the earlier, 2."""
    return a2 + b2 * v1 + c2 * a1, b2 * w1 + c2 * b1, c2 * c1, v2 + w2 * v1, w2 * w1


# fmt: off
@jit
def _scan_row(  # type: ignore[no-untyped-def]
    rewards_ptr, values_ptr, mask_ptr, advantages_ptr, returns_ptr, length, gamma, decay,
    BLOCK: tl.constexpr,
):
    # fmt: on
    """A row, block by block from its end."""
    at = tl.program_id(0).to(tl.int64) * length
    t = tl.arange(0, BLOCK)
    after, next_value = 0.0, 0.0
    for done in range(0, length, BLOCK):
        place = length - done - BLOCK + t  # the first block reaches before the row's begin last
        inside = place >= 0
        chosen = tl.load(mask_ptr + at + place, mask=inside, other=0) != 0
        reward = tl.load(rewards_ptr + at + place, mask=inside, other=0.0)
        value = tl.load(values_ptr + at + place, mask=inside, other=0.0)
        a = tl.where(chosen, reward - value, 0.0)
        b = tl.where(chosen, gamma, 0.0)
        c = tl.where(chosen, decay, 1.0)
        v = tl.where(chosen, value, 0.0)
        w = tl.where(chosen, 0.0, 1.0)
        a, b, c, v, w = tl.associative_scan((a, b, c, v, w), 0, _then, reverse=True)
        made = a + b * next_value + c * after
        tl.store(advantages_ptr + at + place, tl.where(chosen, made, 0.0), mask=inside)
        tl.store(returns_ptr + at + place, tl.where(chosen, made + value, 0.0), mask=inside)
        first = t == 0
        after = tl.sum(tl.where(first, made, 0.0), 0)
        next_value = tl.sum(tl.where(first, v + w * next_value, 0.0), 0)
