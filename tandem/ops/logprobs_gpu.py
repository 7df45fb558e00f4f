# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""Log-prob of a target and entropy from a row of logits on a GPU: one pass, and one back.

The forward reads each logit once, in its own type, and keeps of a row its log-sum and entropy; the
backward may write the logits' gradient over them. Nothing else has the size of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.ops.gpu import contiguous
from tandem.ops.jit_gpu import jit, tl, triton

_BLOCK = 4096


class TokenLogprobs(torch.autograd.Function):
    """`dense.token_logprobs`, with the same arguments."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool,
        keep_logits: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(n, V) and (n,) -> (n,) and (n,)."""
        logits = contiguous(logits)
        numbers = _row_numbers(logits, targets, temperature)
        logprobs, entropy, sums = numbers.unbind()
        ctx.save_for_backward(logits, targets, sums, entropy)
        ctx.rule = temperature, keep_logits
        ctx.with_entropy = with_entropy
        ctx.set_materialize_grads(False)
        if not with_entropy:
            entropy = torch.zeros_like(entropy)
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient of the logits."""
        logits, targets, sums, entropy = ctx.saved_tensors
        temperature, keep_logits = ctx.rule
        of_logprobs, of_entropy = gradients
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(sums)
        if of_entropy is None or not ctx.with_entropy:
            of_entropy = None
        made = torch.empty_like(logits) if keep_logits else logits
        _row_gradients(
            logits, targets, sums, entropy, contiguous(of_logprobs),
            None if of_entropy is None else contiguous(of_entropy), made, temperature,
        )  # fmt: skip
        return made, None, None, None, None


@torch.library.custom_op("tandem::logprobs_gpu", mutates_args=())
def _row_numbers(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """(3, n): log-prob, entropy, log of the sum of e^(logit / temperature)."""
    n, vocabulary = logits.shape
    numbers = torch.empty((3, n), device=logits.device)
    if n:
        _read_row[(n,)](
            logits, targets, numbers, n, vocabulary, 1.0 / temperature, BLOCK=_BLOCK,
            enable_fp_fusion=True, num_warps=8,
        )  # fmt: skip
    return numbers


@_row_numbers.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty((3, logits.shape[0]), dtype=torch.float32)


@torch.library.custom_op("tandem::logprobs_backward_gpu", mutates_args=("made",))
def _row_gradients(
    logits: Tensor, targets: Tensor, sums: Tensor, entropy: Tensor, of_logprobs: Tensor,
    of_entropy: Tensor | None, made: Tensor, temperature: float,
) -> None:  # fmt: skip
    n, vocabulary = logits.shape
    if n:
        _write_row[(n, triton.cdiv(vocabulary, _BLOCK))](
            logits, targets, sums, entropy, of_logprobs,
            of_logprobs if of_entropy is None else of_entropy, made, vocabulary, 0,
            1.0 / temperature, ENTROPY=of_entropy is not None, BLOCK=_BLOCK,
            enable_fp_fusion=True, num_warps=8,
        )  # fmt: skip


@_row_gradients.register_fake
def _(*_: Any) -> None:
    return


# fmt: off
@jit
def _fold_row(  # type: ignore[no-untyped-def]
    at, columns, inverse, top, total, moved, BLOCK: tl.constexpr,
):
    # fmt: on
    """Top, sum and sum of e^(x - top) (x - top) with more columns, corrected where the top
    rises."""
    for begin in range(0, columns, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        x = tl.load(at + v, mask=v < columns, other=float("-inf")).to(tl.float32) * inverse
        higher = tl.maximum(top, tl.max(x, 0))
        weights = tl.exp(x - higher)
        shrink = tl.exp(top - higher)
        moved = shrink * (moved + total * tl.where(shrink > 0, top - higher, 0.0))
        moved += tl.sum(tl.where(weights == 0, 0.0, weights * (x - higher)), 0)
        total = total * shrink + tl.sum(weights, 0)
        top = higher
    return top, total, moved


# fmt: off
@jit
def _read_row(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, numbers_ptr, rows, vocabulary, inverse, BLOCK: tl.constexpr,
):
    # fmt: on
    """A row's log-prob, entropy and log-sum."""
    row = tl.program_id(0).to(tl.int64)
    at = logits_ptr + row * vocabulary
    top = -3.0e38  # below any number, yet finite: -inf less -inf is NaN
    total, moved = 0.0, 0.0
    top, total, moved = _fold_row(at, vocabulary, inverse, top, total, moved, BLOCK)
    log_sum = top + tl.log(total)
    target = tl.load(targets_ptr + row)
    x = tl.load(at + target).to(tl.float32) * inverse
    tl.store(numbers_ptr + row, x - log_sum)
    tl.store(numbers_ptr + rows + row, tl.log(total) - moved / total)
    tl.store(numbers_ptr + 2 * rows + row, log_sum)


# fmt: off
@jit
def _write_row(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, sums_ptr, entropy_ptr, of_logprobs_ptr, of_entropy_ptr, made_ptr,
    columns, first, inverse, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Part of a row of the tokens from `first` on: g (1[target] - p) - h p (log p + H), over the
    temperature."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * columns + v
    x = tl.load(logits_ptr + at, mask=v < columns, other=float("-inf")).to(tl.float32)
    logprob = x * inverse - tl.load(sums_ptr + row)
    chance = tl.exp(logprob)
    g = tl.load(of_logprobs_ptr + row)
    made = tl.where(v + first == tl.load(targets_ptr + row), g, 0.0) - g * chance
    if ENTROPY:
        h = tl.load(of_entropy_ptr + row)
        made -= tl.where(chance > 0, h * chance * (logprob + tl.load(entropy_ptr + row)), 0.0)
    made = (made * inverse).to(made_ptr.dtype.element_ty)
    tl.store(made_ptr + at, made, mask=v < columns)
