"""FSDP2 of older torch made to split parameters of integers, as quantized frozen weights are."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param

_MENDED = (2, 13)
"""The first torch that was seen to split them by itself."""


def shard_integers() -> None:
    """Let `fully_shard` split parameters of integers; changes nothing from torch 2.13 on.

    torch 2.11 treats them as parameters of floating point in two places:

    - It makes each piece, and each piece after a forward within a node (`hpz`), by
      `nn.Parameter(piece)` alone, which requires a gradient until the next line takes it back:
      torch refuses that for integers. FSDP2's module gets an `nn` whose `Parameter` asks for no
      gradient of integers; every other module keeps its own.
    - It casts them to `gather_dtype` where there is one, and their bits are lost.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    names = vars(_fsdp_param)
    if version >= _MENDED or names["nn"] is not nn:
        return
    own = types.ModuleType(nn.__name__)
    vars(own).update(vars(nn), Parameter=_parameter)
    names["nn"] = own
    chosen = _fsdp_param.FSDPParam.init_dtype_attrs

    def init_dtype_attrs(self: Any, mp_policy: MixedPrecisionPolicy) -> None:
        chosen(self, mp_policy)
        if not self.orig_dtype.is_floating_point:
            self.param_dtype = None

    _fsdp_param.FSDPParam.init_dtype_attrs = init_dtype_attrs  # type: ignore[method-assign]


def _parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
    can = data.is_floating_point() or data.is_complex()
    return nn.Parameter(data, requires_grad=requires_grad and can)
