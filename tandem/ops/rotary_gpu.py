# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""Rotary positions on a GPU (arXiv:2104.09864), in one kernel for a token's queries and keys.

Decoding does not run it: its attention turns queries and the new key by itself (`paged_gpu`), with
the same `turned`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.ops.gpu import contiguous, dense_heads
from tandem.ops.jit_gpu import jit, tl, triton


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned by their positions, with gradient, and values as they are.

    Args:
        qkv: (N, Hq + 2 Hkv, D), queries first, then keys.
        cos, sin: (N, R), R even: the first R of the D turn, paired by halves.
        heads: Hq and Hkv.
    Returns:
        (N, Hq, D), (N, Hkv, D) and (N, Hkv, D), parts of one new tensor.
    """
    q, k, v = _Rotate.apply(qkv, cos, sin, heads)
    return q, k, v


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]
    ) -> tuple[Tensor, ...]:
        cos, sin = contiguous(cos), contiguous(sin)
        ctx.save_for_backward(cos, sin)
        sizes = heads[0], heads[1], heads[1]
        turned = _turn(*contiguous(qkv).split(sizes, 1), cos, sin, False)
        return turned.split(sizes, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_qkv = _turn(*(dense_heads(g) for g in gradients), *ctx.saved_tensors, True)
        return of_qkv, None, None, None


@torch.library.custom_op("tandem::turn", mutates_args=())
def _turn(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    n, query_heads, width = q.shape
    heads = k.shape[1]
    total, turning = query_heads + 2 * heads, cos.shape[-1]
    out = q.new_empty((n, total, width))
    if out.numel():
        block = max(1, min(16, 2048 // triton.next_power_of_2(width)))
        _turn_heads[(n, triton.cdiv(total, block))](
            q, k, v, cos, sin, out, q.stride(0), k.stride(0), v.stride(0),
            QUERY_HEADS=query_heads, HEADS=heads, WIDTH=width, PAD=triton.next_power_of_2(width),
            TURNING=turning, BLOCK=block, BACKWARD=back, enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
    return out


@_turn.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] + 2 * k.shape[1], q.shape[2]))


@jit
def turned(x, partner, c, s, sign):  # type: ignore[no-untyped-def]
    """x cos + sign partner sin; products and sum are rounded as Hugging Face's code rounds them."""
    kind = x.dtype
    near = (x.to(tl.float32) * c.to(tl.float32)).to(kind).to(tl.float32)
    far = (sign * partner.to(tl.float32) * s.to(tl.float32)).to(kind).to(tl.float32)
    return (near + far).to(kind)


# fmt: off
@jit
def _turn_heads(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, out_ptr, q_row, k_row, v_row,
    QUERY_HEADS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
    TURNING: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):
    # fmt: on
    """BLOCK heads of a token. The backward turns the other way: x_i, x_j from
    x_i cos_i - x_j sin_i, x_j cos_j + x_i sin_j."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    d = tl.arange(0, PAD)[None]
    partner = tl.where(d < TURNING // 2, d + TURNING // 2, d - TURNING // 2)
    turns = (d < TURNING) & (head < QUERY_HEADS + HEADS)
    q_at, k_at = q_ptr + row * q_row + head * WIDTH, k_ptr + row * k_row
    k_at += (head - QUERY_HEADS) * WIDTH
    v_at = v_ptr + row * v_row + (head - QUERY_HEADS - HEADS) * WIDTH
    is_q, is_k = head < QUERY_HEADS, (head >= QUERY_HEADS) & (head < QUERY_HEADS + HEADS)
    is_v = (head >= QUERY_HEADS + HEADS) & (head < QUERY_HEADS + 2 * HEADS)
    inside = d < WIDTH
    x = tl.load(q_at + d, mask=is_q & inside, other=0.0)
    x = tl.where(is_q, x, tl.load(k_at + d, mask=is_k & inside, other=0.0))
    x = tl.where(is_q | is_k, x, tl.load(v_at + d, mask=is_v & inside, other=0.0))
    y = tl.load(q_at + partner, mask=is_q & turns, other=0.0)
    y = tl.where(is_q, y, tl.load(k_at + partner, mask=is_k & turns, other=0.0))
    c = tl.load(cos_ptr + row * TURNING + d, mask=d < TURNING, other=0.0)
    if BACKWARD:
        s = tl.load(sin_ptr + row * TURNING + partner, mask=d < TURNING, other=0.0)
        made = turned(x, y, c, s, tl.where(d < TURNING // 2, 1.0, -1.0))
    else:
        s = tl.load(sin_ptr + row * TURNING + d, mask=d < TURNING, other=0.0)
        made = turned(x, y, c, s, tl.where(d < TURNING // 2, -1.0, 1.0))
    at = (row * (QUERY_HEADS + 2 * HEADS) + head) * WIDTH + d
    tl.store(out_ptr + at, tl.where(turns, made, x), mask=inside & (head < QUERY_HEADS + 2 * HEADS))
