"""AdamW's two moments in fewer bytes: bf16, or 8 bits in blocks, rounded stochastically.

A moment is decoded to float32, updated, and rounded to one of its two neighbors, at random so that
the mean is exact: changes smaller than a rounding step are not lost (arXiv:1502.02551). The random
bits are a hash of weight, step and element, so a run repeats itself on every layout of ranks.

    kind   bytes per weight   format
    fp32   8                  exact
    bf16   4                  8 exponent bits, 7 mantissa bits
    8bit   2.03               a float32 scale per block of 256, as bitsandbytes (arXiv:2110.02861);
                              codes are floating-point numbers of 3 mantissa bits relative to the
                              block's largest: the first moment has a sign and 2^-16 to 1, the
                              second 2^-32 to 1 and no zero (arXiv:2309.01507)

As 2^-16 is the root of 2^-32, a rounded first moment over the root of a rounded second one is at
most what AdamW itself allows: no update explodes. Blocks never cross a row, so ZeRO, which splits
rows, does not change them. Vectors, and rows shorter than 16, stay in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tandem.config.parallel import OptimizerStates
from tandem.ops import native

BLOCK = 256
"""Elements of a row that share a scale."""
MOMENTS = ("exp_avg", "exp_avg_sq")
_SHORTEST_ROW = 16

_DROPPED_BITS = 20
"""Mantissa bits of a float32 that an 8-bit code leaves out: 3 of 23 remain."""
_ONE = 127 << 3
"""The bits of 1.0 that remain."""
_LOWEST = {"exp_avg": _ONE - 127, "exp_avg_sq": _ONE - 255}
"""What remains of the largest number below code 1, or of code 0 where there is no zero."""


def kind_for(kind: OptimizerStates, shape: torch.Size) -> OptimizerStates:
    """How a weight of this shape keeps its moments."""
    if kind == "8bit" and (len(shape) < 2 or row_size(shape) < _SHORTEST_ROW):
        return "fp32"
    return kind


def row_size(shape: torch.Size) -> int:
    """Elements per index of the first dimension."""
    return shape[1:].numel()


def zero_moments(
    kind: OptimizerStates, parameter: Tensor, device: torch.device
) -> dict[str, Tensor]:
    """The moments before the first step by name, split as the parameter is; in 8 bits with an
    `_scale` each, (rows, blocks) float32."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}[kind]
    tensors = {
        name: torch.zeros_like(parameter.detach(), dtype=dtype, device=device) for name in MOMENTS
    }
    if kind == "8bit":
        blocks = -(-row_size(parameter.shape) // BLOCK)
        for name in MOMENTS:
            tensors[f"{name}_scale"] = _rows_like(tensors[name], blocks)
    return tensors


def _rows_like(tensor: Tensor, columns: int) -> Tensor:
    """Zeros (rows, columns) with as many rows as `tensor`, split and kept as its rows are."""
    # Made from a view: DTensor.from_local would take what is kept on the host to the mesh's GPU.
    rows = tensor.flatten(1)[:, :columns]
    return torch.zeros_like(rows, dtype=torch.float32, memory_format=torch.contiguous_format)


def random_bits(num: int, first: int, ordinal: int, step: Tensor) -> Tensor:
    """(num,) int32 of 32 random bits, which depend on nothing but element, weight and step.

    Nothing is read from the device. The mixing is that of MurmurHash3.

    Args:
        first: number of the first element in its whole weight.
        ordinal: number of the weight in its model.
        step: 0-d, the count of steps.
    """
    key = _key(ordinal, step).to(torch.int32)
    bits = torch.arange(num, dtype=torch.int32, device=step.device)
    bits.add_(_signed(first)).mul_(_signed(0x9E3779B1)).add_(key)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))
    return bits.bitwise_xor_(_shifted(bits, 16))


def _key(ordinal: int, step: Tensor) -> Tensor:
    return (step.to(torch.int64) * 0x9E3779B1 + (ordinal + 1) * 0x85EBCA77) & 0xFFFFFFFF


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, zeros following; `>>` alone repeats the sign."""
    return (bits >> by).bitwise_and_(0xFFFFFFFF >> by)


def _signed(number: int) -> int:
    """The low 32 bits as an int32 has them."""
    return (number + 2**31) % 2**32 - 2**31


def to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Float32 values rounded to bf16, up or down by the low 16 of `bits`; finite values only."""
    rounded = (values.view(torch.int32) + (bits & 0xFFFF)).bitwise_and_(-(1 << 16))
    return rounded.view(torch.float32).to(torch.bfloat16)


