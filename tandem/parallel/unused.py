"""Weights that a rank's rows leave without gradient, in a model that FSDP2 splits.

FSDP2 reduces the gradients that a rank has, without asking which the other ranks have. Which
weights have one may depend on the rows: deepseek_v4 compresses groups of tokens, and computes
nothing there for a row shorter than a group. Ranks that differ would hang in the collective, or add
up gradients of different weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from tandem.errors import ModelError


class WholeReductions:
    """Reduces the gradients of all trained weights of a unit that ran, with zeros where this rank
    has none, and records which ones it has."""

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        """Install it in the units."""
        self._weights: list[nn.Parameter] = []
        self._own: set[nn.Parameter] = set()
        self._has_run = False
        for unit in units:
            # torch 2.13 has set_reduce_scatter_unused_params, which does not tell such zeros from
            # gradients: AdamW would decay and move weights that no rank has used.
            group: Any = unit._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group.post_backward = partial(self._reduce, group, group.post_backward)
                self._weights += [
                    weight.sharded_param
                    for weight in group.fsdp_params
                    if weight.sharded_param.requires_grad
                ]

    @property
    def has_own(self) -> list[bool]:
        """Whether this rank has made a gradient of each weight since `forget`; in the same order on
        every rank."""
        return [weight in self._own for weight in self._weights]

    def require_run(self) -> None:
        """Where there are gradients, so that none passes for one that no rank has made.

        Raises:
            ModelError: FSDP2 has reduced them in another way.
        """
        if not self._has_run:
            raise ModelError(
                "a sharded model's gradients must be reduced by way of FSDP2's post_backward; got "
                f"torch {torch.__version__}, which goes another way. Use an earlier torch."
            )

    def where(self, chosen: Iterable[bool]) -> list[nn.Parameter]:
        """The weights chosen, in the order of `has_own`."""
        return [weight for weight, this in zip(self._weights, chosen, strict=True) if this]

    def forget(self) -> None:
        """Forget which gradients this rank has made."""
        self._own.clear()
        self._has_run = False

    def _reduce(self, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        self._has_run = True
        if group.reduce_grads and group._training_state == TrainingState.PRE_BACKWARD:
            self._complete([w for w in group.fsdp_params if w.sharded_param.requires_grad])
        post_backward(*unused)

    @torch.no_grad()
    def _complete(self, weights: list[Any]) -> None:
        # Earlier micro-batches' sums, in the type of the reduction. From torch 2.15 on they are the
        # gradients themselves, and one reduction takes several types.
        has_sums = any(weight.unsharded_accumulated_grad is not None for weight in weights)
        for weight in weights:
            if weight.unsharded_accumulated_grad is not None:
                self._own.add(weight.sharded_param)
                continue
            if weight.unsharded_param.grad is None:
                weight.unsharded_param.grad = torch.zeros_like(weight.unsharded_param)
            else:
                self._own.add(weight.sharded_param)
            if has_sums and hasattr(weight, "to_accumulated_grad_if_needed"):
                weight.to_accumulated_grad_if_needed()


def keep_in_graph(block: nn.Module) -> None:
    """Let a unit have a backward pass whatever its rows use, if any of its weights are trained:
    without, a rank whose graph begins behind it gathers and reduces nothing where others do."""
    if any(weight.requires_grad for weight in block.parameters()):
        # Before FSDP2 looks at what comes out.
        block.register_forward_hook(_begin_graph, prepend=True)


def _begin_graph(block: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    first = output[0] if isinstance(output, tuple) and output else output
    if not torch.is_grad_enabled() or not isinstance(first, Tensor) or first.requires_grad:
        return output
    first = _Beginning.apply(first, first.new_zeros((), requires_grad=True))
    return (first, *output[1:]) if isinstance(output, tuple) else first


class _Beginning(torch.autograd.Function):
    """A copy of x that needs a gradient, of which nothing is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None
