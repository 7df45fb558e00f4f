"""Which linear layers of a twin our C++ computes, from any form of weight, adapters included.

Scoring, training (`cpu_blocks`) and decoding (`generation.native_runner`) ask the same question.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.models.lora import LoraLinear
from tandem.models.stored import StoredWeight
from tandem.models.twin_layers import TwinAdaptedLinear, TwinFrozenLinear, TwinLinear

_LAYERS = (TwinLinear, TwinFrozenLinear, TwinAdaptedLinear)


def is_computed(module: Any, dtype: torch.dtype) -> bool:
    """Whether x W + b, and the adapter that acts now, are all that a linear layer computes, in
    `dtype`."""
    if type(module) not in _LAYERS or has_its_own(module):
        return False
    weight, bias = module.weight, module.bias
    if isinstance(weight, StoredWeight):
        split = any(isinstance(part, DTensor) for part in weight.parameters())
        if split or has_its_own(weight):
            return False
    elif not isinstance(weight, Tensor) or weight.dtype != dtype:
        return False
    if bias is not None and bias.dtype != dtype:
        return False
    return not isinstance(module, LoraLinear) or _adapter_is_computed(module, dtype)


def has_its_own(module: Any) -> bool:
    """Whether a module computes more than its class says."""
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _adapter_is_computed(layer: LoraLinear, dtype: torch.dtype) -> bool:
    acting, drops = layer.acting(), layer.lora_dropout
    if acting is None:
        return True
    if layer.switch.on and (
        type(drops) is not nn.Dropout or has_its_own(drops) or (drops.p > 0 and drops.training)
    ):
        return False
    return all(
        type(part) in (nn.Linear, TwinLinear)
        and not has_its_own(part)
        and part.bias is None
        and part.weight.dtype == dtype
        for part in acting
    )
