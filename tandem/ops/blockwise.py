"""Numbers in few bits, block by block: each block has a scale of its own.

    int8   round(x / scale) in [-127, 127], scale = max |x| / 127
    int4   round(x / scale) in [-7, 7], scale = max |x| / 7; two in a byte, the first in the lower
           half
    nf4    the nearest of the 16 quantiles of a normal, scale = max |x|; two in a byte likewise
           (arXiv:2305.14314, appendix E)

A block of zeros comes back as zeros. A block that holds an inf or a NaN, or whose scale overflows
the scales' dtype, comes back as NaN in every place: what went wrong stays seen. Numbers whose scale
underflows to 0 come back as 0.

On a CPU the work is done in C++ (`csrc/blockwise.cpp`), on a GPU by compiled functions if Triton
runs there, elsewhere by the same functions uncompiled; codes and scales are the same to the bit on
a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import ConfigError, ShapeError
from tandem.ops import gpu, layer, native

Kind = Literal["int8", "int4", "nf4"]
QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)
"""What can be quantized, and what it can come back as."""

_KINDS: tuple[Kind, ...] = ("int8", "int4", "nf4")
_MAX_BLOCK = 4096
# Table of QLoRA, appendix E; the same numbers stand in csrc/codes.h.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockCode:
    """How numbers are written: kind, numbers in a block (even, 16 to 4096), dtype of the scales.

    Raises:
        ConfigError: one of them is not possible.
    """

    kind: Kind = "int8"
    block: int = 256
    scale_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        is_sized = self.block % 2 == 0 and 16 <= self.block <= _MAX_BLOCK
        if self.kind not in _KINDS or not is_sized or self.scale_dtype not in QUANTIZABLE[:2]:
            raise ConfigError(
                f"a block code must be int8, int4 or nf4, of an even block of 16 to {_MAX_BLOCK}, "
                f"with float32 or bfloat16 scales; got {self}. Use INT8, INT4 or NF4."
            )

    @property
    def number(self) -> int:
        """The kind, as the operations in C++ know it."""
        return _KINDS.index(self.kind)

    @property
    def per_byte(self) -> int:
        """Numbers in a byte: 1 or 2."""
        return 1 if self.kind == "int8" else 2

    def num_scales(self, numels: Sequence[int]) -> int:
        """Blocks of runs of these many numbers; a block never spans two runs."""
        return sum(-(-numel // self.block) for numel in numels)

    def num_bytes(self, numels: Sequence[int]) -> int:
        """Bytes of the codes of runs of these many numbers."""
        return sum(self.run_bytes(numels))

    def run_bytes(self, numels: Sequence[int]) -> list[int]:
        """Bytes of the codes of each run; each starts a byte."""
        return [-(-numel // self.per_byte) for numel in numels]


INT8 = BlockCode("int8", 256)
INT4 = BlockCode("int4", 256)
NF4 = BlockCode("nf4", 64, torch.bfloat16)


def quantize(
    x: Tensor, code: BlockCode = INT8, numels: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Write numbers in few bits.

    Args:
        x: (..., n) float32, bfloat16 or float16; each row apart from the others.
        code: kind, block and scales.
        numels: lengths of the runs of a row, n in all, which share no block and no byte.
    Returns:
        codes (..., code.num_bytes(numels)) uint8 and scales (..., code.num_scales(numels)).
    Raises:
        ShapeError: x holds no such numbers, or the runs are not n long.
    """
    lead, numel = x.shape[:-1], x.shape[-1]
    runs = _runs(numels, numel)
    codes = x.new_empty(lead.numel(), code.num_bytes(runs), dtype=torch.uint8)
    scales = x.new_empty(lead.numel(), code.num_scales(runs), dtype=code.scale_dtype)
    rows = x.detach().reshape(lead.numel(), numel).contiguous()
    quantize_into(rows, codes, scales, code, runs)
    return codes.view(*lead, codes.shape[-1]), scales.view(*lead, scales.shape[-1])


