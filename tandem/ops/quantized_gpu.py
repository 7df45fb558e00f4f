# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""Weights in few bits (`blockwise`) on a GPU: read as floats, or multiplied by as they are.

`dequantize_gpu` writes the floats, for products of many rows, which a tensor core's own products
then compute. `packed_linear` multiplies few rows by a weight (out, in) that is unpacked in
registers: it moves the integers and scales once, 0.53 bytes a weight of NF4 and 1.02 of int8, and
no float of the weight. Both round scale * code once to the type of the rows, so a token's products
are of the same numbers in decoding and in training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.ops.jit_gpu import jit, tl, triton

KINDS = ("int8", "int4", "nf4")
FEW_ROWS = 64
"""Most rows that `packed_linear` takes."""
_UNPACKED = 2048  # weights that one program writes


@torch.library.custom_op("tandem::dequantize_gpu", mutates_args=("out",))
def dequantize_gpu(
    codes: Tensor, scales: Tensor, table: Tensor, out: Tensor, kind: int, block: int
) -> None:
    """Write the numbers of flat codes (uint8) and scales to `out`, as `blockwise.dequantize`.

    Args:
        table: of NF4, the 16 numbers; else anything.
        out: contiguous. kind: a place in KINDS. block: numbers to a scale.
    """
    numel = out.numel()
    if numel:
        _unpack[(triton.cdiv(numel, _UNPACKED),)](
            codes, scales, table, out, numel, KIND=kind, BLOCK=block, SIZE=_UNPACKED,
            enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip


@dequantize_gpu.register_fake
def _(*_: Any) -> None:
    return


def takes(rows: int, shape: torch.Size, kind: str, block: int) -> bool:
    """Whether `packed_linear` multiplies this many rows by a weight of this shape and code."""
    return rows <= FEW_ROWS and len(shape) == 2 and shape[1] % block == 0 and kind != "int4"


@torch.library.custom_op("tandem::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor, codes: Tensor, scales: Tensor, table: Tensor, outputs: int, kind: int, block: int
) -> Tensor:
    """x (n, in) by a weight (out, in) that is flat codes and scales; n at most FEW_ROWS."""
    n, inputs = x.shape
    x = x if x.is_contiguous() else x.contiguous()
    out = x.new_empty((n, outputs))
    if n:
        wide = 32
        _packed_rows[(triton.cdiv(outputs, wide),)](
            x, codes, scales, table, out, n, outputs, INPUTS=inputs, KIND=kind, BLOCK=block,
            STEP=max(128, block), ROWS_PAD=max(16, triton.next_power_of_2(n)), OUTPUTS=wide,
            enable_fp_fusion=True, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


@packed_linear.register_fake
def _(x: Tensor, codes: Any, scales: Any, table: Any, outputs: int, kind: Any, block: Any):
    return x.new_empty((x.shape[0], outputs))


# fmt: off
@jit
def _unpack(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, table_ptr, out_ptr, numel, KIND: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    # fmt: on
    """SIZE numbers, each scale * code."""
    begin = tl.program_id(0).to(tl.int64) * SIZE
    if KIND == 0:
        i = begin + tl.arange(0, SIZE)
        code = tl.load(codes_ptr + i, mask=i < numel, other=0)
        numbers = code.to(tl.int8, bitcast=True).to(tl.float32)
        scales = tl.load(scales_ptr + i // BLOCK, mask=i < numel, other=0.0).to(tl.float32)
        tl.store(out_ptr + i, (numbers * scales).to(out_ptr.dtype.element_ty), mask=i < numel)
    else:
        i = begin + tl.arange(0, SIZE // 2) * 2
        pair = tl.load(codes_ptr + i // 2, mask=i < numel, other=0)
        scales = tl.load(scales_ptr + i // BLOCK, mask=i < numel, other=0.0).to(tl.float32)
        low, high = (pair & 15).to(tl.int32), (pair >> 4).to(tl.int32)
        if KIND == 2:
            one, two = tl.load(table_ptr + low), tl.load(table_ptr + high)
        else:
            one, two = low.to(tl.float32) - 8.0, high.to(tl.float32) - 8.0
        both = tl.join(one * scales, two * scales)
        at = i[:, None] + tl.arange(0, 2)[None]
        tl.store(out_ptr + at, both.to(out_ptr.dtype.element_ty), mask=at < numel)


# fmt: off
@jit
def _packed_rows(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr, table_ptr, out_ptr, rows, outputs,
    INPUTS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    ROWS_PAD: tl.constexpr, OUTPUTS: tl.constexpr,
):
    # fmt: on
    """OUTPUTS columns of the result. Two codes in a byte are two products, of the even and of the
    odd inputs, so nothing is interleaved. Sums are float32, over the inputs in order."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.arange(0, ROWS_PAD)
    kind = x_ptr.dtype.element_ty
    total = tl.zeros([ROWS_PAD, OUTPUTS], tl.float32)
    SHARE: tl.constexpr = 1 if KIND == 0 else 2
    k = tl.arange(0, STEP // SHARE)
    row = n.to(tl.int64)[:, None]
    # Counted in bytes, so that the compiler sees that a row's lie side by side.
    for begin in range(0, INPUTS // SHARE, STEP // SHARE):
        byte = begin + k[None]
        inside = (n < outputs)[:, None] & (byte < INPUTS // SHARE)
        code = tl.load(codes_ptr + row * (INPUTS // SHARE) + byte, mask=inside, other=0)
        scale_at = scales_ptr + row * (INPUTS // BLOCK) + byte // (BLOCK // SHARE)
        scale = tl.load(scale_at, mask=inside, other=0.0).to(tl.float32)
        x_at = x_ptr + r[:, None] * INPUTS + byte * SHARE
        given = (r < rows)[:, None] & (byte < INPUTS // SHARE)
        x = tl.load(x_at, mask=given, other=0.0)
        if KIND == 0:
            numbers = code.to(tl.int8, bitcast=True).to(tl.float32)
            weight = (numbers * scale).to(kind)
            total += tl.dot(x, tl.trans(weight), input_precision="ieee")
        else:
            odd = tl.load(x_at + 1, mask=given, other=0.0)
            low = tl.load(table_ptr + (code & 15).to(tl.int32))
            high = tl.load(table_ptr + (code >> 4).to(tl.int32))
            total += tl.dot(x, tl.trans((low * scale).to(kind)), input_precision="ieee")
            total += tl.dot(odd, tl.trans((high * scale).to(kind)), input_precision="ieee")
    out_at = out_ptr + r[:, None] * outputs + n[None]
    tl.store(out_at, total.to(kind), mask=(r < rows)[:, None] & (n < outputs)[None])
