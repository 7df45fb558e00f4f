# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""The vocabulary head with log-prob and entropy, on a GPU, in tiles of columns of the logits.

A tile holds the logits of all rows for some of the vocabulary, little enough to stay in the cache
between the product that makes it and the kernel that reads it. The forward folds tiles into four
numbers a row. The backward makes each tile again, writes the logits' gradient over it and
multiplies it into the gradients: rows of the head's weight are complete with their tile, and states
are summed in float32. Nothing of the size (N, V) is ever held, and no gradient of the whole head is
added up chunk by chunk. The idea of tiles is arXiv:2411.09009's; there a product and its reading
are one kernel. Here products are the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.ops.gpu import add_product_, contiguous, gradient_sum
from tandem.ops.jit_gpu import jit, tl, triton
from tandem.ops.logits import HeadProduct, tile_columns
from tandem.ops.logprobs_gpu import _fold_row, _write_row

_BLOCK = 4096


def head_logprobs_gpu(
    head: HeadProduct, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """`dense.token_logprobs` of a head's logits, which are never held whole.

    Args:
        hidden: (N, D), of the weight's type. targets: (N,) int64.
    Returns:
        (N,) and (N,), float32 nats, with gradient for states, weight and bias.
    """
    logprobs, entropy = _InTiles.apply(
        hidden, head.weight, head.bias, targets, head.after, temperature, with_entropy
    )
    return logprobs, entropy


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The columns of every tile, and their logits."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def __iter__(self) -> Iterator[slice]:
        vocabulary = len(self.weight)
        columns = tile_columns(len(self.hidden), vocabulary, self.hidden.dtype)
        for first in range(0, vocabulary, columns):
            yield slice(first, min(first + columns, vocabulary))

    def raw(self, part: slice) -> Tensor:
        """(N, v), as the head's own product gives them."""
        return F.linear(
            self.hidden, self.weight[part], None if self.bias is None else self.bias[part]
        )


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
        after: Callable[[Tensor], Tensor] | None, temperature: float, with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        hidden = contiguous(hidden)
        # Top, sum of e^(x - top), sum of e^(x - top) (x - top), the target's logit.
        numbers = torch.zeros((4, len(hidden)), device=hidden.device)
        numbers[0] = -3.0e38  # below any number, yet finite: -inf less -inf is NaN
        numbers[3] = float("nan")  # of a target outside the vocabulary
        tiles = _Tiles(hidden, weight, bias)
        for part in tiles:
            logits = tiles.raw(part)
            if after is not None:
                logits = contiguous(after(logits))
            fold_tile(logits, targets, numbers, part.start, temperature)
        top, total, moved, chosen = numbers.unbind()
        log_total = total.log()
        sums = top + log_total
        entropy = log_total - moved / total
        ctx.save_for_backward(hidden, targets, sums, entropy)
        # Not saved: a split model's weight is whole only until its forward's end.
        ctx.parameters = weight, bias
        ctx.rule = after, temperature, with_entropy
        ctx.set_materialize_grads(False)
        if not with_entropy:
            entropy = torch.zeros_like(entropy)
            ctx.mark_non_differentiable(entropy)
        return chosen - sums, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, targets, sums, entropy = ctx.saved_tensors
        weight, bias = ctx.parameters
        after, temperature, with_entropy = ctx.rule
        of_logprobs, of_entropy = gradients
        of_logprobs = torch.zeros_like(sums) if of_logprobs is None else contiguous(of_logprobs)
        of_entropy = contiguous(of_entropy) if with_entropy and of_entropy is not None else None
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_states = hidden.new_zeros(hidden.shape, dtype=torch.float32) if needs_states else None
        total = gradient_sum(weight) if needs_weight else None
        of_weight = torch.empty_like(weight) if needs_weight and total is None else None
        of_bias = torch.empty_like(bias) if needs_bias else None
        tiles = _Tiles(hidden, weight, bias)
        given = (targets, sums, entropy, of_logprobs, of_entropy)
        for part in tiles:
            made = _raw_gradient(tiles.raw(part), after, given, part.start, temperature)
            if of_states is not None:
                add_product_(of_states, made, weight[part])
            if total is not None:
                add_product_(total[part], made.t(), hidden)
            elif of_weight is not None:
                torch.mm(made.t(), hidden, out=of_weight[part])
            if of_bias is not None:
                torch.sum(made, 0, out=of_bias[part])
        of_hidden = None if of_states is None else of_states.to(hidden.dtype)
        return of_hidden, of_weight, of_bias, None, None, None, None


def _raw_gradient(
    raw: Tensor, after: Callable[[Tensor], Tensor] | None,
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], first: int, temperature: float,
) -> Tensor:  # fmt: skip
    """The gradient of a tile's raw logits, which are overwritten."""
    if after is None:
        tile_gradient(raw, *given, raw, first, temperature)
        return raw
    with torch.enable_grad():
        leaf = raw.detach().requires_grad_()
        logits = after(leaf)
    values = contiguous(logits.detach())
    made = torch.empty_like(values)
    tile_gradient(values, *given, made, first, temperature)
    return torch.autograd.grad(logits, leaf, made)[0]