def dequantize(
    codes: Tensor,
    scales: Tensor,
    numel: int,
    code: BlockCode = INT8,
    dtype: torch.dtype = torch.float32,
    numels: Sequence[int] | None = None,
) -> Tensor:
    """Read what `quantize` wrote: (..., numel) in `dtype`, each scale * code rounded once to it.

    Raises:
        ShapeError: codes or scales are not those of rows of `numel` numbers.
    """
    runs = _runs(numels, numel)
    lead = codes.shape[:-1]
    out = codes.new_empty(lead.numel(), numel, dtype=dtype)
    codes = codes.reshape(1, lead.numel(), codes.shape[-1])
    scales = scales.detach().reshape(1, lead.numel(), scales.shape[-1])
    dequantize_into(codes, scales, out, code, runs)
    return out.view(*lead, numel)


def quantize_into(
    x: Tensor, codes: Tensor, scales: Tensor, code: BlockCode, numels: Sequence[int]
) -> None:
    """`quantize` x (R, n) into codes (R, bytes) and scales (R, blocks), whose rows may lie apart.

    Raises:
        ShapeError: the tensors disagree.
    """
    _check(codes, scales, x, code, numels)
    if _native(x):
        native.op("blockwise_quantize_")(x, codes, scales, code.number, code.block, [*numels])
        return
    encode = _for_device(_ENCODERS[code.kind], x)
    padded = _pad(x, numels, code.block).view(-1, code.block)
    block_codes, block_scales = encode(padded, code.scale_dtype)
    scales.copy_(block_scales.view(scales.shape))
    width = code.block // code.per_byte
    block_codes = block_codes.view(x.shape[0], scales.shape[1] * width)
    codes.copy_(_strip(block_codes, code.run_bytes(numels), width))


def dequantize_into(
    codes: Tensor, scales: Tensor, out: Tensor, code: BlockCode, numels: Sequence[int]
) -> None:
    """Read codes (P, R, bytes) and scales (P, R, blocks) into out (R, n): the sum over P of them.

    The sum is taken in float32, the first of P first, and rounded once to out's dtype.

    Raises:
        ShapeError: the tensors disagree.
    """
    _check(codes, scales, out, code, numels)
    if _native(out):
        native.op("blockwise_dequantize_")(codes, scales, out, code.number, code.block, [*numels])
        return
    if gpu.fuses(out) and out.is_contiguous() and out.shape[0] == len(codes) == len(numels) == 1:
        from tandem.ops.quantized_gpu import KINDS, dequantize_gpu  # imports Triton

        table, kind = nf4_table(out.device), KINDS.index(code.kind)
        flat = codes.reshape(-1), scales.reshape(-1)
        dequantize_gpu(*flat, table, out, kind, code.block)
        return
    decode = _for_device(_DECODERS[code.kind], out)
    parts, width = codes.shape[0], code.block // code.per_byte
    num_blocks = scales.shape[1] * scales.shape[2]
    padded = _pad(codes, code.run_bytes(numels), width).view(parts, num_blocks, width)
    blocks = decode(padded, scales.reshape(parts, num_blocks), out.dtype)
    blocks = blocks.view(out.shape[0], scales.shape[2] * code.block)
    out.copy_(_strip(blocks, numels, code.block))


def takes(x: Tensor, code: BlockCode) -> bool:
    """Whether `linear` multiplies rows of x, (..., in), by a weight of such codes."""
    return layer.takes(x) and reads_rows(x.shape[-1], code) and x.numel() > 0


def reads_rows(inputs: int, code: BlockCode) -> bool:
    """Whether every row of `inputs` numbers starts a byte, wherever it is in the run."""
    return inputs % code.per_byte == 0


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    outputs: int,
    code: BlockCode,
    bias: Tensor | None = None,
) -> Tensor:
    """x by a weight (outputs, in) that stays codes, without gradient: the bits of `dense.linear`
    by the weight as `dequantize` gives it.

    A few rows of the weight at a time are read into the processor's caches and multiplied there.

    Args:
        x: (..., in), one that `takes` takes.
        codes, scales: of the weight as one run. bias: (outputs,), of x's dtype.
    Returns:
        (..., outputs).
    """
    made: Tensor = native.op("linear_coded")(
        x, codes, scales, code.number, code.block, outputs, bias
    )
    return made


def _pad(rows: Tensor, lengths: Sequence[int], width: int) -> Tensor:
    """Rows of runs of these lengths, with zeros behind each up to a multiple of `width`."""
    if all(length % width == 0 for length in lengths):
        return rows.contiguous()
    runs = rows.split([*lengths], -1)
    return torch.cat([F.pad(run, (0, -run.shape[-1] % width)) for run in runs], -1)