def to_8bit(name: str, values: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (R, C) uint8 and scales (R, blocks) float32 of `values` (R, C) float32.

    Args:
        name: the moment: `exp_avg` has signs, `exp_avg_sq` none and no zero.
        bits: (R, C) int32; the low 16 are used.
    """
    columns = values.shape[1]
    blocks = -(-columns // BLOCK)
    sizes = values.abs()
    scales = _in_blocks(sizes).amax(dim=-1)
    divisor = scales.clamp_min(torch.finfo(torch.float32).tiny).repeat_interleave(
        BLOCK, dim=1, output_size=blocks * BLOCK
    )[:, :columns]
    sizes /= divisor
    chance = bits & 0xFFFF
    codes = sizes.view(torch.int32) + (chance << (_DROPPED_BITS - 16))
    codes = (codes >> _DROPPED_BITS) - _LOWEST[name]
    if name == "exp_avg_sq":
        return codes.clamp_(0, 255).to(torch.uint8), scales
    # Below the smallest number: zero or that number.
    smallest = float(_magnitudes(name)[1])
    up = (chance * (smallest / 65536) < sizes).to(torch.int32)
    codes = torch.where(sizes < smallest, up, codes.clamp_(1, 127))
    return codes.add_((values < 0).to(torch.int32) << 7).to(torch.uint8), scales


def from_8bit(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values (R, C) of codes (R, C) and scales (R, blocks)."""
    if _is_native(codes) and codes.is_contiguous() and scales.is_contiguous():
        made = torch.empty(codes.shape, dtype=torch.float32)
        torch.ops.tandem.unpack_8bit_(codes, scales, made, codes.shape[1], name == "exp_avg")
        return made
    table = _table(name, codes.device)
    values = table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)
    columns = codes.shape[1]
    return values.mul_(
        scales.repeat_interleave(BLOCK, dim=1, output_size=scales.shape[1] * BLOCK)[:, :columns]
    )


@dataclass(frozen=True, slots=True)
class Packing:
    """Rounds moments of some elements of a weight into flat slices of its state.

    On a CPU with our C++ operations that is one pass over each moment, elsewhere about twenty of
    torch's; the bits are the same.

    row_size: elements of a row. first, ordinal, step: as `random_bits` has them.
    """

    row_size: int
    first: int
    ordinal: int
    step: Tensor

    def to_bf16(self, moments: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Both moments, flat float32, into bfloat16."""
        if _is_native(moments[0]):
            for shift, values, target in zip(_SHIFTS, moments, targets, strict=True):
                torch.ops.tandem.pack_bf16_(values, target, self.first, self._key(), shift)
            return
        bits = self._bits(len(moments[0]))
        for shift, values, target in zip(_SHIFTS, moments, targets, strict=True):
            target.copy_(to_bf16(values, bits >> shift))

    def to_8bit(
        self, moments: Sequence[Tensor], targets: Sequence[Tensor], scales: Sequence[Tensor]
    ) -> None:
        """Both moments, flat float32, into codes and scales."""
        parts = zip(MOMENTS, _SHIFTS, moments, targets, scales, strict=True)
        if _is_native(moments[0]):
            for name, shift, values, target, scale in parts:
                torch.ops.tandem.pack_8bit_(
                    values, target, scale, self.row_size, self.first, self._key(), shift,
                    name == "exp_avg",
                )  # fmt: skip
            return
        rows = (-1, self.row_size)
        bits = self._bits(len(moments[0]))
        for name, shift, values, target, scale in parts:
            codes, made = to_8bit(name, values.view(rows), (bits >> shift).view(rows))
            target.copy_(codes.view(-1))
            scale.copy_(made)

    def _bits(self, num: int) -> Tensor:
        return random_bits(num, self.first, self.ordinal, self.step)

    def _key(self) -> int:
        return int(_key(self.ordinal, self.step))


_SHIFTS = (0, 16)
"""The first moment takes the low half of an element's random bits, the second the high one."""


def _is_native(values: Tensor) -> bool:
    return values.is_cpu and native.available()


def _in_blocks(values: Tensor) -> Tensor:
    """(R, blocks, BLOCK), the last block filled up with zeros."""
    missing = -values.shape[1] % BLOCK
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(values.shape[0], values.shape[1] // BLOCK, BLOCK)


@cache
def _magnitudes(name: str) -> Tensor:
    """What codes stand for, relative to the scale: 128 without signs, or 256."""
    count = 128 if name == "exp_avg" else 256
    bits = torch.arange(count, dtype=torch.int32, device="cpu") + _LOWEST[name]
    magnitudes = (bits << _DROPPED_BITS).view(torch.float32)
    if name == "exp_avg":
        magnitudes[0] = 0.0
    return magnitudes


@cache
def _table(name: str, device: torch.device) -> Tensor:
    """(256,) float32, by code."""
    magnitudes = _magnitudes(name)
    if name == "exp_avg":
        magnitudes = torch.cat([magnitudes, -magnitudes])
    return magnitudes.to(device)


def exact_moments(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moments in float32 from pieces of a state of any kind; the step as it is.

    Args:
        saved: by name: `step`, and what `zero_moments` names.
    """
    found = {}
    for name, value in saved.items():
        if name.endswith("_scale"):
            continue
        if value.dtype == torch.uint8:
            rows = value.reshape(value.shape[0], row_size(value.shape))
            value = from_8bit(name, rows, saved[f"{name}_scale"]).view(value.shape)
        found[name] = value.float()
    return found
