"""Copies of a model's modules that share its tensors: all that goes below torch's public API.

A twin (`twin`) needs a second object for every module of a model, perhaps of another class, with
its own children, hooks and config, that reads the same parameters. What `shared_copy` does for it,
and what would break otherwise:

`object.__new__` and the module's attributes, instead of the class's constructor
    The constructor does not know what has changed since: adapters, quantized layers, resized
    embeddings, dropout rates.
the very dictionaries `_parameters` and `_buffers`, not copies of them
    A weight that is replaced, or gathered by FSDP2, would be replaced in the model alone.
the module's class without the one that FSDP2 puts before it
    FSDP2's `__new__` calls the constructor, and its methods would move the model's weights.
a faster class with the same result, chosen before the object is made (`fused`)
    Generation and training would not run the same operations, nor give the same bits.
no hooks, except FSDP2's in a twin, each behind a switch
    A user's hook would run twice. Without FSDP2's, no weights would be gathered; without the
    switch, whole weights would be gathered again in generation.
a copy of the config that names our attention
    Layers would run the model's attention, which knows neither packed sequences nor KV memory.
gradient checkpointing that remembers the attention metadata
    The recomputed forward would not know the lengths of its sequences.

The alternative is to construct `type(model)(config)` on the meta device and then to bind the same
dictionaries. Over 47 decoder families that takes 6 times as long (2 to 3 times for a model of 30
layers) and gives the same bits in 42; three cannot be packed either way. It fails for GPT-J, whose
constructor looks attention up in a table of its own, and for Llama 4, which `load.name_backbone`
corrects after construction; and what is adapted, quantized or sharded has to be copied anyway.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast
from weakref import WeakMethod

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from tandem.errors import ModelError
from tandem.models.fused import fused
from tandem.models.recompute import RECOMPUTED, checkpointed, recomputing
from tandem.ops.attention import TANDEM_ATTENTION

# How a model is sharded (`parallel.shard`) is the model's business, not its twin's.
_NOT_COPIED = ("tandem_shards", "sharded_call")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(slots=True)
class Switch:
    """Whether the hooks that gather a sharded model's weights, block by block, run in its copy."""

    on: bool = True


def shared_copy(
    model: nn.Module, *, gathering: Switch | None = None, own_forward: bool = False
) -> dict[nn.Module, nn.Module]:
    """Copy the module objects of a model, but none of its tensors.

    Args:
        gathering: keep the hooks of FSDP2, but for the root's, which run around the whole forward
            (`parallel.shard`); this switches them. None keeps no hooks at all.
        own_forward: leave layers, attention and checkpointing as the model has them.
    Returns:
        the copy of each module, in the order of `modules()`: the model's own copy comes first.
    """
    copies = {module: _new_object(module, own_forward) for module in model.modules()}
    configs: dict[int, Any] = {}
    for module, twin in copies.items():
        state = twin.__dict__
        state["_modules"] = {
            name: None if child is None else copies[child]
            for name, child in module._modules.items()
        }
        state.update({name: OrderedDict() for name in _HOOKS if name in state})
        if gathering is not None and module is not model and isinstance(module, FSDPModule):
            state.update(_gathering_hooks(module, gathering))
        if own_forward:
            continue
        if "config" in state:
            state["config"] = _with_our_attention(state["config"], configs)
        if hasattr(twin, "_gradient_checkpointing_func") or hasattr(twin, "gradient_checkpointing"):
            state["_gradient_checkpointing_func"] = checkpointed
    return copies


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model's own forward without hooks, for weights that are whole."""
    root = shared_copy(model, own_forward=True)[model]
    assert isinstance(root, PreTrainedModel)
    return root


def _new_object(module: nn.Module, own_forward: bool) -> nn.Module:
    """An object with the attributes of the module, its tables of tensors among them."""
    kind = _own_class(module)
    replaced, attributes = (kind, {}) if own_forward else fused(module, kind)
    if module.__dict__.get(RECOMPUTED) and not own_forward:
        replaced = recomputing(cast(Any, replaced))
    twin: nn.Module = object.__new__(replaced)
    twin.__dict__.update(module.__dict__, **attributes)
    for name in _NOT_COPIED:
        twin.__dict__.pop(name, None)
    return twin


def _own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module was made of; FSDP2 puts one of its own before it."""
    if not isinstance(module, FSDPModule):
        return type(module)
    _require_known_torch()
    others = [base for base in type(module).__bases__ if not issubclass(base, FSDPModule)]
    if len(others) != 1 or not issubclass(others[0], nn.Module):
        raise ModelError(
            f"a module sharded by FSDP2 must have a class made of FSDPModule and its own; got "
            f"{type(module).__name__} of {[base.__name__ for base in type(module).__bases__]} from "
            f"torch {torch.__version__}. Use a torch that this version was tested with (README)."
        )
    return others[0]


@cache
def _require_known_torch() -> None:
    """Refuse a torch that keeps a module's hooks elsewhere: a copy would run none, or all twice."""
    tables = {name for name in vars(nn.Module()) if "hook" in name and "state_dict" not in name}
    if tables - {"_is_full_backward_hook"} != set(_HOOKS):
        raise ModelError(
            f"modules must keep their hooks in {', '.join(_HOOKS)}; got "
            f"{', '.join(sorted(tables))} in torch {torch.__version__}. Use a torch that this "
            "version was tested with, or ZeRO stage 0 on one rank."
        )


def _gathering_hooks(module: nn.Module, switch: Switch) -> dict[str, OrderedDict[int, Any]]:
    """The hooks by which FSDP2 gathers a module's weights and frees them, behind the switch."""
    tables: dict[str, OrderedDict[int, Any]] = {
        name: OrderedDict(
            (number, _switched(hook, switch)) for number, hook in module.__dict__[name].items()
        )
        for name in ("_forward_pre_hooks", "_forward_hooks")
    }
    takes_arguments = OrderedDict(module._forward_pre_hooks_with_kwargs)
    return {**tables, "_forward_pre_hooks_with_kwargs": takes_arguments}


def _switched(hook: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """The hook, where the switch is on. Held weakly, because it refers to the model's module."""
    held = WeakMethod(hook) if hasattr(hook, "__self__") else lambda: hook

    def call(*arguments: Any, **keywords: Any) -> Any:
        live = held() if switch.on else None
        return live(*arguments, **keywords) if live is not None else None

    return call


def _with_our_attention(config: Any, configs: dict[int, Any]) -> Any:
    """A copy of a config that names our attention; modules that share one share its copy."""
    if id(config) not in configs:
        changed = copy.deepcopy(config)
        changed._attn_implementation = TANDEM_ATTENTION
        configs[id(config)] = changed
    return configs[id(config)]
