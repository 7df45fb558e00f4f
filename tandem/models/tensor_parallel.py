"""Tensor-parallel generation: a twin that holds a slice of the model's weights.

Column layers are sliced along their outputs (heads, inner width), row layers along their inputs;
their partial results are summed over the ranks that hold the other slices (arXiv:1909.08053). A
plan per architecture says which layers are which (`slice_plans`). `selfcheck` compares the logits
of the model in use before a run relies on its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandem.errors import ModelError
from tandem.models.lora import LoraLayer
from tandem.models.shared_copy import shared_copy
from tandem.models.slice_plans import SlicePlan, check_sliceable, evenly, heads_of, slice_plan
from tandem.ops import dense
from tandem.ops.spans import Spans, taken


class Group(Protocol):
    """The ranks that hold the slices: a `parallel.tensor.TensorGroup`, which models may not
    import."""

    size: int
    index: int

    def slice(self, weight: Tensor, dim: int, spans: Spans) -> Tensor:
        """This rank's part of a weight along a dimension, a new tensor."""

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' partial results, in place."""


class ColumnLinear(nn.Module):
    """A linear layer with some of its outputs."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out / parts)."""
        return dense.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer with some of its inputs; the results are summed over all slices."""

    weight: Tensor
    bias: Tensor | None
    add_up: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in / parts) -> (..., out), the same on every rank."""
        summed = self.add_up(dense.linear(x, self.weight, None))
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


@torch.no_grad()
def sliced_twin(
    model: PreTrainedModel,
    group: Group,
    *,
    whole: Callable[[Tensor], Tensor],
    dtype: torch.dtype | None,
) -> PreTrainedModel:
    """A twin whose planned layers hold this rank's slice of their weights; all others are whole.

    Adapters are merged into the slices, which are temporary; the model's own weights stay as they
    are.

    Args:
        whole: all of a weight.
        dtype: of the slices; None: the weights' own.
    """
    check_sliceable(model.config, group.size)
    plan, heads = slice_plan(model.config), heads_of(model.config)
    copies = shared_copy(model)
    originals = {copied: module for module, copied in copies.items()}
    twin = copies[model]
    assert isinstance(twin, PreTrainedModel)
    taken: dict[int, Tensor] = {}

    def kept(weight: Tensor) -> Tensor:
        """The whole weight, gathered once if it is tied."""
        if id(weight) not in taken:
            taken[id(weight)] = nn.Parameter(_cast(whole(weight), dtype), requires_grad=False)
        return taken[id(weight)]

    sliced: set[str] = set()
    for name, module in list(twin.named_modules()):
        if any(name.startswith(f"{done}.") for done in sliced):
            continue  # an adapter inside a sliced layer
        original = originals[module]
        cut = next((how for ending, how in plan.columns.items() if name.endswith(ending)), None)
        is_column = cut is not None
        if (is_column or name.endswith(plan.rows)) and hasattr(original, "weight"):
            size = _edges(original)[0 if is_column else 1]
            spans = (cut or evenly)(size, heads, group.size)
            layer = _layer(original, is_column, spans, group, whole, dtype)
            twin.set_submodule(name, layer)
            sliced.add(name)
            continue
        state: dict[str, Any] = module.__dict__
        state["_parameters"] = {
            key: None if weight is None else kept(weight)
            for key, weight in original._parameters.items()
        }
    _count_own_heads(twin, {name.rpartition(".")[0] for name in sliced}, plan, group.size)
    return twin.eval()


def _count_own_heads(twin: nn.Module, around: Collection[str], plan: SlicePlan, parts: int) -> None:
    """Let the modules around sliced layers count what is left to a rank."""
    modules = [twin.get_submodule(name) for name in around]
    configs = {id(m.config): m.config for m in modules if hasattr(m, "config")}
    counted = [(vars(m), plan.counts) for m in modules]
    counted += [(vars(config), plan.config_counts) for config in configs.values()]
    for attributes, names in counted:
        for name in attributes.keys() & names:
            attributes[name] = max(1, attributes[name] // parts)


def _edges(layer: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer; GPT-2's Conv1D stores (in, out)."""
    first, last = getattr(layer, "weight").shape  # noqa: B009, attributes have no static type
    return (last, first) if isinstance(layer, Conv1D) else (first, last)


def _layer(
    original: Any,
    is_column: bool,
    spans: Spans,
    group: Group,
    whole: Callable[[Tensor], Tensor],
    dtype: torch.dtype | None,
) -> nn.Module:
    weight = original.weight
    if not weight.is_floating_point():
        raise ModelError(
            "tensor-parallel generation must slice weights that are not quantized; got "
            f"{weight.dtype}. Leave --frozen-weights off, or --inference-tp-size 1."
        )
    layer: Any = ColumnLinear() if is_column else RowLinear()
    is_turned = isinstance(original, Conv1D)
    own = group.slice(weight, int(is_column == is_turned), spans)
    if is_turned:
        own = own.t()
    acting = original.acting() if isinstance(original, LoraLayer) else None
    if acting is not None:
        a, b = (whole(part.weight) for part in acting)
        if is_column:
            b = taken(b, 0, spans[group.index])
        else:
            a = taken(a, 1, spans[group.index])
        own = own + ((b @ a) * original.scale).to(own.dtype)
    layer.weight = nn.Parameter(_cast(own, dtype), requires_grad=False)
    bias = original.bias
    if bias is not None:
        full = group.slice(bias, 0, spans) if is_column else whole(bias)
        bias = nn.Parameter(_cast(full, dtype), requires_grad=False)
    layer.bias = bias
    if not is_column:
        layer.add_up = group.add_up
    return layer


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
