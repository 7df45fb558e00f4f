"""The generation twin: a second module tree over the very same weights.

A model is trained, saved and read as the Hugging Face module that it is. What computes is its
twin: copies of its module objects whose parameter and buffer tables are the originals' own, so
that no weight exists twice and none can differ. In the twin, attention goes to
`ops.attention.tandem_attention` and plain layers to the operations of `ops.dense`, packed
sequences and KV memory included; hooks and flags of the original stay where they are.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tandem.models.fused import fuse
from tandem.ops.attention import TANDEM_ATTENTION
from tandem.ops.steps import LayerShape, Packed, Recording, attending, current_step

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
class _Switch:
    """Whether the hooks that gather a split model's weights, block by block, are heeded."""

    on: bool = True


@dataclass(slots=True)
class _Twin:
    """A twin and the originals of its modules, both in the order of `modules()`."""

    model: PreTrainedModel
    kind: type[PreTrainedModel]
    originals: list[ReferenceType[nn.Module]]
    copies: list[nn.Module]
    hooks: _Switch
    shapes: tuple[LayerShape, ...] | None = None
    why_unpacked: str | None = None


_twins: WeakKeyDictionary[PreTrainedModel, _Twin] = WeakKeyDictionary()
_stand_ins: WeakKeyDictionary[PreTrainedModel, _Twin] = WeakKeyDictionary()


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model's twin, built once and kept in step with it.

    Its forward must run inside `ops.steps.attending`, on packed token ids (1, N) with their
    positions (1, N). Gradients reach the model's own parameters.
    """
    return _current(model).model


def shares_every_tensor(model: nn.Module) -> bool:
    """Whether the twin's parameters and buffers are the model's own objects, by identity."""
    assert isinstance(model, PreTrainedModel)
    twin = twin_of(model)
    ours = [*model.named_parameters(), *model.named_buffers()]
    theirs = [*twin.named_parameters(), *twin.named_buffers()]
    return len(ours) == len(theirs) and all(
        name == other and tensor is same
        for (name, tensor), (other, same) in zip(ours, theirs, strict=True)
    )


def kv_shapes(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """What each attention layer keeps per token, in the order of the layers.

    Empty where the model's attention does not go through transformers' attention interface.
    """
    entry = _current(model)
    if entry.shapes is None:
        entry.shapes, entry.why_unpacked = _recorded(entry.model)
    return entry.shapes


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether the twin computes this family: its attention is reached through the interface."""
    return bool(kv_shapes(model))


def why_unpacked(model: PreTrainedModel) -> str:
    """Why `supports_packing` says no; empty where it says yes."""
    kv_shapes(model)
    return _current(model).why_unpacked or ""


@contextmanager
def without_hooks(model: PreTrainedModel) -> Iterator[None]:
    """Within: the twin of a model split over ranks gathers nothing; its weights must be whole."""
    hooks = _current(model).hooks
    before, hooks.on = hooks.on, False
    try:
        yield
    finally:
        hooks.on = before


@contextmanager
def standing_in(model: PreTrainedModel, twin: PreTrainedModel) -> Iterator[None]:
    """Within: `twin` computes in place of the model's own twin."""
    _stand_ins[model] = _Twin(twin, type(model), [], [], _Switch())
    try:
        yield
    finally:
        del _stand_ins[model]


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
    root = _copied(model, made, None if own_forward else {}, _Switch(on=False))
    assert isinstance(root, PreTrainedModel)
    originals = {made[id(module)]: module for module in model.modules()}
    for twin in originals:
        _drop_hooks(twin)
        if not own_forward:
            fuse(twin)
    return root, originals


def _current(model: PreTrainedModel) -> _Twin:
    if model in _stand_ins:
        return _stand_ins[model]
    entry = _twins.get(model)
    if entry is None or not _follow(model, entry):
        entry = _twins[model] = _build(model)
        _follow(model, entry)
    return entry


