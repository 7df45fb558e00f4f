"""A model that only answers, with its weights as decoding reads them and no other copy."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tandem.generation.native_runner import projections, runs_natively
from tandem.models.computed import has_its_own
from tandem.models.frozen import FrozenLinear
from tandem.models.laid_out import lay_out
from tandem.models.lora import LoraLinear
from tandem.process import trim_heap

_ANY = 1 << 62


def lay_out_model(model: PreTrainedModel) -> bool:
    """Replace the weights of a model's linear layers by their layout for decoding, in place, one
    group of layers at a time; whether it was done.

    It is done for models that decode in one call on a CPU (`native_runner`), which then copies only
    the vocabulary head: other models are not changed, nor is one with a layer in two places or
    with hooks on its layers. The weights must be frozen. Log-probs and texts keep their bits; no
    gradient passes through the model any more.
    """
    if any(p.requires_grad for p in model.parameters()) or not runs_natively(model, _ANY):
        return False
    inner: Any = model.model
    groups = [(group, layer) for layer in inner.layers for group in projections(layer)]
    modules = [module for group, _ in groups for module in group]
    if len(set(map(id, modules))) < len(modules) or any(map(has_its_own, modules)):
        return False
    for group, layer in groups:
        _lay_out(group, layer)
    for parameter in model.parameters():  # off the mapped file, which then leaves memory as a whole
        parameter.data = parameter.data.clone()
    trim_heap()
    return True


def _lay_out(group: list[Any], layer: nn.Module) -> None:
    """Plain layers over one input, adapted or not."""
    if not all(isinstance(module.weight, nn.Parameter) for module in group):
        return  # quantized: smaller than any layout
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
