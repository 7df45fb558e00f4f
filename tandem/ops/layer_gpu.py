# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""Norms and gated activations on a GPU, each one kernel forward and one backward, in Triton.

    residual + delta, and the norm of the sum       add_norm
    activation(gate) * up, on halves of one tensor  gated

A program computes whole rows in float32 and rounds where the plain path rounds, so a row's numbers
do not depend on the rows beside it, and decoding computes what training does. Each kernel is an
operation of torch's, with a shape function: torch.compile and CUDA graphs leave it whole, and on
the meta device it can be counted.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.ops.gpu import contiguous, weight_gradient
from tandem.ops.jit_gpu import jit, tl, triton

RMS, UNIT_OFFSET, CENTERED = 0, 1, 2
"""Kinds of norm: Llama's; Gemma's, times 1 + weight; LayerNorm."""
SILU, GELU_TANH = 0, 1
"""Kinds of activation."""
_PARTS = 256  # rows of partial sums of a norm's gradient, added up at the end: fixed, so bits are


# ---- residual + norm ----


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, kind: int
) -> tuple[Tensor, Tensor]:
    """h = x + delta, rounded, and norm(h), with gradient; without delta h is x.

    Args:
        x, delta: (..., D) of weight's type. weight, bias: (D,).
        kind: RMS, UNIT_OFFSET or CENTERED.
    Returns:
        h and its norm, both (..., D).
    """
    summed, normed = _AddNorm.apply(x, delta, weight, bias, eps, kind)
    return summed, normed


