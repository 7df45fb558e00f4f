"""Weights in autocast's type, cast once for as long as a session lasts and not once per token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


class CastWeights:
    """Copies of what a twin's linear layers read, in autocast's type.

    Autocast makes the same numbers of the same weights at every call. What it leaves in float32
    (norms, embeddings) is not copied, nor are weights that are kept as integers. The copies are of
    the weights as they are now.

    Attributes:
        copies: whether there are any: a model that is in this type already needs none.
    """

    def __init__(self, twin: PreTrainedModel, dtype: torch.dtype) -> None:
        """The twin reads its own weights still, but within `in_place`."""
        self._layers: list[tuple[nn.Module, dict[str, Any]]] = []
        casts: dict[nn.Parameter, nn.Parameter] = {}  # a weight may belong to several layers
        for module in twin.modules():
            if not isinstance(module, nn.Linear | Conv1D):
                continue
            own = module._parameters
            if own.get("weight") is None or not module.weight.is_floating_point():
                continue
            for name in ("weight", "bias"):
                parameter = own.get(name)
                if parameter is not None and parameter not in casts:
                    casts[parameter] = _cast(parameter, dtype)
            table = {
                name: parameter if parameter is None else casts.get(parameter, parameter)
                for name, parameter in own.items()
            }
            self._layers.append((module, table))
        self.copies = any(own is not cast for own, cast in casts.items())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within: the twin's linear layers read the copies. The model itself never does."""
        # A twin's table of parameters is its original's own dict: it is exchanged, not changed.
        own = [module.__dict__["_parameters"] for module, _ in self._layers]
        for module, table in self._layers:
            module.__dict__["_parameters"] = table
        try:
            yield
        finally:
            for (module, _), table in zip(self._layers, own, strict=True):
                module.__dict__["_parameters"] = table


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if parameter.dtype == dtype:
        return parameter
    return nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
