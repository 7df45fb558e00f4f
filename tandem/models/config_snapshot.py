"""What a twin has copied by value from its model, compared with the model before every forward.

Parameters and buffers are shared, but numbers and flags (dropout rates, windows, scales) and the
config are copied. Anyone may change them on the model, without telling us.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any
from weakref import ReferenceType, ref

from torch import nn
from transformers import PreTrainedModel

_Read = Callable[[dict[str, Any]], Any]

_PLAIN = (bool, int, float, str, type(None))
# Copied at every forward, or without effect on what a module computes.
_NOT_COMPARED = {"training", "gradient_checkpointing", "name_or_path"}
# Written by saving and loading, or the twin's own to choose.
_BOOKKEEPING = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
                "pad_token_id", "bos_token_id", "eos_token_id"}  # fmt: skip


class Modules:
    """A model's modules and their plain attributes at the time of the copy."""

    def __init__(self, copies: Mapping[nn.Module, nn.Module]) -> None:
        """`copies`: from a model's modules, in the order of `modules()`."""
        self._kind = type(next(iter(copies)))
        self._known: list[tuple[ReferenceType[nn.Module], Any, _Read, Any, Any, Any]] = []
        for module, twin in copies.items():
            state = vars(module)
            read, own_forward = _reader(state), state.get("forward")
            self._known.append(
                (ref(module), _children(state), read, read(state), own_forward, vars(twin))
            )

    def update(self, model: PreTrainedModel) -> bool:
        """Copy the mode (training, checkpointing) into the twin; False if anything else changed.

        Every forward comes through here: it takes less than a microsecond per module.
        """
        # It may have been sharded.
        if type(model) is not self._kind or self._known[0][0]() is not model:
            return False
        for original, children, read, values, own_forward, twin in self._known:
            module = original()
            if module is None:
                return False
            state = module.__dict__
            # An equal id is the same object as long as that lives, which is seen at its own turn:
            # so the tree is the one that `modules()` would walk.
            if _children(state) != children or state.get("forward") is not own_forward:
                return False
            try:
                if read(state) != values:
                    return False
            except KeyError:  # an attribute is gone
                return False
            twin["training"] = state["training"]
            if "gradient_checkpointing" in state:
                twin["gradient_checkpointing"] = state["gradient_checkpointing"]
        return True


def _children(state: dict[str, Any]) -> list[int]:
    """Who the children of a module with this `__dict__` are, by id: no reference keeps them."""
    return list(map(id, state["_modules"].values()))


def steering(model: PreTrainedModel) -> dict[str, Any]:
    """A copy of everything in a model's config that may change what a forward computes."""
    return copy.deepcopy(_steering(model))


def steers_as(model: PreTrainedModel, known: dict[str, Any]) -> bool:
    """Whether the model's config still says what `steering` has copied."""
    return _steering(model) == known


def _steering(model: PreTrainedModel) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(model.config).items()
        if not name.startswith("_") and name not in _BOOKKEEPING
    }


def _reader(state: dict[str, Any]) -> _Read:
    """Reads the plain attributes of a module out of its `__dict__`; KeyError if one is gone."""
    names = [
        name
        for name, value in state.items()
        if isinstance(value, _PLAIN) and not name.startswith("_") and name not in _NOT_COMPARED
    ]
    return itemgetter(*names) if names else lambda state: None
