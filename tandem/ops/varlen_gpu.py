# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""Causal attention over packed sequences on a GPU, for what torch's flash attention lacks.

Soft caps, sinks, heads of odd or unequal widths and float32, all sequences in one launch, forward
and backward, without keys repeated for their queries (arXiv:2307.08691). Gradients of keys and
values are summed by the program that owns them, so nothing is added atomically and a result does
not change from run to run. Tiles are found on the device: the host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.ops.attention_context import AttentionSpec
from tandem.ops.gpu import dense_heads
from tandem.ops.jit_gpu import jit, padded, tl, triton

_LOG2_E = 1.4426950408889634


def varlen_attention_gpu(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, kind: AttentionSpec
) -> Tensor:
    """q (N, Hq, Dk), k (N, Hkv, Dk), v (N, Hkv, Dv) of one type -> (N, Hq, Dv), with gradient.

    Args:
        cu_seqlens: (B + 1,) int32. kind: without dropout.
    """
    out: Tensor = _Attention.apply(
        q, k, v, cu_seqlens, kind.sinks, kind.scale, kind.window, kind.softcap
    )
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, sinks: Tensor | None,
        scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        q, k, v = dense_heads(q), dense_heads(k), dense_heads(v)
        out, sums = _attend(q, k, v, ends, sinks, scale, window, softcap)
        ctx.save_for_backward(q, k, v, ends, sinks, out, sums)
        ctx.rule = scale, window, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, ends, sinks, out, sums = ctx.saved_tensors
        gradient = gradient.contiguous()
        # (Hq, N): what each query's weights add up to, times the gradient of its output.
        inner = (gradient.float() * out.float()).sum(-1).t().contiguous()
        of_q, of_k, of_v = _attend_backward(q, k, v, ends, gradient, sums, inner, *ctx.rule)
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[4]:
            chance = torch.exp2(sinks.float()[:, None] * _LOG2_E - sums)
            of_sinks = -(chance * inner).sum(1).to(sinks.dtype)
        return of_q, of_k, of_v, None, of_sinks, None, None, None


def tiles(width: int, size: int, kernel: str = "forward") -> tuple[int, int]:
    """Tokens of a tile, and warps, such that no kernel spills registers
    (tests/ops/compile_kernels.py).

    Args:
        width: of the wider heads. size: bytes of one number.
        kernel: "forward", "queries" or "keys", which sums twice as much as the others.
    """
    wide = width * size
    if wide <= 128:
        return (32 if kernel == "keys" else 64), 4
    if wide > 256:
        return 16, 4 if kernel == "forward" else 8
    if size == 4:
        return (16 if kernel == "keys" else 32), 4
    return 32, 8 if kernel == "queries" else 4


def _settings(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, window: int, cap: float, kernel: str = "forward"
):
    """Constants that all kernels have, and how many tiles and warps."""
    size, warps = tiles(max(q.shape[2], v.shape[2]), q.element_size(), kernel)
    sequences = len(ends) - 1
    return triton.cdiv(q.shape[0], size) + sequences, {
        "GROUP": q.shape[1] // k.shape[1], "WINDOW": window, "CAPPED": cap != 0, "SIZE": size,
        "K_WIDTH": q.shape[2], "K_PAD": padded(q.shape[2]), "V_WIDTH": v.shape[2],
        "V_PAD": padded(v.shape[2]), "ROWS_PAD": triton.next_power_of_2(max(1, sequences)),
        "enable_fp_fusion": True, "num_warps": warps, "num_stages": 2,
    }  # fmt: skip


