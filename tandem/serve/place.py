"""Where a model that answers is put, and in what type it computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.devices import DTYPES, resolve_device, resolve_dtype
from tandem.models.checkpoint_ref import checkpoint_ref_of
from tandem.models.frozen import freeze_quantized
from tandem.models.load import open_decoder
from tandem.ops import native


@dataclass(frozen=True, slots=True)
class Place:
    """Device and type of models.

    dtype: None takes what fits each model (`dtype_of`). weights: the kind of `models.quantized` to
    which a model that answers is quantized; empty: its weights stay floats.
    """

    device: torch.device
    dtype: torch.dtype | None
    weights: str = ""

    @staticmethod
    def of(device: str, dtype: str, weights: str = "") -> Place:
        """What the values of --device, --dtype and --weights mean on this machine.

        Raises:
            ModelError: a GPU was asked for and is not there.
        """
        chosen = None if dtype == "auto" else DTYPES[dtype]
        return Place(resolve_device(device), chosen, weights)

    def for_run(self, dtype: str) -> Place:
        """With the type in which a run of this `dtype` trains on the device, unless another was
        asked for: rewards and KL are compared with those of its training."""
        return self if self.dtype else replace(self, dtype=resolve_dtype(dtype, self.device))

    def dtype_of(self, path: str | Path, *, trust_remote_code: bool = False) -> torch.dtype:
        """The type that was asked for, or else: bf16 on a GPU, and on a CPU for a model that is
        saved in it, where our operations compute: it takes half the memory of fp32, and half the
        time to read. fp32 for all others.

        Raises:
            ModelError: there is no model at `path`, or none that answers.
        """
        if self.dtype is not None:
            return self.dtype
        if self.device.type == "cuda":
            return torch.bfloat16
        if not native.available():
            return torch.float32
        saved = open_decoder(path, trust_remote_code=trust_remote_code).config.dtype
        return torch.bfloat16 if saved == torch.bfloat16 else torch.float32


def read_from(path: str, weights: str) -> str:
    """What a policy is loaded from: `path`, or where it is quantized and merged weights have their
    adapter beside them, that adapter, whose base alone is quantized.

    Raises:
        ModelError: there is no such model, or not the base that its adapter names.
    """
    if not weights:
        return path
    start = checkpoint_ref_of(path, unmerged=True)
    return start.adapter or start.base


@torch.no_grad()
def put(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, weights: str = ""
) -> None:
    """Move a model there and cast its weights, in eval mode and frozen, in place; those of linear
    layers are quantized if `weights` names a kind.

    Weights are cast and quantized before they move, so that the device never holds another type.
    Buffers keep theirs, as in training: frequencies of rotary positions in bfloat16 would put
    distant tokens elsewhere.

    Raises:
        ModelError: the model has no linear layer to quantize.
        NumericsError: a weight to quantize is not finite.
    """
    module: nn.Module = model.eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    if weights:
        freeze_quantized(model, weights)
    module.to(device)
