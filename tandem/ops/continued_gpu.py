# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""Causal attention of new tokens over paged KV memory on a GPU, for what flash attention lacks.

Prompts that run in parts, or continue a prefix that others share, with soft caps, sinks, heads of
odd or unequal widths or float32: all of them in one launch that reads keys and values where they
lie in memory. No gradient. As in `varlen_gpu`, tiles are found on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.ops.attention_context import BLOCK_TOKENS, AttentionSpec, Before
from tandem.ops.jit_gpu import jit, padded, tl, triton
from tandem.ops.varlen_gpu import scores_of, tile_of, tiles


def continued_attention_gpu(
    q: Tensor, keys: Tensor, values: Tensor, cu_seqlens: Tensor, before: Before, kind: AttentionSpec
) -> Tensor:
    """New tokens q (N, Hq, Dk) of B sequences over what memory holds of each -> (N, Hq, Dv).

    Args:
        keys, values: (blocks, 16, Hkv, Dk) and (blocks, 16, Hkv, Dv), the new tokens' there too.
        cu_seqlens: (B + 1,) int32, of the new tokens. kind: without dropout.
    """
    made: Tensor = _continued(
        q.to(keys.dtype), keys, values, before.tables, before.starts_at, cu_seqlens, kind.sinks,
        kind.scale, kind.window, kind.softcap,
    )  # fmt: skip
    return made


def part_tiles(width: int, size: int) -> tuple[int, int]:
    """Tokens of a tile, and warps, such that no register is spilled
    (tests/ops/compile_kernels.py).

    Args:
        width: of the wider heads. size: bytes of one number.
    """
    return tiles(width, size)[0], 4 if width * size <= 128 else 8


@torch.library.custom_op("tandem::continued_attention_gpu", mutates_args=())
def _continued(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, ends: Tensor,
    sinks: Tensor | None, scale: float, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    n, query_heads, key_width = q.shape
    heads, value_width = values.shape[2:]
    out = q.new_empty((n, query_heads, value_width))
    if not n:
        return out
    q = q if q.stride()[1:] == (key_width, 1) else q.contiguous()
    tables = tables if tables.stride(1) == 1 else tables.contiguous()
    sequences = len(ends) - 1
    size, warps = part_tiles(max(key_width, value_width), q.element_size())
    _attend_tile[(triton.cdiv(n, size) + sequences, query_heads)](
        q, keys, values, tables, starts, ends, q if sinks is None else sinks, out, q.stride(0),
        tables.stride(0), sequences, query_heads, scale, softcap, SINKS=sinks is not None,
        HEADS=heads, GROUP=query_heads // heads, BLOCK=BLOCK_TOKENS, WINDOW=window,
        CAPPED=softcap != 0, SIZE=size, K_WIDTH=key_width, K_PAD=padded(key_width),
        V_WIDTH=value_width, V_PAD=padded(value_width),
        ROWS_PAD=triton.next_power_of_2(max(1, sequences)),
        enable_fp_fusion=True, num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out


@_continued.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], values.shape[3]))


# fmt: off
@jit
def _attend_tile(
    q_ptr, keys_ptr, values_ptr, tables_ptr, starts_ptr, ends_ptr, sinks_ptr, out_ptr, q_row,
    table_row, sequences, query_heads, scale, softcap, SINKS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SIZE: tl.constexpr, K_WIDTH: tl.constexpr, K_PAD: tl.constexpr,
    V_WIDTH: tl.constexpr, V_PAD: tl.constexpr, ROWS_PAD: tl.constexpr,
):
    # fmt: on
    """A tile of one sequence's new queries, of one head."""
    head = tl.program_id(1)
    first, last, begin = tile_of(ends_ptr, sequences, tl.program_id(0), SIZE, ROWS_PAD)
    if begin < last:
        b = tl.arange(0, ROWS_PAD)
        later = tl.load(ends_ptr + b, mask=b < sequences, other=2147483647) <= begin
        row = tl.sum(later.to(tl.int32), 0) - 1  # empty sequences begin where the next one does
        before = tl.load(starts_ptr + row).to(tl.int32)
        token = begin + tl.arange(0, SIZE)
        i, end = token - first + before, last - first + before  # as the whole sequence counts
        kd, vd = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
        at = token.to(tl.int64)[:, None]
        q_at = q_ptr + at * q_row + head * K_WIDTH + kd[None]
        q = tl.load(q_at, mask=(i < end)[:, None] & (kd < K_WIDTH)[None], other=0.0)
        top = tl.full([SIZE], -1.0e30, tl.float32)
        total = tl.zeros([SIZE], tl.float32)
        if SINKS:
            sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
            top = tl.zeros([SIZE], tl.float32) + sink
            total += 1.0
        summed = tl.zeros([SIZE, V_PAD], tl.float32)
        start, position = begin * 0, begin - first + before
        if WINDOW:
            start = tl.maximum(start, position - WINDOW + 1)
        for key in range(start, tl.minimum(position + SIZE, end), SIZE):
            j = key + tl.arange(0, SIZE)
            table_at = tables_ptr + row.to(tl.int64) * table_row + j // BLOCK
            block = tl.load(table_at, mask=j < end, other=0).to(tl.int64)
            place = ((block * BLOCK + j % BLOCK) * HEADS + head // GROUP)[:, None]
            k_at = keys_ptr + place * K_WIDTH + kd[None]
            k = tl.load(k_at, mask=(j < end)[:, None] & (kd < K_WIDTH)[None], other=0.0)
            scores, _ = scores_of(q, k, i, j, end, scale, softcap, CAPPED, WINDOW)
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(top - higher)
            v_at = values_ptr + place * V_WIDTH + vd[None]
            v = tl.load(v_at, mask=(j < end)[:, None] & (vd < V_WIDTH)[None], other=0.0)
            part = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            summed = summed * shrink[:, None] + part
            total = total * shrink + tl.sum(weights, 1)
            top = higher
        total = tl.where(i < end, total, 1.0)
        out_at = out_ptr + (at * query_heads + head) * V_WIDTH + vd[None]
        made = (summed / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_at, made, mask=(i < end)[:, None] & (vd < V_WIDTH)[None])
