"""Tensor-parallel generation: a twin that holds a slice of the model's weights.

Column layers are sliced along their outputs (heads, inner width), row layers along their inputs;
their partial results are summed over the ranks that hold the other slices (arXiv:1909.08053). A
plan per architecture says which layers are which (`slice_plans`). `selfcheck` compares the logits
of the model in use before a run relies on its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandem.models.blocks import Heads
from tandem.models.lora import LoraLayer
from tandem.models.quantized import PackedWeight
from tandem.models.shared_copy import shared_copy
from tandem.models.slice_cuts import Cut, evenly
from tandem.models.slice_plans import SlicePlan, check_sliceable, heads_of, planned, slice_plan
from tandem.ops import dense
from tandem.ops.spans import Span, Spans, length, taken


class Group(Protocol):
    """The ranks that hold the slices: a `parallel.tensor.TensorGroup`, which models may not
    import."""

    size: int
    index: int

    def slice(self, weight: Tensor, dim: int, spans: Spans) -> Tensor:
        """This rank's part of a weight along a dimension, a new tensor."""

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' partial results, in place."""


class _SlicedLinear(nn.Module):
    """A slice of a linear layer; beside integers, which cannot be added to, of its adapter too.

    Attributes:
        weight: (out, in) of numbers, or a quantized one, `turned` as its layer stores it.
        lora_a, lora_b: (rank, in), (out, rank), to add with `scale`; None: nothing.
    """

    weight: Any
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.lora_a = self.lora_b = None
        self.turned, self.scale = False, 1.0

    def partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out) of this slice alone."""
        if isinstance(self.weight, PackedWeight):
            out = self.weight.product(x, bias, turned=self.turned, product=dense.linear)
        else:
            out = dense.linear(x, self.weight, bias)
        if self.lora_a is None or self.lora_b is None:
            return out
        inner = dense.linear(x.to(self.lora_a.dtype), self.lora_a, None) * self.scale
        return out + dense.linear(inner, self.lora_b, None).to(out.dtype)


class ColumnLinear(_SlicedLinear):
    """A linear layer with some of its outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out / parts)."""
        return self.partial(x, self.bias)


class RowLinear(_SlicedLinear):
    """A linear layer with some of its inputs; the results are summed over all slices."""

    add_up: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in / parts) -> (..., out), the same on every rank."""
        summed = self.add_up(self.partial(x, None))
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


class SlicedNorm(nn.Module):
    """A root-mean-square norm over numbers of which each slice has some.

    Attributes:
        width: how many there are, with the copies of those that several slices have.
    """

    weight: Tensor
    add_up: Callable[[Tensor], Tensor]
    width: int
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """(..., D / parts) -> (..., D / parts)."""
        numbers = x.float()
        squares = self.add_up(numbers.square().sum(-1, keepdim=True))
        numbers = numbers * torch.rsqrt(squares / self.width + self.eps)
        return (numbers * self.weight).to(x.dtype)


@torch.no_grad()
def sliced_twin(
    model: PreTrainedModel,
    group: Group,
    *,
    whole: Callable[[Tensor], Tensor],
    dtype: torch.dtype | None,
) -> PreTrainedModel:
    """A twin whose planned layers hold this rank's slice of their weights; all others are whole. A
    family that generates by Hugging Face's `generate` has a copy that runs its own forward.

    Adapters are merged into the slices, which are temporary; the model's own weights stay as they
    are. Slices of quantized weights are integers too, beside which adapters are sliced.

    Args:
        whole: all of a weight.
        dtype: of the slices; None: the weights' own.
    """
    check_sliceable(model.config, group.size)
    plan, heads = slice_plan(model.config), heads_of(model.config)
    copies = shared_copy(model, own_forward=plan.by_generate)
    originals = {copied: module for module, copied in copies.items()}
    twin = copies[model]
    assert isinstance(twin, PreTrainedModel)
    gathered: dict[int, Tensor] = {}

    def kept(weight: Tensor) -> Tensor:
        """The whole weight, gathered once if it is tied."""
        if id(weight) not in gathered:
            gathered[id(weight)] = _frozen(whole(weight), dtype)
        return gathered[id(weight)]

    def part(name: str, weight: Tensor) -> Tensor:
        """A weight of another module than a linear layer."""
        if name.endswith(plan.once) and group.index > 0:
            return _frozen(torch.zeros_like(kept(weight)), dtype)
        cut = planned(plan.stacks, name)
        if cut is None:
            return kept(weight)
        dim, how = cut
        own = group.slice(weight, dim, how(weight.shape[dim], heads, group.size))
        return _frozen(own, dtype)

    sliced: set[str] = set()
    for name, module in list(twin.named_modules()):
        if any(name.startswith(f"{done}.") for done in sliced):
            continue  # an adapter inside a sliced layer
        original = originals[module]
        column, row = planned(plan.columns, name), planned(plan.rows, name)
        if (cut := column or row) is not None and hasattr(original, "weight"):
            size = _edges(original)[0 if column else 1]
            spans = cut(size, heads, group.size)
            layer = _layer(original, column is not None, spans, group, whole, dtype)
            twin.set_submodule(name, layer)
            sliced.add(name)
            continue
        if (cut := planned(plan.norms, name)) is not None:
            twin.set_submodule(name, _norm(original, cut, heads, group, dtype))
            continue
        state: dict[str, Any] = module.__dict__
        state["_parameters"] = {
            key: None if weight is None else part(f"{name}.{key}", weight)
            for key, weight in original._parameters.items()
        }
        if name.endswith(plan.partial):
            module.register_forward_hook(_Summed(group.add_up))
            _choose_product(module)
    around = {name.rpartition(".")[0] for name in sliced}
    _count_own_heads(twin, around, plan, group.size)
    for name in around if plan.biases else ():
        own = _OwnHeads(plan.biases, heads.queries, group)
        twin.get_submodule(name).register_forward_pre_hook(own, with_kwargs=True)
    return twin.eval()


