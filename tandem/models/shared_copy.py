"""Copies of a model's module objects over the very same tables of parameters and buffers.

What the twin is made of: classes, plain attributes and children are new, every tensor is the
model's own, and the config of the copy names our attention.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tandem.errors import ModelError
from tandem.models.fused import fuse
from tandem.ops.attention import TANDEM_ATTENTION
from tandem.ops.attention_context import attending, current_step

# What a model says of itself alone, and its twin must not: how it lies over the ranks.
_OWN = ("tandem_shards", "sharded_call")
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
    """Whether the hooks that gather a split model's weights, block by block, are heeded."""

    on: bool = True


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model's own forward without hooks, over its own tables: for weights that are whole."""
    root, originals = copied_tree(model, own_forward=True)
    for twin, original in originals.items():
        twin.training = original.training
    return root


def copied_tree(
    model: PreTrainedModel, *, own_forward: bool = False
) -> tuple[PreTrainedModel, dict[nn.Module, nn.Module]]:
    """A copy of the model's module objects as its twin has them, without hooks.

    Its parameter tables are the model's own until they are replaced.

    Args:
        own_forward: leave layers and attention as the model has them.
    Returns:
        the copy, and the original of each of its modules.
    """
    made: dict[int, nn.Module] = {}
    root = copied(model, made, None if own_forward else {}, Switch(on=False))
    assert isinstance(root, PreTrainedModel)
    originals = {made[id(module)]: module for module in model.modules()}
    for twin in originals:
        drop_hooks(twin)
        if not own_forward:
            fuse(twin)
    return root, originals


def copied(
    module: nn.Module, made: dict[int, nn.Module], configs: dict[int, Any] | None, hooks: Switch
) -> nn.Module:
    """A new object of the module's class over its own parameter and buffer tables.

    Args:
        configs: by identity, the configs with our attention that were made; None keeps its own.
    """
    if id(module) in made:
        return made[id(module)]
    is_split = isinstance(module, FSDPModule)
    kind = _own_class(module)
    twin: nn.Module = object.__new__(kind)
    made[id(module)] = twin
    state = twin.__dict__
    # References: the tables of parameters and buffers stay the original's.
    state.update(module.__dict__)
    for name in _OWN:
        state.pop(name, None)
    state["_modules"] = {
        name: None if child is None else copied(child, made, configs, hooks)
        for name, child in module._modules.items()
    }
    gathering = {
        name: OrderedDict(
            (number, _guarded(hook, hooks)) for number, hook in module.__dict__[name].items()
        )
        for name in ("_forward_pre_hooks", "_forward_hooks")
        if is_split
    }
    with_arguments = dict(state["_forward_pre_hooks_with_kwargs"]) if is_split else {}
    drop_hooks(twin)
    state.update(gathering)
    state["_forward_pre_hooks_with_kwargs"].update(with_arguments)
    if "config" in state and configs is not None:
        state["config"] = _with_our_attention(state["config"], configs)
    if hasattr(twin, "_gradient_checkpointing_func") or hasattr(twin, "gradient_checkpointing"):
        state["_gradient_checkpointing_func"] = _checkpointed
    return twin


def _own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module was made of; FSDP2 puts one of its own before it."""
    if not isinstance(module, FSDPModule):
        return type(module)
    _require_known_torch()
    others = [base for base in type(module).__bases__ if not issubclass(base, FSDPModule)]
    if len(others) != 1 or not issubclass(others[0], nn.Module):
        raise ModelError(
            f"a module split by FSDP2 must be of a class made of FSDPModule and its own; got "
            f"{type(module).__name__} of {[base.__name__ for base in type(module).__bases__]} from "
            f"torch {torch.__version__}. Use a torch that this version was tested with (README)."
        )
    return others[0]


@cache
def _require_known_torch() -> None:
    """Refuse a torch that keeps a module's hooks elsewhere: a copy would run without, or twice."""
    tables = {name for name in vars(nn.Module()) if "hook" in name and "state_dict" not in name}
    if tables - {"_is_full_backward_hook"} != set(_HOOKS):
        raise ModelError(
            f"modules must keep their hooks in {', '.join(_HOOKS)}; got "
            f"{', '.join(sorted(tables))} in torch {torch.__version__}. Use a torch that this "
            "version was tested with, or ZeRO stage 0 on one rank."
        )


def drop_hooks(twin: nn.Module) -> None:
    """Take every hook off a copy; the original keeps its own."""
    for name in _HOOKS:
        if name in twin.__dict__:
            twin.__dict__[name] = OrderedDict()


def _guarded(hook: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """The hook where the switch is on. Weakly held: a hook knows the module that it is of."""
    held = WeakMethod(hook) if hasattr(hook, "__self__") else lambda: hook

    def call(*arguments: Any, **keywords: Any) -> Any:
        live = held() if switch.on else None
        return live(*arguments, **keywords) if live is not None else None

    return call


def _with_our_attention(config: Any, configs: dict[int, Any]) -> Any:
    if id(config) not in configs:
        changed = copy.deepcopy(config)
        changed._attn_implementation = TANDEM_ATTENTION
        configs[id(config)] = changed
    return configs[id(config)]


def _checkpointed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Gradient checkpointing that remembers what the forward was over when it runs it again."""
    step = current_step()

    def again(*inputs: Any) -> Any:
        with attending(step):
            return function(*inputs)

    return checkpoint(again, *arguments, use_reentrant=False)