@torch.library.custom_op("tandem::fold_tile_gpu", mutates_args=("numbers",))
def fold_tile(
    logits: Tensor, targets: Tensor, numbers: Tensor, first: int, temperature: float
) -> None:
    """Take logits (N, v) of the tokens from `first` on into the (4, N) numbers of their rows."""
    n, columns = logits.shape
    if n:
        _fold_tile[(n,)](
            logits, targets, numbers, n, columns, first, 1.0 / temperature,
            BLOCK=_BLOCK, enable_fp_fusion=True, num_warps=8,
        )  # fmt: skip


@fold_tile.register_fake
def _(*_: Any) -> None:
    return


@torch.library.custom_op("tandem::tile_gradient_gpu", mutates_args=("made",))
def tile_gradient(
    logits: Tensor, targets: Tensor, sums: Tensor, entropy: Tensor, of_logprobs: Tensor,
    of_entropy: Tensor | None, made: Tensor, first: int, temperature: float,
) -> None:  # fmt: skip
    """Write the gradient of logits (N, v) of the tokens from `first` on; `made` may be `logits`."""
    n, columns = logits.shape
    if n:
        _write_row[(n, triton.cdiv(columns, _BLOCK))](
            logits, targets, sums, entropy, of_logprobs,
            of_logprobs if of_entropy is None else of_entropy, made, columns, first,
            1.0 / temperature, ENTROPY=of_entropy is not None, BLOCK=_BLOCK,
            enable_fp_fusion=True, num_warps=8,
        )  # fmt: skip


@tile_gradient.register_fake
def _(*_: Any) -> None:
    return


# fmt: off
@jit
def _fold_tile(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, numbers_ptr, rows, columns, first, inverse, BLOCK: tl.constexpr,
):
    # fmt: on
    """A row of a tile: its numbers go on from those of the tiles before."""
    row = tl.program_id(0).to(tl.int64)
    at = logits_ptr + row * columns
    top = tl.load(numbers_ptr + row)
    total = tl.load(numbers_ptr + rows + row)
    moved = tl.load(numbers_ptr + 2 * rows + row)
    top, total, moved = _fold_row(at, columns, inverse, top, total, moved, BLOCK)
    tl.store(numbers_ptr + row, top)
    tl.store(numbers_ptr + rows + row, total)
    tl.store(numbers_ptr + 2 * rows + row, moved)
    target = tl.load(targets_ptr + row) - first
    here = (target >= 0) & (target < columns)
    x = tl.load(at + target, mask=here, other=0.0).to(tl.float32) * inverse
    tl.store(numbers_ptr + 3 * rows + row, x, mask=here)