def _choose_product(experts: Any) -> None:
    """Let experts run one by one where a row of their slices does not begin at 16 bytes, as torch's
    product over groups of rows needs it."""
    rows = [p.shape[-1] * p.element_size() for p in experts.parameters() if p.dim() == 3]
    if any(size % 16 for size in rows):
        experts.config._experts_implementation = "eager"


class _Summed:
    """A hook: the result of a module is this rank's part of a sum."""

    def __init__(self, add_up: Callable[[Tensor], Tensor]) -> None:
        self._add_up = add_up

    def __call__(self, module: nn.Module, given: Any, partial: Tensor) -> Tensor:
        return self._add_up(partial.contiguous())


class _OwnHeads:
    """A hook: attention is called with a bias for every head, and has this rank's heads."""

    def __init__(self, names: Collection[str], heads: int, group: Group) -> None:
        self._names, self._heads = names, heads
        [self._own] = evenly(heads, Heads(heads, 1, heads), group.size)[group.index]

    def __call__(
        self, module: nn.Module, given: Any, keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        return given, {
            name: self._cut(value) if name in self._names and value is not None else value
            for name, value in keywords.items()
        }

    def _cut(self, bias: Tensor) -> Tensor:
        """(B, H, ...) or (B * H, Q, T); a mask (B, 1, Q, T) is of all heads."""
        first, last = self._own
        if bias.dim() == 4:
            return bias if bias.shape[1] != self._heads else bias[:, first:last]
        return bias.unflatten(0, (-1, self._heads))[:, first:last].flatten(0, 1)


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
    layer: Any = ColumnLinear() if is_column else RowLinear()
    weight, is_turned = original.weight, isinstance(original, Conv1D)
    dim = int(is_column == is_turned)
    adapter = _sliced_adapter(original, is_column, spans[group.index], whole)
    if isinstance(weight, PackedWeight):
        layer.weight, layer.turned = weight.part(dim, spans[group.index], whole), is_turned
        if adapter is not None:
            layer.lora_a, layer.lora_b = (_frozen(part, dtype) for part in adapter)
            layer.scale = original.scale
    else:
        own = group.slice(weight, dim, spans)
        own = own.t() if is_turned else own
        if adapter is not None:
            a, b = adapter
            own = own + ((b @ a) * original.scale).to(own.dtype)
        layer.weight = _frozen(own, dtype)
    bias = original.bias
    if bias is not None:
        full = group.slice(bias, 0, spans) if is_column else whole(bias)
        bias = _frozen(full, dtype)
    layer.bias = bias
    if not is_column:
        layer.add_up = group.add_up
    return layer


def _sliced_adapter(
    layer: nn.Module,
    is_column: bool,
    spans: Sequence[Span],
    whole: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor] | None:
    """A and B of a layer's adapter, where it has one that acts, as far as its slice needs them."""
    acting = layer.acting() if isinstance(layer, LoraLayer) else None
    if acting is None:
        return None
    a, b = (whole(part.weight) for part in acting)
    return (a, taken(b, 0, spans)) if is_column else (taken(a, 1, spans), b)


def _norm(
    original: Any, cut: Cut, heads: Heads, group: Group, dtype: torch.dtype | None
) -> nn.Module:
    """The slice of a norm over all heads. Keys that several ranks hold are counted once."""
    weight = original.weight
    spans = cut(len(weight), heads, group.size)
    layer = SlicedNorm()
    layer.weight = _frozen(group.slice(weight, 0, spans), dtype)
    layer.width = sum(map(length, spans))
    layer.eps, layer.add_up = original.variance_epsilon, group.add_up
    return layer


def _frozen(tensor: Tensor, dtype: torch.dtype | None) -> nn.Parameter:
    """In another type, if it is of floats."""
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return nn.Parameter(tensor, requires_grad=False)
