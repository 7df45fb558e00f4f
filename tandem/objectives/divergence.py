"""Divergences of two policies over the whole vocabulary, token by token: the KL in either
direction, and the Jensen-Shannon divergence.

An estimate from the sampled token (`kl`) says little of one token; the sum over the vocabulary is
exact. It needs both models' logits, which are made and left in chunks of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.ops.logits import rows_at_once

ExactKL = Literal["exact-in-loss", "forward-exact-in-loss", "jsd-in-loss"]
EXACT: tuple[ExactKL, ...] = get_args(ExactKL)

_LEAST = -200.0
"""Log-probs below it count as it: e^-200 is 0 in float32, and 0 * -inf must not become NaN."""

_TENSORS = 4
"""Tensors of the size of a chunk's logits that are there at once, of one model or the other."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Which divergence is the loss, between p, the policy's distribution, and q, the other's.

        exact-in-loss           KL(p, q) = sum over the vocabulary of p (log p - log q)
        forward-exact-in-loss   KL(q, p) = sum over the vocabulary of q (log q - log p)
        jsd-in-loss             beta KL(q, m) + (1 - beta) KL(p, m), m = beta q + (1 - beta) p

    The last is the generalized Jensen-Shannon divergence, bounded by the entropy of (beta,
    1 - beta), log 2 at most; beta, in (0, 1), has no effect on the others.
    """

    placement: ExactKL
    beta: float = 0.5


@dataclass(frozen=True, slots=True)
class Predictions:
    """A model's distributions of N tokens: logits_of (n, D) -> (n, V), hidden (N, D)."""

    logits_of: Callable[[Tensor], Tensor]
    hidden: Tensor


def exact_divergence(
    policy: Predictions,
    other: Predictions,
    token_weights: Tensor,
    divergence: Divergence,
    *,
    vocabulary: int,
    weights: Sequence[Tensor],
    temperature: float = 1.0,
    max_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The divergence of each token's distributions, exact, and their weighted sum.

        p = softmax(policy's logits / temperature), q = softmax(the other's logits / temperature)

    Args:
        token_weights: (N,) what each token counts in the sum.
        vocabulary: tokens that both know, their first ones; a model may have padding behind them.
        weights: what the policy's head computes with; those that need a gradient get one.
        max_rows: most tokens of which logits are there at once; None takes the device's budget.
    Returns:
        the sum, (), with gradient for the policy's states and weights; and each token's
        divergence, (N,) float32 nats, without.

    The gradient is made in the forward pass, beside the logits, so that they are made once:
    d KL(p, q) / d logits = p (log p - log q - KL(p, q)) / temperature, d KL(q, p) / d logits =
    (p - q) / temperature, and d JSD / d logits = (1 - beta) d KL(p, m) / d logits with m held
    constant, since the terms through m cancel. Source: arXiv:2306.13649 (GKD), on the
    policy's own answers.
    """
    hidden = policy.hidden
    rows = max_rows or max(1, rows_at_once(vocabulary, torch.float32, hidden.device) // _TENSORS)
    job = _Job(
        policy.logits_of, other, divergence, vocabulary, temperature, rows, torch.is_grad_enabled()
    )
    trained = [weight for weight in weights if weight.requires_grad]
    total, each = _Exact.apply(job, hidden, token_weights.float(), *trained)
    return total, each


@dataclass(frozen=True, slots=True)
class _Job:
    logits_of: Callable[[Tensor], Tensor]
    other: Predictions
    divergence: Divergence
    vocabulary: int
    temperature: float
    rows: int
    learns: bool

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        yield from zip(*(tensor.split(self.rows) for tensor in tensors), strict=True)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """(n, vocabulary) float32, finite."""
        scaled = logits[:, : self.vocabulary].float() / self.temperature
        return torch.log_softmax(scaled, dim=-1).clamp_(min=_LEAST)

    def kl_and_gradient(self, logits: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) divergences, and the gradient with respect to the policy's logits, of their
        shape."""
        ours, theirs = self.log_softmax(logits), self.log_softmax(others)
        if self.divergence.placement == "exact-in-loss":
            kl, gradient = _kl_to(theirs, ours)
        elif self.divergence.placement == "forward-exact-in-loss":
            log_ratio = theirs - ours
            q = theirs.exp_()
            kl = torch.linalg.vecdot(q, log_ratio)
            gradient = ours.exp_().sub_(q)
        else:
            beta = self.divergence.beta
            mixed = torch.logaddexp(ours + math.log1p(-beta), theirs + math.log(beta))
            of_other = torch.linalg.vecdot(theirs.exp(), theirs.sub_(mixed))
            of_policy, gradient = _kl_to(mixed, ours)
            kl = beta * of_other + (1 - beta) * of_policy
            gradient.mul_(1 - beta)
        gradient.div_(self.temperature)
        beyond = logits.shape[1] - self.vocabulary
        return kl, torch.nn.functional.pad(gradient, (0, beyond)) if beyond else gradient


def _kl_to(held: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) KL(p, held) of log-probs (n, V), and its gradient with respect to p's logits at
    temperature 1; `ours`, log p, becomes p."""
    log_ratio = ours - held
    p = ours.exp_()
    kl = torch.linalg.vecdot(p, log_ratio)
    return kl, log_ratio.sub_(kl[:, None]).mul_(p)


class _Exact(torch.autograd.Function):
    """The sum chunk by chunk, with the gradients of states and weights for a factor of 1."""

    @staticmethod
    def forward(
        ctx: Any, job: _Job, hidden: Tensor, token_weights: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Without gradient mode the inputs still say that they need one.
        needed = [job.learns and needs for needs in ctx.needs_input_grad]
        of_states: list[Tensor] = []
        sums: list[Tensor | None] = [None] * len(weights)
        each = []
        for part, others, own in job.chunks(hidden, job.other.hidden, token_weights):
            leaf = part.detach().requires_grad_(needed[1])
            with torch.no_grad():
                their_logits = job.other.logits_of(others)
            with torch.set_grad_enabled(any(needed)):
                logits = job.logits_of(leaf)
            kl, gradient = job.kl_and_gradient(logits.detach(), their_logits)
            each.append(kl)
            if any(needed):
                inputs = [leaf] * needed[1] + list(weights)
                outer = gradient.mul_(own[:, None]).to(logits.dtype)
                made = list(torch.autograd.grad(logits, inputs, outer, allow_unused=True))
                if needed[1]:
                    of_states.append(made.pop(0))
                sums = [_plus(old, new) for old, new in zip(sums, made, strict=True)]
            del logits, gradient
        ctx.is_summed = [total is not None for total in sums]
        there = [total for total in sums if total is not None]
        ctx.types = [weight.dtype for weight in weights]
        ctx.save_for_backward(*([torch.cat(of_states)] if of_states else []), *there)
        ctx.has_states = bool(of_states)
        every = torch.cat(each) if each else token_weights.new_zeros(0)
        ctx.mark_non_differentiable(every)
        return (every * token_weights).sum(), every

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        states = saved.pop(0) * outer if ctx.has_states else None
        sums = [saved.pop(0) if is_there else None for is_there in ctx.is_summed]
        return (
            None,
            states,
            None,
            *(
                None if total is None else (total * outer).to(dtype)
                for total, dtype in zip(sums, ctx.types, strict=True)
            ),
        )


def _plus(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if more is None:
        return total
    return more.float() if total is None else total.add_(more)