def _follow(model: PreTrainedModel, entry: _Twin) -> bool:
    """Take over what may change on a module object; False if the module tree itself changed."""
    originals, copies = entry.originals, entry.copies
    if type(model) is not entry.kind:  # it has been split over the ranks
        return False
    count = 0
    for module in model.modules():
        if count == len(originals) or originals[count]() is not module:
            return False
        twin = copies[count].__dict__
        count += 1
        if twin["training"] is not module.training:
            twin["training"] = module.training
        if "gradient_checkpointing" in module.__dict__:
            twin["gradient_checkpointing"] = module.gradient_checkpointing
    return count == len(originals)


def _build(model: PreTrainedModel) -> _Twin:
    made: dict[int, nn.Module] = {}
    configs: dict[int, Any] = {}
    hooks = _Switch()
    root = _copied(model, made, configs, hooks)
    _drop_hooks(root)  # the root's are run by the one call that a forward is (parallel.shard)
    assert isinstance(root, PreTrainedModel)
    modules = list(model.modules())
    copies = [made[id(module)] for module in modules]
    for twin in copies:
        fuse(twin)
    return _Twin(root, type(model), [ref(module) for module in modules], copies, hooks)


def _copied(
    module: nn.Module, made: dict[int, nn.Module], configs: dict[int, Any] | None, hooks: _Switch
) -> nn.Module:
    """A new object of the module's class over its own parameter and buffer tables.

    Args:
        configs: by identity, the configs with our attention that were made; None keeps its own.
    """
    if id(module) in made:
        return made[id(module)]
    is_split = isinstance(module, FSDPModule)
    # A split module's class is one made for it; the class that it was comes two after.
    kind = type(module).__mro__[2] if is_split else type(module)
    twin: nn.Module = object.__new__(kind)
    made[id(module)] = twin
    state = twin.__dict__
    # References: the tables of parameters and buffers stay the original's.
    state.update(module.__dict__)
    for name in _OWN:
        state.pop(name, None)
    state["_modules"] = {
        name: None if child is None else _copied(child, made, configs, hooks)
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
    _drop_hooks(twin)
    state.update(gathering)
    state["_forward_pre_hooks_with_kwargs"].update(with_arguments)
    if "config" in state and configs is not None:
        state["config"] = _with_our_attention(state["config"], configs)
    if hasattr(twin, "_gradient_checkpointing_func") or hasattr(twin, "gradient_checkpointing"):
        state["_gradient_checkpointing_func"] = _checkpointed
    return twin


def _drop_hooks(twin: nn.Module) -> None:
    for name in _HOOKS:
        if name in twin.__dict__:
            twin.__dict__[name] = OrderedDict()


def _guarded(hook: Callable[..., Any], switch: _Switch) -> Callable[..., Any]:
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


@torch.no_grad()
def _recorded(twin: PreTrainedModel) -> tuple[tuple[LayerShape, ...], str]:
    """Run the twin on three tokens and see which layers ask for attention."""
    device = twin.device
    recording = Recording(Packed.of_lengths([3], device))
    ids = torch.zeros((1, 3), dtype=torch.long, device=device)
    family = twin.config.model_type
    was_training = [(module, module.training) for module in twin.modules()]
    twin.eval()
    try:
        with attending(recording):
            base_forward(twin, ids, torch.arange(3, device=device)[None])
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (), f"family {family!r} does not run on packed tokens ({reason})"
    finally:
        for module, training in was_training:
            module.training = training
    layers = twin.config.get_text_config().num_hidden_layers
    if sorted(recording.shapes) != list(range(layers)):
        return (), (
            f"{len(recording.shapes)} of {layers} layers of family {family!r} attend through "
            "transformers' attention interface"
        )
    return tuple(recording.shapes[i] for i in range(layers)), ""


def base_forward(twin: PreTrainedModel, token_ids: Tensor, positions: Tensor) -> Tensor:
    """Last hidden states (1, N, D) of a twin, inside `attending`."""
    output = twin.base_model(input_ids=token_ids, position_ids=positions, use_cache=False)
    return output.last_hidden_state
