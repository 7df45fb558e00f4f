"""One frozen base under several models: actor, critic, reference and reward model.

Models that start from the same one differ only in adapters and heads. `share_base` makes them hold
its frozen weights once, as the same parameter objects, quantized or not. Each model keeps its own
module tree, twin, optimizer and folder. A model that is known to start from the same files is not
even read (`meta_init`).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tandem.errors import ModelError
from tandem.models.frozen import base_modules

Slot = tuple[str, nn.Module, str]
"""Where a parameter is: its full name, its module, its name in the module."""


def share_base(owner: PreTrainedModel, *others: PreTrainedModel) -> int:
    """Make the others' frozen weights the owner's own parameter objects; in place.

    That is base model and vocabulary head, also below adapters. Adapters, scalar heads and weights
    that another model trains stay that model's own. All models are checked before the first is
    changed. Quantize before sharing; shard (ZeRO 1 to 3) after it, which gives each model shards of
    its own. `requires_grad_` on a shared weight is for every model. Another model's weight on the
    meta device is assumed to have the owner's values.

    Args:
        owner: the model with the most heads, the actor.
    Returns:
        bytes that are freed once nothing else holds the others' own weights.
    Raises:
        ModelError: a frozen weight of another model is missing in the owner, trained there, sharded
            or of other values; or another model has no frozen weight.
    """
    mine = {name: module._parameters[key] for name, module, key in _base_slots(owner)}
    slots: list[Slot] = []
    for number, other in enumerate(others, start=1):
        found = [slot for slot in _base_slots(other) if not _slot(slot).requires_grad]
        if not found:
            raise ModelError(
                f"model {number} to share a base must have frozen weights; got none. Give it "
                "adapters (--lora.rank) or freeze it."
            )
        for slot in found:
            _require_same(slot, mine.get(slot[0]), number)
        slots += found
    saved = {id(_slot(slot)): _slot(slot) for slot in slots if _slot(slot) is not mine[slot[0]]}
    for name, module, key in slots:
        module._parameters[key] = mine[name]
    freed = (weight for weight in saved.values() if not weight.is_meta)
    return sum(weight.numel() * weight.element_size() for weight in freed)


def _base_slots(model: PreTrainedModel) -> list[Slot]:
    """Where the base's parameters are."""
    return [
        (f"{name}.{key}", module, key)
        for name, module in base_modules(model)
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


def _slot(slot: Slot) -> nn.Parameter:
    parameter = slot[1]._parameters[slot[2]]
    assert parameter is not None
    return parameter


def _require_same(slot: Slot, mine: nn.Parameter | None, number: int) -> None:
    """Refuse a frozen weight of model `number` that the owner does not have frozen and equal."""
    name, theirs = slot[0], _slot(slot)
    if mine is theirs:
        return
    if mine is None:
        found = "which the first model lacks"
    elif isinstance(theirs, DTensor) or isinstance(mine, DTensor):
        found = "which is sharded already"
    elif mine.requires_grad:
        found = "which the first model trains"
    elif (theirs.shape, theirs.dtype) != (mine.shape, mine.dtype) or (
        theirs.device not in (mine.device, torch.device("meta"))
    ):
        found = f"{_described(theirs)} where the first model has {_described(mine)}"
    elif not theirs.is_meta and not torch.equal(theirs, mine):
        found = "whose values differ"
    else:
        return
    raise ModelError(
        f"models on a shared base must start from the same frozen weights; got {name} of model "
        f"{number}, {found}. Leave --shared-base off, or start them from one model."
    )


def _described(weight: nn.Parameter) -> str:
    return f"{tuple(weight.shape)} {weight.dtype} on {weight.device}"
