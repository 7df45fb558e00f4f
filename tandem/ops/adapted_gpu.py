# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""Linear layers with low-rank adapters over few rows on a GPU: one kernel for up to three layers.

    y = round(round(W x + b) + round(B (s A x)))

Decoding runs it, without gradient. A tile of outputs reads x once, multiplies it by its rows of W
and by all of A, and adds B times the latter at the end: weights and adapters stay where they are,
nothing is copied or merged. W may be in few bits (`quantized_gpu`), which are unpacked in
registers. A and B are float32. An x in bfloat16 is multiplied by A as three bfloat16 parts that add
up to it: products are exact and sums float32, as in the plain path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.ops.gpu import contiguous
from tandem.ops.jit_gpu import jit, tl, triton
from tandem.ops.quantized_gpu import FEW_ROWS, KINDS
from tandem.ops.quantized_gpu import takes as takes_rows

MAX_RANK = 64
"""Widest adapter that is computed beside each tile of outputs; wider ones take the plain path."""
MAX_LAYERS = 3
_PLAIN = len(KINDS)  # the kind of a weight that is not in few bits


@dataclass(frozen=True, slots=True)
class Adapter:
    """down (R, in) and up (out, R) in float32, and what their product is scaled by."""

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight (outputs, in) as flat codes (uint8) and scales of `blockwise`.

    table: of NF4, the 16 numbers; else anything. kind: a place in `quantized_gpu.KINDS`.
    block: numbers to a scale.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor
    shape: torch.Size
    kind: int
    block: int


Weight = Tensor | Packed


def takes(
    x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None],
    adapters: Sequence[Adapter | None],
) -> bool:  # fmt: skip
    """Whether `adapted_linear` computes these layers of x (..., in)."""
    first = weights[0]
    if isinstance(first, Packed):
        alike = x.numel() // x.shape[-1] <= FEW_ROWS and all(
            isinstance(weight, Packed)
            and (weight.kind, weight.block) == (first.kind, first.block)
            and takes_rows(1, weight.shape, KINDS[weight.kind], weight.block)
            for weight in weights
        )
    else:
        alike = all(
            isinstance(weight, Tensor) and weight.dtype == x.dtype and weight.is_contiguous()
            for weight in weights
        )
    return (
        alike
        and len(weights) <= MAX_LAYERS
        and len({bias is None for bias in biases}) == 1
        and all(bias is None or bias.dtype == x.dtype for bias in biases)
        and any(adapter is not None for adapter in adapters)
        and all(
            adapter.down.dtype == adapter.up.dtype == torch.float32
            and len(adapter.down) <= MAX_RANK
            and adapter.down.is_contiguous()
            and adapter.up.is_contiguous()
            for adapter in adapters
            if adapter is not None
        )
    )


def adapted_linear(
    x: Tensor,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    adapters: Sequence[Adapter | None],
) -> Tensor:
    """Layers over one input, side by side; no gradient.

    Args:
        x: (..., in). weights: (out_i, in) each. biases: (out_i,) each, or all None.
        adapters: None: the layer has none. All as `takes` takes them.
    Returns:
        (..., sum of out_i).
    """
    rows = contiguous(x.reshape(-1, x.shape[-1]))
    none = rows.new_empty(0, dtype=torch.float32)
    packed = [weight for weight in weights if isinstance(weight, Packed)]
    made: Tensor = _adapted_linear(
        rows,
        [weight.codes if isinstance(weight, Packed) else weight for weight in weights],
        [weight.scales for weight in packed],
        packed[0].table if packed else None,
        [weight.shape[0] for weight in weights],
        [bias for bias in biases if bias is not None],
        [none if adapter is None else adapter.down for adapter in adapters],
        [none if adapter is None else adapter.up for adapter in adapters],
        [0.0 if adapter is None else adapter.scale for adapter in adapters],
        packed[0].kind if packed else _PLAIN,
        packed[0].block if packed else 1,
    )
    return made.view(*x.shape[:-1], made.shape[-1])