@torch.library.custom_op("tandem::varlen_attention_gpu", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, sinks: Tensor | None, scale: float,
    window: int, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n, heads, _ = q.shape
    out, sums = q.new_empty((n, heads, v.shape[2])), q.new_empty((heads, n), dtype=torch.float32)
    if n:
        count, constants = _settings(q, k, v, ends, window, softcap)
        _forward[(count, heads)](
            q, k, v, ends, q if sinks is None else sinks, out, sums, q.stride(0), k.stride(0),
            v.stride(0), len(ends) - 1, n, heads, scale, softcap, SINKS=sinks is not None,
            **constants,
        )  # fmt: skip
    return out, sums


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    n, heads, _width = q.shape
    return q.new_empty((n, heads, v.shape[2])), q.new_empty((heads, n), dtype=torch.float32)


@torch.library.custom_op("tandem::varlen_attention_backward_gpu", mutates_args=())
def _attend_backward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, gradient: Tensor, sums: Tensor, inner: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n, heads, _ = q.shape
    of_q, of_k, of_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if n:
        rule = (q, k, v, ends, window, softcap)
        count, constants = _settings(*rule, "queries")
        given = (q, k, v, ends, gradient, sums, inner)
        strides = (q.stride(0), k.stride(0), v.stride(0), len(ends) - 1, n, heads, scale, softcap)
        _backward_queries[(count, heads)](*given, of_q, *strides, **constants)
        count, constants = _settings(*rule, "keys")
        _backward_keys[(count, k.shape[1])](*given, of_k, of_v, *strides, **constants)
    return of_q, of_k, of_v


@_attend_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@jit
def tile_of(ends_ptr, sequences, tile, SIZE: tl.constexpr, ROWS_PAD: tl.constexpr):
    """First and last + 1 token of a tile's sequence, and the tile's own first; empty past all."""
    b = tl.arange(0, ROWS_PAD)
    begin = tl.load(ends_ptr + b, mask=b < sequences, other=0)
    end = tl.load(ends_ptr + b + 1, mask=b < sequences, other=0)
    tiles = (end - begin + SIZE - 1) // SIZE
    after = tl.cumsum(tiles, 0)
    mine = (after > tile) & (after - tiles <= tile) & (b < sequences)
    first = tl.sum(tl.where(mine, begin, 0), 0)
    last = tl.sum(tl.where(mine, end, 0), 0)
    return first, last, first + (tile - tl.sum(tl.where(mine, after - tiles, 0), 0)) * SIZE


# fmt: off
@jit
def scores_of(q, k, i, j, last, scale, softcap, CAPPED: tl.constexpr, WINDOW: tl.constexpr):
    # fmt: on
    """Scores of queries i and keys j in units of log 2, and the slope of the cap."""
    raw = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    slope = 1.0
    if CAPPED:
        bent = 2.0 * tl.sigmoid(2.0 * raw / softcap) - 1.0  # tanh
        raw, slope = softcap * bent, 1.0 - bent * bent
    seen = (j[None] <= i[:, None]) & (i < last)[:, None] & (j < last)[None]
    if WINDOW:
        seen &= j[None] > i[:, None] - WINDOW
    return tl.where(seen, raw * 1.4426950408889634, float("-inf")), slope


# fmt: off
@jit
def _forward(
    q_ptr, k_ptr, v_ptr, ends_ptr, sinks_ptr, out_ptr, sums_ptr, q_row, k_row, v_row, sequences,
    tokens, heads, scale, softcap, SINKS: tl.constexpr,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SIZE: tl.constexpr,
    K_WIDTH: tl.constexpr, K_PAD: tl.constexpr, V_WIDTH: tl.constexpr, V_PAD: tl.constexpr,
    ROWS_PAD: tl.constexpr,
):
    # fmt: on
    """A tile of queries of one head."""
    head = tl.program_id(1)
    first, last, begin = tile_of(ends_ptr, sequences, tl.program_id(0), SIZE, ROWS_PAD)
    if begin < last:
        i = begin + tl.arange(0, SIZE)
        kd, vd = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
        at = i.to(tl.int64)[:, None]
        q_at = q_ptr + at * q_row + head * K_WIDTH + kd[None]
        q = tl.load(q_at, mask=(i < last)[:, None] & (kd < K_WIDTH)[None], other=0.0)
        top = tl.full([SIZE], -1.0e30, tl.float32)
        total = tl.zeros([SIZE], tl.float32)
        if SINKS:
            sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
            top = tl.zeros([SIZE], tl.float32) + sink
            total += 1.0
        summed = tl.zeros([SIZE, V_PAD], tl.float32)
        start = first
        if WINDOW:
            start = tl.maximum(first, begin - WINDOW + 1)
        for key in range(start, tl.minimum(begin + SIZE, last), SIZE):
            j = key + tl.arange(0, SIZE)
            k_at = k_ptr + j.to(tl.int64)[:, None] * k_row + head // GROUP * K_WIDTH + kd[None]
            k = tl.load(k_at, mask=(j < last)[:, None] & (kd < K_WIDTH)[None], other=0.0)
            scores, _ = scores_of(q, k, i, j, last, scale, softcap, CAPPED, WINDOW)
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(top - higher)
            v_at = v_ptr + j.to(tl.int64)[:, None] * v_row + head // GROUP * V_WIDTH + vd[None]
            v = tl.load(v_at, mask=(j < last)[:, None] & (vd < V_WIDTH)[None], other=0.0)
            part = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            summed = summed * shrink[:, None] + part
            total = total * shrink + tl.sum(weights, 1)
            top = higher
        total = tl.where(i < last, total, 1.0)
        out_at = out_ptr + (at * heads + head) * V_WIDTH + vd[None]
        made = (summed / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_at, made, mask=(i < last)[:, None] & (vd < V_WIDTH)[None])
        tl.store(sums_ptr + head * tokens + i, top + tl.log2(total), mask=i < last)


# fmt: off
@jit
def _backward_queries(
    q_ptr, k_ptr, v_ptr, ends_ptr, g_ptr, sums_ptr, inner_ptr, of_q_ptr, q_row, k_row, v_row,
    sequences, tokens, heads, scale, softcap,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SIZE: tl.constexpr,
    K_WIDTH: tl.constexpr, K_PAD: tl.constexpr, V_WIDTH: tl.constexpr, V_PAD: tl.constexpr,
    ROWS_PAD: tl.constexpr,
):
    # fmt: on
    """Gradient of a tile of queries of one head."""
    head = tl.program_id(1)
    first, last, begin = tile_of(ends_ptr, sequences, tl.program_id(0), SIZE, ROWS_PAD)
    if begin < last:
        i = begin + tl.arange(0, SIZE)
        kd, vd = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
        at = i.to(tl.int64)[:, None]
        inside_k = (i < last)[:, None] & (kd < K_WIDTH)[None]
        inside_v = (i < last)[:, None] & (vd < V_WIDTH)[None]
        q = tl.load(q_ptr + at * q_row + head * K_WIDTH + kd[None], mask=inside_k, other=0.0)
        g_at = g_ptr + (at * heads + head) * V_WIDTH + vd[None]
        g = tl.load(g_at, mask=inside_v, other=0.0)
        sums = tl.load(sums_ptr + head * tokens + i, mask=i < last, other=0.0)
        inner = tl.load(inner_ptr + head * tokens + i, mask=i < last, other=0.0)
        made = tl.zeros([SIZE, K_PAD], tl.float32)
        start = first
        if WINDOW:
            start = tl.maximum(first, begin - WINDOW + 1)
        for key in range(start, tl.minimum(begin + SIZE, last), SIZE):
            j = key + tl.arange(0, SIZE)
            from_j = j.to(tl.int64)[:, None]
            k_at = k_ptr + from_j * k_row + head // GROUP * K_WIDTH + kd[None]
            k = tl.load(k_at, mask=(j < last)[:, None] & (kd < K_WIDTH)[None], other=0.0)
            v_at = v_ptr + from_j * v_row + head // GROUP * V_WIDTH + vd[None]
            v = tl.load(v_at, mask=(j < last)[:, None] & (vd < V_WIDTH)[None], other=0.0)
            scores, slope = scores_of(q, k, i, j, last, scale, softcap, CAPPED, WINDOW)
            weights = tl.exp2(scores - sums[:, None])
            of_weights = tl.dot(g, tl.trans(v), input_precision="ieee")
            of_scores = weights * (of_weights - inner[:, None]) * slope
            made += tl.dot(of_scores.to(k.dtype), k, input_precision="ieee")
        of_q_at = of_q_ptr + (at * heads + head) * K_WIDTH + kd[None]
        tl.store(of_q_at, (made * scale).to(of_q_ptr.dtype.element_ty), mask=inside_k)


# fmt: off
@jit
def _backward_keys(
    q_ptr, k_ptr, v_ptr, ends_ptr, g_ptr, sums_ptr, inner_ptr, of_k_ptr, of_v_ptr, q_row, k_row,
    v_row, sequences, tokens, heads, scale, softcap,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SIZE: tl.constexpr,
    K_WIDTH: tl.constexpr, K_PAD: tl.constexpr, V_WIDTH: tl.constexpr, V_PAD: tl.constexpr,
    ROWS_PAD: tl.constexpr,
):
    # fmt: on
    """Gradients of a tile of keys and values of one key head, from all heads that share it."""
    key_head = tl.program_id(1)
    _first, last, begin = tile_of(ends_ptr, sequences, tl.program_id(0), SIZE, ROWS_PAD)
    if begin < last:
        j = begin + tl.arange(0, SIZE)
        kd, vd = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
        at = j.to(tl.int64)[:, None]
        inside_k = (j < last)[:, None] & (kd < K_WIDTH)[None]
        inside_v = (j < last)[:, None] & (vd < V_WIDTH)[None]
        k = tl.load(k_ptr + at * k_row + key_head * K_WIDTH + kd[None], mask=inside_k, other=0.0)
        v = tl.load(v_ptr + at * v_row + key_head * V_WIDTH + vd[None], mask=inside_v, other=0.0)
        of_k = tl.zeros([SIZE, K_PAD], tl.float32)
        of_v = tl.zeros([SIZE, V_PAD], tl.float32)
        end = last
        if WINDOW:
            end = tl.minimum(last, begin + SIZE + WINDOW - 1)
        for member in range(GROUP):
            head = key_head * GROUP + member
            for query in range(begin, end, SIZE):
                i = query + tl.arange(0, SIZE)
                from_i = i.to(tl.int64)[:, None]
                q_at = q_ptr + from_i * q_row + head * K_WIDTH + kd[None]
                q = tl.load(q_at, mask=(i < last)[:, None] & (kd < K_WIDTH)[None], other=0.0)
                g_at = g_ptr + (from_i * heads + head) * V_WIDTH + vd[None]
                g = tl.load(g_at, mask=(i < last)[:, None] & (vd < V_WIDTH)[None], other=0.0)
                sums = tl.load(sums_ptr + head * tokens + i, mask=i < last, other=0.0)
                inner = tl.load(inner_ptr + head * tokens + i, mask=i < last, other=0.0)
                scores, slope = scores_of(q, k, i, j, last, scale, softcap, CAPPED, WINDOW)
                weights = tl.exp2(scores - sums[:, None])
                turned = tl.trans(weights.to(g.dtype))
                of_v += tl.dot(turned, g, input_precision="ieee")
                of_weights = tl.dot(g, tl.trans(v), input_precision="ieee")
                of_scores = weights * (of_weights - inner[:, None]) * slope
                of_k += tl.dot(tl.trans(of_scores.to(q.dtype)), q, input_precision="ieee")
        key_heads = heads // GROUP
        of_k_at = of_k_ptr + (at * key_heads + key_head) * K_WIDTH + kd[None]
        tl.store(of_k_at, (of_k * scale).to(of_k_ptr.dtype.element_ty), mask=inside_k)
        of_v_at = of_v_ptr + (at * key_heads + key_head) * V_WIDTH + vd[None]
        tl.store(of_v_at, of_v.to(of_v_ptr.dtype.element_ty), mask=inside_v)
