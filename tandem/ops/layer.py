"""The two halves of a decoder layer on a CPU, before and after attention, as an operation each.

They compute what the operations of `dense` compute one by one, to the last bit, over blocks of rows
that stay in the second cache (`csrc/layers.cpp`); their gradients agree to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.ops import native, summed
from tandem.ops.gpu import opened_sums


class Norm(NamedTuple):
    """A root-mean-square norm, as `dense.rms_norm` takes it."""

    weight: Tensor
    eps: float
    unit_offset: bool


def takes(x: Tensor) -> bool:
    """Whether these operations compute on such a tensor."""
    return x.is_cpu and x.dtype in (torch.float32, torch.bfloat16) and native.available()


def before_attention(
    x: Tensor,
    norm: Norm,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values of x's norm, the first two turned by rotary positions.

    Args:
        x: (..., D), N rows in all.
        weights: (Hq * head_dim, D) and twice (Hkv * head_dim, D), of x's dtype.
        biases: one for each weight, or None for each.
        cos, sin: (N, R) of x's dtype.
    Returns:
        (N, Hq, head_dim), twice (N, Hkv, head_dim), and x, to be added after attention: so its
        gradient there and here are added as they are made.
    """
    if any(map(summed.sums, weights)):
        return _Before.apply(x, *norm, cos, sin, head_dim, *weights, *biases)
    return _op("before_attention")(x, *norm, weights, biases, cos, sin, head_dim)


def after_attention(
    attended: Tensor,
    residual: Tensor,
    out: tuple[Tensor, Tensor | None],
    norm: Norm,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    tanh: bool,
    *,
    recomputes: bool = False,
) -> Tensor:
    """h + down(act(gate) * up) of h's norm, where h = residual + out(attended).

    Args:
        attended: (..., A). residual: (..., D), as many rows.
        out: weight (D, A) and bias (D,). gate, up: (I, D). down: (D, I).
        tanh: act is the tanh GELU, else SiLU.
        recomputes: gate and up are computed again in the backward pass rather than kept.
    Returns:
        (..., D), shaped as the residual.
    """
    weight, bias = out
    if any(map(summed.sums, (weight, gate, up, down))):
        return _After.apply(
            attended, residual, bias, *norm, tanh, recomputes, weight, gate, up, down
        )
    return _op("after_attention")(
        attended, residual, weight, bias, *norm, gate, up, down, tanh, recomputes
    )


def before_backward(
    given: Sequence[Tensor | None],
    x: Tensor,
    norm: tuple[Tensor, float, bool],
    weights: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    needed: Sequence[bool],
    totals: Sequence[Tensor | None],
    are_new: int,
) -> list[Tensor | None]:
    """Gradients of `before_attention`'s x, norm, weights and biases, in this order.

    Args:
        given: of its four results.
        needed: which of them are wanted.
        totals: float32 sums that weights' gradients are added to, of which the bits of `are_new`
            say which hold nothing yet; None where they are returned.
    """
    made: list[Tensor | None] = _op("before_attention_backward")(
        *given, x, *norm, weights, cos, sin, head_dim, _bits(needed), totals, are_new
    )
    return made


def after_backward(
    given: Tensor,
    attended: Tensor,
    hidden: Tensor,
    both: Tensor | None,
    out: Tensor,
    norm: tuple[Tensor, float, bool],
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    tanh: bool,
    needed: Sequence[bool],
    totals: Sequence[Tensor | None],
    are_new: int,
) -> list[Tensor | None]:
    """Gradients of `after_attention`'s attended, residual, bias, norm, out, gate, up and down, in
    this order.

    Args:
        hidden, both: the sum behind attention; gate and up side by side.
        needed, totals, are_new: as of `before_backward`.
    """
    made: list[Tensor | None] = _op("after_attention_backward")(
        given,
        attended,
        hidden,
        both,
        out,
        *norm,
        gate,
        up,
        down,
        tanh,
        _bits(needed),
        totals,
        are_new,
    )
    return made


class _Before(torch.autograd.Function):
    """`before_attention` where some weights' gradients go into float32 sums."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, eps: float, offset: bool, cos: Tensor, sin: Tensor,
        head_dim: int, *projections: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weights, biases = projections[:3], projections[3:]
        ctx.save_for_backward(x, norm, cos, sin, *weights)
        ctx.leaves = weights  # what was saved may come back as another object
        ctx.rest = eps, offset, head_dim
        ctx.set_materialize_grads(False)
        return _op("before_attention")(x, norm, eps, offset, weights, biases, cos, sin, head_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        x, norm, cos, sin, *weights = ctx.saved_tensors
        eps, offset, head_dim = ctx.rest
        needed = [*ctx.needs_input_grad[:2], *ctx.needs_input_grad[7:]]
        if all(one is None for one in given[:3]):
            return given[3], *[None] * 12
        with opened_sums(ctx.leaves, needed[2:5], summed.adds()) as (totals, are_new):
            of_x, of_norm, *others = before_backward(
                given, x, (norm, eps, offset), weights, cos, sin, head_dim, needed, totals, are_new,
            )  # fmt: skip
        return of_x, of_norm, None, None, None, None, None, *others


class _After(torch.autograd.Function):
    """`after_attention` where some weights' gradients go into float32 sums."""

    @staticmethod
    def forward(
        ctx: Any, attended: Tensor, residual: Tensor, bias: Tensor | None, norm: Tensor, eps: float,
        offset: bool, tanh: bool, recomputes: bool, *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        out, gate, up, down = weights
        made, hidden, both = _op("after_attention_kept")(
            attended, residual, out, bias, norm, eps, offset, gate, up, down, tanh, recomputes
        )
        ctx.save_for_backward(attended, norm, hidden, both, *weights)
        ctx.leaves = weights
        ctx.rest = eps, offset, tanh
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        attended, norm, hidden, both, out, gate, up, down = ctx.saved_tensors
        eps, offset, tanh = ctx.rest
        needed = [*ctx.needs_input_grad[:4], *ctx.needs_input_grad[8:]]
        with opened_sums(ctx.leaves, needed[4:], summed.adds()) as (totals, are_new):
            made = after_backward(
                given, attended, hidden, both, out, (norm, eps, offset), gate, up, down, tanh,
                needed, totals, are_new,
            )  # fmt: skip
        return *made[:4], None, None, None, None, *made[4:]


def _bits(flags: Sequence[bool]) -> int:
    return sum(1 << place for place, flag in enumerate(flags) if flag)


@cache
def _op(name: str) -> Any:
    return getattr(torch.ops.tandem, name).default