def _strip(rows: Tensor, lengths: Sequence[int], width: int) -> Tensor:
    """Rows as `_pad` makes them, without the padding."""
    if all(length % width == 0 for length in lengths):
        return rows
    runs = rows.split([-(-length // width) * width for length in lengths], -1)
    return torch.cat([run[..., :n] for run, n in zip(runs, lengths, strict=True)], -1)


def _scaled(blocks: Tensor, largest: float, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale (zeros in a block without a finite scale), and the scales (B,)."""
    wide = blocks.float()
    scales = wide.abs().amax(-1, keepdim=True) / largest
    if scale_dtype == torch.bfloat16:
        # By hand, half to even: a compiler leaves out the way to bfloat16 and back.
        bits = scales.view(torch.int32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
        scales = torch.where(scales.isfinite(), rounded, torch.nan)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    units = torch.where(scales > 0, wide / scales, 0.0)
    return units, scales.squeeze(-1).to(scale_dtype)


def _in_pairs(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _from_pairs(codes: Tensor) -> Tensor:
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def _encode_int8(blocks: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    units, scales = _scaled(blocks, 127.0, scale_dtype)
    return units.round().clamp(-127, 127).to(torch.int8).view(torch.uint8), scales


def _encode_int4(blocks: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    units, scales = _scaled(blocks, 7.0, scale_dtype)
    return _in_pairs((units.round().clamp(-7, 7) + 8).to(torch.uint8)), scales


def _encode_nf4(blocks: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    units, scales = _scaled(blocks, 1.0, scale_dtype)
    numbers = nf4_table(blocks.device)
    edges = (numbers[1:] + numbers[:-1]) / 2
    return _in_pairs(torch.bucketize(units, edges).to(torch.uint8)), scales


def _summed(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """numbers (P, B, block) float32 by scales (P, B), added up over P, in order."""
    total = numbers[0] * scales[0].float().unsqueeze(-1)
    for part in range(1, numbers.shape[0]):
        total = total + numbers[part] * scales[part].float().unsqueeze(-1)
    return total.to(dtype)


def _decode_int8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return _summed(codes.view(torch.int8).float(), scales, dtype)


def _decode_int4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return _summed(_from_pairs(codes).float() - 8.0, scales, dtype)


def _decode_nf4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = nf4_table(codes.device)
    return _summed(numbers[_from_pairs(codes).int()], scales, dtype)


_ENCODERS = {"int8": _encode_int8, "int4": _encode_int4, "nf4": _encode_nf4}
_DECODERS = {"int8": _decode_int8, "int4": _decode_int4, "nf4": _decode_nf4}


def _for_device(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """A function over x; compiled on a GPU where Triton, by which that is done, runs."""
    return _compiled(function) if x.is_cuda and not gpu.launch_fault() else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


@cache
def nf4_table(device: torch.device) -> Tensor:
    """The 16 numbers of NF4, made once on a device: a CUDA graph cannot contain their copy."""
    return torch.tensor(_NF4, device=device)


def _runs(numels: Sequence[int] | None, numel: int) -> tuple[int, ...]:
    runs = (numel,) if numels is None else tuple(numels)
    if sum(runs) != numel or any(run < 0 for run in runs):
        raise ShapeError(
            f"numels must add up to the {numel} numbers of a row; got {runs}. Give one length per "
            "run."
        )
    return runs


def _check(
    codes: Tensor, scales: Tensor, rows: Tensor, code: BlockCode, numels: Sequence[int]
) -> None:
    """Raise where codes and scales (..., R, ...) are not those of rows (R, n) of these runs."""
    _runs(numels, rows.shape[-1])
    found = [(*part.shape[-2:], part.dtype) for part in (codes, scales)]
    expected = [
        (rows.shape[0], code.num_bytes(numels), torch.uint8),
        (rows.shape[0], code.num_scales(numels), code.scale_dtype),
    ]
    is_float = rows.dtype in QUANTIZABLE
    if found != expected or codes.shape[:-1] != scales.shape[:-1] or not is_float:
        raise ShapeError(
            f"codes and scales of float rows must be {expected}; got {found} of {rows.dtype}. Read "
            "them as they were written, and as float32, bfloat16 or float16."
        )


def _native(x: Tensor) -> bool:
    return x.is_cpu and native.available()