@torch.library.custom_op("tandem::adapted_linear", mutates_args=())
def _adapted_linear(
    x: Tensor, weights: list[Tensor], units: list[Tensor], table: Tensor | None, sizes: list[int],
    biases: list[Tensor], downs: list[Tensor], ups: list[Tensor], scales: list[float], kind: int,
    block: int,
) -> Tensor:  # fmt: skip
    n, inputs = x.shape
    ranks = [len(down) for down in downs]
    out = x.new_empty((n, sum(sizes)))
    if not out.numel():
        return out
    rest = MAX_LAYERS - len(weights)  # a layer without outputs takes no tile
    sizes, ranks, scales = sizes + [0] * rest, ranks + [0] * rest, scales + [0.0] * rest
    units, biases = units or weights, biases or weights
    given = [
        tensor for part in (weights, units, biases, downs, ups)
        for tensor in (*part, *[part[0]] * rest)
    ]  # fmt: skip
    rank = max(16, triton.next_power_of_2(max(ranks)))
    rows, outputs, step, warps, stages = tiles(n, rank, kind, block)
    count = sum(triton.cdiv(size, outputs) for size in sizes)
    _adapted_rows[(triton.cdiv(n, rows), count)](
        x, *given, x if table is None else table, out, n, *sizes, *ranks, *scales, INPUTS=inputs,
        BIASED=biases is not weights, IN_PARTS=x.dtype == torch.bfloat16, KIND=kind, BLOCK=block,
        ROWS=rows, OUTPUTS=outputs, STEP=step, RANK_PAD=rank,
        enable_fp_fusion=True, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@_adapted_linear.register_fake
def _(x: Tensor, weights: Any, units: Any, table: Any, sizes: list[int], *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], sum(sizes)))


def tiles(rows: int, rank: int, kind: int, block: int) -> tuple[int, int, int, int, int]:
    """Rows, outputs and inputs of a tile, warps and stages, such that no register is spilled
    (tests/ops/compile_kernels.py)."""
    few = rows <= 16
    if kind != _PLAIN:
        if rank <= 16:
            return (16, 32, 128, 8, 3) if few else (32, 32, 64, 8, 3)
        return 16, 32, 64, 8, 3
    if rank <= 16:
        return (16, 32, 128, 4, 4) if few else (64, 32, 64, 4, 4)
    return (16, 32, 64, 4, 3) if few else (32, 64, 64, 8, 3)


@jit
def _times_a(x, a, IN_PARTS: tl.constexpr):
    """x by float32 rows a, transposed, to float32's rounding."""
    if IN_PARTS:
        high = a.to(x.dtype)
        rest = a - high.to(tl.float32)
        middle = rest.to(x.dtype)
        low = (rest - middle.to(tl.float32)).to(x.dtype)
        made = tl.dot(x, tl.trans(low)) + tl.dot(x, tl.trans(middle)) + tl.dot(x, tl.trans(high))
    else:
        made = tl.dot(x.to(tl.float32), tl.trans(a), input_precision="ieee")
    return made


