"""A model that only answers, with its weights as decoding reads them and no other copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.generation.native_runner import projections, runs_natively
from tandem.models.computed import has_its_own
from tandem.models.frozen import FrozenLinear
from tandem.models.laid_out import lay_out
from tandem.models.lora import LoraLinear, adaptable
from tandem.models.quantized import PackedWeight
from tandem.models.stored import StoredWeight
from tandem.models.twin import base_forward, decodes, twin_of
from tandem.ops import native
from tandem.ops.attention_context import Packed, attending
from tandem.process import trim_heap

_ANY = 1 << 62
_DTYPES = (torch.float32, torch.bfloat16)


def lay_out_model(model: PreTrainedModel) -> bool:
    """Replace the weights of a model's linear layers by their layout for decoding, in place, one
    group of layers at a time; whether it was done.

    It is done on a CPU for models that decode over KV memory. Those that decode in one call
    (`native_runner`) then copy only the vocabulary head; others read their layers one by one, and
    keep a head as it is. A model is not changed that has a layer in two places or hooks on its
    layers, nor where a layer is of another type than the model. The weights must be frozen.
    Log-probs and texts keep their bits; no gradient passes through the model any more.
    """
    if any(p.requires_grad for p in model.parameters()):
        return False
    groups = _groups(model)
    modules = [module for group, _ in groups for module in group]
    if (
        not modules
        or len(set(map(id, modules))) < len(modules)
        or any(map(has_its_own, modules))
        or not all(_may_be_laid_out(module, model) for module in modules)
    ):
        return False
    for group, layer in groups:
        _lay_out(group, layer)
    for parameter in model.parameters():  # off the mapped file, which then leaves memory as a whole
        parameter.data = parameter.data.clone()
    trim_heap()
    return True


def _groups(model: PreTrainedModel) -> list[tuple[list[Any], nn.Module]]:
    """Layers over one input, which decoding reads as one, and what they are in; none of a model
    that cannot be laid out."""
    if runs_natively(model, _ANY):
        inner: Any = model.model
        return [(group, layer) for layer in inner.layers for group in projections(layer)]
    if model.device.type != "cpu" or not native.available() or not decodes(model):
        return []
    found = [model.get_submodule(name) for name in _called(model, adaptable(model))]
    return [([module], model) for module in found if isinstance(module, nn.Linear)]


@torch.no_grad()
def _called(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Of layers those that a forward calls: some families read a router's weight themselves."""
    twin, called = twin_of(model), set[str]()
    hooks = [
        twin.get_submodule(name).register_forward_pre_hook(
            lambda module, given, name=name: called.add(name)
        )
        for name in names
    ]
    try:
        with attending(Packed.of_lengths([3], model.device)):
            base_forward(twin, torch.zeros((1, 3), dtype=torch.long), torch.arange(3)[None])
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name in names if name in called]


def _may_be_laid_out(module: Any, model: PreTrainedModel) -> bool:
    """A plain layer, adapted or not, in the type that the model computes in; or a quantized one,
    which stays."""
    weight = module.weight
    if isinstance(weight, StoredWeight):
        return True
    is_plain = type(module) is nn.Linear or isinstance(module, LoraLinear)
    return is_plain and weight.dtype == model.dtype and weight.dtype in _DTYPES


def _lay_out(group: list[Any], layer: nn.Module) -> None:
    """Plain layers over one input, adapted or not."""
    if not all(isinstance(module.weight, nn.Parameter) for module in group):
        for module in group:  # quantized: smaller than any layout
            if isinstance(module.weight, PackedWeight):
                module.weight.stays_packed = True
        return
    laid = lay_out([module.weight.detach() for module in group])
    if laid is None:
        return
    names = {id(module): name for name, module in layer.named_modules()}
    for module, weight in zip(group, laid, strict=True):
        if isinstance(module, LoraLinear):
            module.replace_weight(weight)
        else:
            layer.set_submodule(names[id(module)], FrozenLinear(module, weight))
            del module.weight  # an older twin must not keep it alive
