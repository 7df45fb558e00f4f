"""What a twin has taken over from its model by value, and so would not see change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_PLAIN = (bool, int, float, str, type(None))
# Followed one by one (`twin`), or of no meaning for what a module computes.
_ELSEWHERE = {"training", "gradient_checkpointing", "name_or_path"}
# Written by saving and loading, or the twin's own to choose.
_BOOKKEEPING = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
                "pad_token_id", "bos_token_id", "eos_token_id"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attributes:
    """Plain attributes (numbers, flags, names) of a module: sizes, scales, rates, windows.

    read: takes them out of the module's `__dict__`; KeyError if one is gone. values: as they were.
    """

    read: Callable[[dict[str, Any]], Any]
    values: Any

    @staticmethod
    def of(module: nn.Module) -> Attributes:
        """As they are now."""
        state = vars(module)
        names = [
            name
            for name, value in state.items()
            if type(value) in _PLAIN and not name.startswith("_") and name not in _ELSEWHERE
        ]
        read = itemgetter(*names) if names else _nothing
        return Attributes(read, read(state))


class Settings:
    """A model's config as it is now."""

    __slots__ = ("_all", "_known")

    def __init__(self, model: PreTrainedModel) -> None:
        """As it is now."""
        self._known = copy.deepcopy(_steering(model))
        self._all = copy.deepcopy(vars(model.config))

    def hold(self, model: PreTrainedModel) -> bool:
        """Whether everything in it that may steer a forward is the same."""
        if vars(model.config) == self._all:
            return True
        if _steering(model) != self._known:
            return False
        self._all = copy.deepcopy(vars(model.config))  # what has changed steers nothing
        return True


def _steering(model: PreTrainedModel) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(model.config).items()
        if not name.startswith("_") and name not in _BOOKKEEPING
    }


def _nothing(state: dict[str, Any]) -> None:
    return None