class _AddNorm(torch.autograd.Function):
    """Keeps h alone: the backward computes a row's statistics again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None,
        eps: float, kind: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if delta is None:
            summed, normed = x.view_as(x), _norm(contiguous(x), weight, bias, eps, kind)
        else:
            summed, normed = _add_norm(contiguous(x), contiguous(delta), weight, bias, eps, kind)
        ctx.save_for_backward(summed, weight)
        ctx.eps, ctx.kind, ctx.adds, ctx.biased = eps, kind, delta is not None, bias is not None
        ctx.set_materialize_grads(False)
        return summed, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_sum, of_norm = gradients
        summed, weight = ctx.saved_tensors
        if of_norm is None:
            return of_sum, of_sum if ctx.adds else None, None, None, None, None
        trains = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        of_norm = contiguous(of_norm)
        other = None if of_sum is None else contiguous(of_sum)
        made, sums = _norm_backward(
            contiguous(summed), of_norm, other, weight, ctx.eps, ctx.kind, trains
        )
        of_weight = of_bias = None
        if trains:
            totals = sums.sum(1).to(weight.dtype)
            of_weight, of_bias = totals[0], totals[1] if ctx.biased else None
        return made, made if ctx.adds else None, of_weight, of_bias, None, None


@torch.library.custom_op("tandem::add_norm", mutates_args=())
def _add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: int
) -> tuple[Tensor, Tensor]:
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, delta, weight, bias, summed, normed, eps, kind)
    return summed, normed


@_add_norm.register_fake
def _(x: Tensor, delta: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("tandem::norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: int) -> Tensor:
    normed = torch.empty_like(x)
    _launch_norm(x, None, weight, bias, None, normed, eps, kind)
    return normed


@_norm.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _launch_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None,
    summed: Tensor | None, normed: Tensor, eps: float, kind: int,
) -> None:  # fmt: skip
    width = x.shape[-1]
    if not x.numel():
        return
    _norm_rows[(x.numel() // width,)](
        x, x if delta is None else delta, weight, weight if bias is None else bias,
        normed if summed is None else summed, normed, eps,
        WIDTH=width, PAD=triton.next_power_of_2(width), ADDS=delta is not None, KIND=kind,
        BIASED=bias is not None, enable_fp_fusion=True, num_warps=_warps(width),
    )  # fmt: skip


@torch.library.custom_op("tandem::norm_backward", mutates_args=())
def _norm_backward(
    h: Tensor, of_norm: Tensor, of_sum: Tensor | None, weight: Tensor, eps: float, kind: int,
    trains: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    width = h.shape[-1]
    rows = h.numel() // width
    made = torch.empty_like(h)
    sums = h.new_zeros((2, _PARTS if trains else 0, width), dtype=torch.float32)
    if rows:
        _norm_rows_backward[(min(rows, _PARTS) if trains else rows,)](
            h, of_norm, of_norm if of_sum is None else of_sum, weight, made, sums, rows, eps,
            WIDTH=width, PAD=triton.next_power_of_2(width), KIND=kind, ADDS=of_sum is not None,
            TRAINS=trains, PARTS=_PARTS, enable_fp_fusion=True, num_warps=_warps(width),
        )  # fmt: skip
    return made, sums


@_norm_backward.register_fake
def _(h: Tensor, of_norm: Tensor, of_sum: Any, weight: Any, eps: Any, kind: Any, trains: bool):
    sums = h.new_empty((2, _PARTS if trains else 0, h.shape[-1]), dtype=torch.float32)
    return torch.empty_like(h), sums


def _warps(width: int) -> int:
    """Eight numbers or more for each thread of a row."""
    return min(16, max(1, triton.next_power_of_2(width) // 512))


# fmt: off
@jit
def _norm_rows(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, weight_ptr, bias_ptr, summed_ptr, normed_ptr, eps,
    WIDTH: tl.constexpr, PAD: tl.constexpr, ADDS: tl.constexpr, KIND: tl.constexpr,
    BIASED: tl.constexpr,
):
    # fmt: on
    """A program, a row. KIND as the constants above say."""
    d = tl.arange(0, PAD)
    inside = d < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + d
    kind = normed_ptr.dtype.element_ty
    h = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        h = (h + tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(summed_ptr + at, h, mask=inside)
        h = h.to(tl.float32)
    if KIND == 2:
        h = tl.where(inside, h - tl.sum(h, 0) / WIDTH, 0.0)
    normed = h * tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps)
    if KIND == 0:  # rounded before the product and after, as Llama's
        normed = normed.to(kind).to(tl.float32) * weight
    elif KIND == 1:
        normed = normed * (1.0 + weight)
    else:
        normed = normed * weight
        if BIASED:
            normed += tl.load(bias_ptr + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, normed.to(kind), mask=inside)


# fmt: off
@jit
def _norm_rows_backward(  # type: ignore[no-untyped-def]
    h_ptr, of_norm_ptr, of_sum_ptr, weight_ptr, made_ptr, sums_ptr, rows, eps,
    WIDTH: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr, ADDS: tl.constexpr,
    TRAINS: tl.constexpr, PARTS: tl.constexpr,
):
    # fmt: on
    """Gradient of h; with TRAINS, what rows part, part + PARTS, ... add to weight's and bias's."""
    d = tl.arange(0, PAD)
    inside = d < WIDTH
    part = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    if KIND == 1:
        weight += 1.0
    of_weight, of_bias = tl.zeros([PAD], tl.float32), tl.zeros([PAD], tl.float32)
    end = rows if TRAINS else part + 1
    for row in range(part, end, PARTS):
        at = row * WIDTH + d
        h = tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(of_norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if KIND == 2:
            h = tl.where(inside, h - tl.sum(h, 0) / WIDTH, 0.0)
        scale = tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps)
        unit = h * scale
        if KIND == 0:
            of_weight += g * unit.to(made_ptr.dtype.element_ty).to(tl.float32)
        else:
            of_weight += g * unit
        of_bias += g
        g = g * weight
        made = g - unit * (tl.sum(g * unit, 0) / WIDTH)
        if KIND == 2:
            made -= tl.sum(g, 0) / WIDTH
        made *= scale
        if ADDS:
            made += tl.load(of_sum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(made_ptr + at, made.to(made_ptr.dtype.element_ty), mask=inside)
    if TRAINS:
        tl.store(sums_ptr + part * WIDTH + d, of_weight, mask=inside)
        tl.store(sums_ptr + (PARTS + part) * WIDTH + d, of_bias, mask=inside)


# ---- gated activation ----


def gated(gate_up: Tensor, kind: int) -> Tensor:
    """act(gate) * up, (..., I), of their (..., 2 I), gate first, with gradient; kind: SILU..."""
    result: Tensor = _Gated.apply(gate_up, kind)
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kind: int) -> Tensor:
        gate_up = contiguous(gate_up)
        ctx.save_for_backward(gate_up)
        ctx.kind = kind
        return _gate(gate_up, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        return gate_backward(gate_up, contiguous(gradient), ctx.kind, False)[0], None


def gated_linear(gate_up: Tensor, weight: Tensor, kind: int) -> Tensor:
    """`gated`, then a linear layer without bias; its input is computed again in the backward."""
    result: Tensor = _GatedLinear.apply(gate_up, weight, kind)
    return result


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, kind: int) -> Tensor:
        gate_up = contiguous(gate_up)
        ctx.save_for_backward(gate_up, weight)
        ctx.kind = kind
        return F.linear(_gate(gate_up, kind), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        trains = ctx.needs_input_grad[1]
        of_inner = contiguous(gradient @ weight)
        made, inner = gate_backward(gate_up, of_inner, ctx.kind, trains)
        if not trains:
            return made, None, None
        of_weight = weight_gradient(weight, gradient.flatten(0, -2), inner.flatten(0, -2))
        return made, of_weight, None


@torch.library.custom_op("tandem::gate", mutates_args=())
def _gate(gate_up: Tensor, kind: int) -> Tensor:
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    if out.numel():
        _gate_rows[(out.numel() // width, triton.cdiv(width, 1024))](
            gate_up, gate_up, gate_up, out, WIDTH=width, KIND=kind, BACKWARD=False, KEEPS=True,
            BLOCK=1024, enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
    return out


@_gate.register_fake
def _(gate_up: Tensor, kind: int) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@torch.library.custom_op("tandem::gate_backward", mutates_args=())
def gate_backward(
    gate_up: Tensor, gradient: Tensor, kind: int, again: bool
) -> tuple[Tensor, Tensor]:
    """The gradient (..., 2 I) of what `gated` takes; again: what it gave too, else an empty one."""
    width = gradient.shape[-1]
    made = torch.empty_like(gate_up)
    out = torch.empty_like(gradient) if again else gradient.new_empty(0)
    if gradient.numel():
        _gate_rows[(gradient.numel() // width, triton.cdiv(width, 1024))](
            gate_up, gradient, made, out, WIDTH=width, KIND=kind, BACKWARD=True, KEEPS=again,
            BLOCK=1024, enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
    return made, out


@gate_backward.register_fake
def _(gate_up: Tensor, gradient: Tensor, kind: int, again: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(gradient) if again else gradient.new_empty(0)
    return torch.empty_like(gate_up), out


# fmt: off
@jit
def _gate_rows(  # type: ignore[no-untyped-def]
    gate_up_ptr, gradient_ptr, made_ptr, out_ptr,
    WIDTH: tl.constexpr, KIND: tl.constexpr, BACKWARD: tl.constexpr, KEEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # fmt: on
    """Part of a row: the result where KEEPS, the gradient of gate and up where BACKWARD."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < WIDTH
    kind = gate_up_ptr.dtype.element_ty
    at = row * (2 * WIDTH) + d
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        chance = tl.sigmoid(gate)
        slope = chance * (1.0 + gate * (1.0 - chance))
    else:  # 0.5 (1 + tanh(y)) is sigmoid(2 y)
        chance = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        slope = chance * (1.0 + gate * (1.0 - chance) * inner)
    active = (gate * chance).to(kind).to(tl.float32)
    if KEEPS:
        tl.store(out_ptr + row * WIDTH + d, (active * up).to(kind), mask=inside)
    if BACKWARD:
        g = tl.load(gradient_ptr + row * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
        tl.store(made_ptr + at, (g * up * slope).to(kind), mask=inside)
        tl.store(made_ptr + at + WIDTH, (g * active).to(kind), mask=inside)