# fmt: off
@jit
def _adapted_rows(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, unit0_ptr, unit1_ptr, unit2_ptr, bias0_ptr, bias1_ptr,
    bias2_ptr, a0_ptr, a1_ptr, a2_ptr, b0_ptr, b1_ptr, b2_ptr, table_ptr, out_ptr, rows,
    size0, size1, size2, rank0, rank1, rank2, scale0, scale1, scale2,
    INPUTS: tl.constexpr, BIASED: tl.constexpr, IN_PARTS: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    RANK_PAD: tl.constexpr,
):
    # fmt: on
    """A tile of one layer's outputs for a tile of rows. KIND: of the weights' codes; 3, none.

    Two codes in a byte are two products, of the even and of the odd inputs, as in `quantized_gpu`.
    """
    tile = tl.program_id(1)
    kind = x_ptr.dtype.element_ty
    tiles0, tiles1 = tl.cdiv(size0, OUTPUTS), tl.cdiv(size1, OUTPUTS)
    w_ptr, unit_ptr, bias_ptr, a_ptr, b_ptr = w0_ptr, unit0_ptr, bias0_ptr, a0_ptr, b0_ptr
    second, third = tile >= tiles0, tile >= tiles0 + tiles1
    if third:
        w_ptr, unit_ptr, bias_ptr, a_ptr, b_ptr = w2_ptr, unit2_ptr, bias2_ptr, a2_ptr, b2_ptr
    elif second:
        w_ptr, unit_ptr, bias_ptr, a_ptr, b_ptr = w1_ptr, unit1_ptr, bias1_ptr, a1_ptr, b1_ptr
    size = tl.where(third, size2, tl.where(second, size1, size0))
    rank = tl.where(third, rank2, tl.where(second, rank1, rank0))
    scale = tl.where(third, scale2, tl.where(second, scale1, scale0))
    first = tl.where(third, size0 + size1, tl.where(second, size0, 0))
    tile -= tl.where(third, tiles0 + tiles1, tl.where(second, tiles0, 0))
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, RANK_PAD)
    SHARE: tl.constexpr = 2 if KIND == 2 else 1  # inputs to a code's byte
    k, byte = tl.arange(0, STEP)[None], tl.arange(0, STEP // SHARE)[None]
    x_at = x_ptr + r.to(tl.int64)[:, None] * INPUTS
    w_at = w_ptr + n.to(tl.int64)[:, None] * (INPUTS // SHARE)
    unit_at = unit_ptr + n.to(tl.int64)[:, None] * (INPUTS // BLOCK)
    a_at = a_ptr + j[:, None] * INPUTS
    of_w = tl.zeros([ROWS, OUTPUTS], tl.float32)
    of_a = tl.zeros([ROWS, RANK_PAD], tl.float32)
    for begin in range(0, INPUTS, STEP):
        inside = begin + k < INPUTS
        x = tl.load(x_at + begin + k, mask=(r < rows)[:, None] & inside, other=0.0)
        a = tl.load(a_at + begin + k, mask=(j < rank)[:, None] & inside, other=0.0)
        here = begin // SHARE + byte
        of_n = (n < size)[:, None] & (here < INPUTS // SHARE)
        w = tl.load(w_at + here, mask=of_n, other=0)
        of_a += _times_a(x, a, IN_PARTS)
        if KIND != 3:
            unit = tl.load(unit_at + here // (BLOCK // SHARE), mask=of_n, other=0.0).to(tl.float32)
        if KIND == 0:
            w = (w.to(tl.int8, bitcast=True).to(tl.float32) * unit).to(kind)
        if KIND == 2:
            x, odd = tl.split(tl.reshape(x, (ROWS, STEP // 2, 2)))
            high = tl.load(table_ptr + (w >> 4).to(tl.int32))
            low = tl.load(table_ptr + (w & 15).to(tl.int32))
            of_w += tl.dot(odd, tl.trans((high * unit).to(kind)), input_precision="ieee")
            w = (low * unit).to(kind)
        of_w += tl.dot(x, tl.trans(w), input_precision="ieee")
    b_at = b_ptr + n.to(tl.int64)[:, None] * rank + j[None]
    b = tl.load(b_at, mask=(n < size)[:, None] & (j < rank)[None], other=0.0)
    added = tl.dot(of_a * scale, tl.trans(b), input_precision="ieee")
    if BIASED:
        of_w += tl.load(bias_ptr + n, mask=n < size, other=0.0).to(tl.float32)[None]
    made = of_w.to(kind).to(tl.float32) + added.to(kind).to(tl.float32)
    out_at = out_ptr + r.to(tl.int64)[:, None] * (size0 + size1 + size2) + first + n[None]
    tl.store(out_at, made.to(kind), mask=(r < rows)[:, None] & (n < size)[None])
