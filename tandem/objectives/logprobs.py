"""Log-probs and entropy of chosen tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.ops import dense, gpu, summed
from tandem.ops.logits import HeadProduct, rows_at_once


def scatter_to_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) values of the tokens in `mask` back to (B, T) float32, 0 elsewhere; keeps gradients."""
    placed = torch.zeros(mask.shape, dtype=torch.float32, device=values.device)
    return placed.masked_scatter(mask, values.float())


def token_logprobs(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    weights: Sequence[Tensor],
    temperature: float = 1.0,
    with_entropy: bool = False,
    max_rows: int | None = None,
    product: HeadProduct | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and the entropy of its distribution, without the whole logits.

        logprob = log softmax(z)[target]      entropy = -sum softmax(z) log softmax(z)
        z = logits / temperature

    Args:
        logits_of: the vocabulary head, (n, D) -> (n, V).
        hidden: (N, D), the state that predicts each target.
        targets: (N,) int64.
        vocabulary: V.
        weights: what the head computes with; those that need a gradient get one, others may be
            left out.
        with_entropy: compute the entropy (zeros otherwise).
        max_rows: most rows through the head at once; None takes the device's budget of bytes
            (`ops.logits`). With more than one chunk the backward pass computes each chunk's logits
            again rather than keep them, and adds the chunks' gradients of the weights in float32.
        product: the head taken apart, where it can be. A GPU that runs our kernels then makes the
            logits in tiles of the vocabulary instead (`ops.vocabulary_gpu`).
    Returns:
        logprobs (N,) and entropy (N,), float32 nats, with gradient.
    """
    if product is not None and gpu.fuses(hidden) and hidden.dtype == product.weight.dtype:
        from tandem.ops.vocabulary_gpu import head_logprobs_gpu  # imports Triton

        return head_logprobs_gpu(product, hidden, targets, temperature, with_entropy)
    rows = max_rows or rows_at_once(vocabulary, hidden.dtype, hidden.device)
    head = _Head(logits_of, temperature, with_entropy, rows)
    if len(targets) <= rows:
        return head.whole(hidden, targets)
    trained = [weight for weight in weights if weight.requires_grad]
    logprobs, entropy = _InChunks.apply(head, hidden, targets, *trained)
    return logprobs, entropy


@dataclass(frozen=True, slots=True)
class _Head:
    logits_of: Callable[[Tensor], Tensor]
    temperature: float
    with_entropy: bool
    rows: int

    def whole(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits_of(hidden)
        return dense.token_logprobs(
            logits, targets, self.temperature, self.with_entropy, keep_logits=False
        )

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        yield from zip(*(tensor.split(self.rows) for tensor in tensors), strict=True)


class _InChunks(torch.autograd.Function):
    """`_Head.whole` chunk by chunk, nothing of the size of the logits kept."""

    @staticmethod
    def forward(
        ctx: Any, head: _Head, hidden: Tensor, targets: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.head, ctx.weights = head, weights
        ctx.save_for_backward(hidden, targets)
        parts = [head.whole(*chunk) for chunk in head.chunks(hidden, targets)]
        logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        if not head.with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        head: _Head = ctx.head
        hidden, targets = ctx.saved_tensors
        count = 1 + head.with_entropy
        of_states: list[Tensor] = []
        sums: list[Tensor | None] = []
        for part, chosen, *outer in head.chunks(hidden, targets, *gradients):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                outputs = head.whole(leaf, chosen)[:count]
            with summed.parts(summed.adds()):
                of_part, *made = torch.autograd.grad(
                    outputs, [leaf, *ctx.weights], outer[:count], allow_unused=True
                )
            of_states.append(of_part)
            if sums:
                sums = [
                    old if old is None else old.add_(g) for old, g in zip(sums, made, strict=True)
                ]
            else:
                sums = [g if g is None else g.float() for g in made]
            del outputs, made  # each holds a gradient of the whole head, or logits
        weights = zip(sums, ctx.weights, strict=True)
        return (
            None,
            torch.cat(of_states),
            None,
            *(None if total is None else total.to(weight.dtype) for total, weight in weights),
        )
