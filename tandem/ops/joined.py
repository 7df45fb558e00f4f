"""Linear layers over one input as one product: queries, keys and values; gate and up.

Their weights stay parameters of their own. `join` lays them side by side in one storage, of which
each is a view; an optimizer that changes them in place changes the storage. Then one product over
all rows computes all of them in decoding, and in the backward. Forwards of whole sequences keep a
product each, written side by side, so that a policy and its reference agree to the bit wherever
their weights lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.ops.gpu import gradient_sum, weight_gradient


def join(tensors: Sequence[Tensor]) -> bool:
    """Lay plain tensors (out, in) or (out,) side by side, in place; whether they are so now.

    Each must have a storage to itself, or it stays where it is: a part of another's storage may be
    known there by its address.
    """
    if joined_view(tensors) is not None:
        return True
    first = tensors[0]
    alike = all(
        type(t.data) is Tensor and t.device == first.device and t.dtype == first.dtype
        and t.shape[1:] == first.shape[1:] and t.is_contiguous()
        and t.untyped_storage().nbytes() == t.nbytes
        for t in tensors
    )  # fmt: skip
    if not alike or len({id(t) for t in tensors}) < len(tensors):
        return False
    whole = torch.cat([t.detach() for t in tensors])
    for tensor, part in zip(tensors, whole.split([len(t) for t in tensors]), strict=True):
        tensor.data = part
    return True


def joined_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors as one, without a copy, if they lie side by side in one storage; else None."""
    first, place = tensors[0], tensors[0].storage_offset()
    storage = first.untyped_storage()._cdata
    for tensor in tensors:
        if (
            tensor.storage_offset() != place
            or tensor.untyped_storage()._cdata != storage
            or tensor.dtype != first.dtype
            or tensor.shape[1:] != first.shape[1:]
            or not tensor.is_contiguous()
        ):
            return None
        place += tensor.numel()
    rows = sum(len(tensor) for tensor in tensors)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def joined_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    together: bool = True,
) -> Tensor:
    """[x W0' + b0, x W1' + b1, ...] side by side, with gradient.

    Args:
        x: (..., in). weights: (out_i, in) each. biases: (out_i,) each, or all None.
        together: one product, where the weights allow it. Without it a product each, wherever they
            lie: two models that do not lie alike then still give the same bits.
    Returns:
        (..., sum of out_i).
    """
    given = [bias for bias in biases if bias is not None]
    assert len(given) in (0, len(weights)), "biases must be all there or all None"
    result: Tensor = _JoinedLinear.apply(x, len(weights), together, *weights, *given)
    return result


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, together: bool, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        ctx.count = count
        ctx.save_for_backward(x, *weights)
        weight = joined_view(weights) if together else None
        bias = joined_view(biases) if biases else None
        if weight is not None and (bias is not None or not biases):
            return F.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        out = x.new_empty(rows.shape[0], sum(len(weight) for weight in weights))
        for number, part in enumerate(out.split([len(weight) for weight in weights], 1)):
            turned = weights[number].t()
            if biases:
                torch.addmm(biases[number], rows, turned, out=part)
            else:
                torch.mm(rows, turned, out=part)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        sizes = [len(weight) for weight in weights]
        given = gradient.reshape(-1, gradient.shape[-1])
        rows = x.reshape(-1, x.shape[-1])
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _times(given, weights, sizes).view(x.shape)
        needed = ctx.needs_input_grad[3:]
        made: list[Tensor | None] = [None] * len(needed)
        if all(needed[: ctx.count]) and gradient_sum(weights[0]) is None:
            made[: ctx.count] = (given.t() @ rows).split(sizes)
        else:
            for number, part in enumerate(given.split(sizes, 1)):
                if needed[number]:
                    made[number] = weight_gradient(weights[number], part, rows)
        if any(needed[ctx.count :]):
            made[ctx.count :] = given.sum(0).split(sizes)
        return of_x, None, None, *made


def _times(given: Tensor, weights: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """(N, sum of out_i) by the weights (out_i, in) below one another."""
    weight = joined_view(weights)
    if weight is not None:
        return given @ weight
    first, *others = given.split(list(sizes), 1)
    total = first @ weights[0]
    for part, other in zip(others, weights[1:], strict=True):
        total.addmm_(part, other)
    return total
