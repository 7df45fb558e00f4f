"""bfloat16 layers on a CPU that add their weights' gradients to float32 sums as they compute them.

An optimizer with float32 masters keeps such a sum beside each weight (`gpu.keep_sum`). Otherwise
each micro-batch would write a gradient in bfloat16, read it again and add it: for the embedding
of a large vocabulary, a row for every token that did not occur.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.ops import native
from tandem.ops.gpu import gradient_sum, keeps_sum, weight_gradient

_is_part = ContextVar("tandem_part_of_a_backward", default=False)


def sums(weight: Tensor) -> bool:
    """In a forward pass that will be differentiated: whether a weight `keeps` its sum."""
    return weight.requires_grad and torch.is_grad_enabled() and keeps(weight)


def keeps(weight: Tensor) -> bool:
    """Whether a bfloat16 weight's gradients go into a float32 sum: not if a hook wants to see
    them."""
    return weight.dtype == torch.bfloat16 and keeps_sum(weight) and not weight._backward_hooks


def adds_to_grad(weight: Tensor) -> bool:
    """In a backward pass that `adds`: whether a float32 weight has a gradient, and adding to that
    means what returning another would."""
    grad = weight.grad
    return (
        weight.dtype == torch.float32
        and weight.is_leaf
        and type(grad) is Tensor
        and grad.is_cpu
        and grad.dtype == torch.float32
        and grad.layout == torch.strided
        and grad.is_contiguous()
        and not grad.requires_grad
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
    )


def adds() -> bool:
    """In a backward pass: whether it is `backward()` for all leaves, or a part of one. Who asks for
    some gradients (`torch.autograd.grad`) gets them, and nothing is added to sums."""
    if _is_part.get():
        return True
    return native.available() and bool(torch.ops.tandem.is_whole_backward())


@contextmanager
def parts(of_whole: bool) -> Iterator[None]:
    """Within: `torch.autograd.grad` computes a part of a backward pass of which `adds` was so."""
    token = _is_part.set(of_whole)
    try:
        yield
    finally:
        _is_part.reset(token)


class SummedLinear(torch.autograd.Function):
    """x (..., in) by weight (out, in), plus bias; numbers as `linear`'s, the weight's gradient in
    float32 to the end.

    csrc/dense.cpp knows the name: of logits made here nobody else reads the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leaf = weight  # what was saved may come back as another object
        return torch.ops.tandem.linear.default(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = given.reshape(-1, given.shape[-1])
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = torch.ops.tandem.linear.default(rows, weight.t(), None).view(x.shape)
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])
            of_weight = weight_gradient(ctx.leaf, rows, inputs) if adds() else rows.t() @ inputs
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias


class SummedEmbedding(torch.autograd.Function):
    """Rows of weight (V, D) by token ids (...), of which padding's gets no gradient."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.leaf, ctx.padding = weight, padding
        return torch.ops.tandem.embedding.default(ids, weight, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        total = gradient_sum(ctx.leaf) if adds() else None
        if total is None:  # someone asks for it, or the optimizer is gone
            made = torch.ops.aten.embedding_dense_backward(
                given, ids, len(ctx.leaf), ctx.padding, False
            )
            return None, made, None
        torch.ops.tandem.add_rows.default(total, ids, given, ctx.padding)
        return None, None, None
