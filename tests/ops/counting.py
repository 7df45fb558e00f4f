"""Counting a GPU's kernels and the memory kept for a backward, on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.models import recompute
from tandem.ops import attention_context, gpu

_FREE = {
    "aten.view", "aten._unsafe_view", "aten.unsqueeze", "aten.squeeze", "aten.t", "aten.transpose",
    "aten.expand", "aten.slice", "aten.select", "aten.split", "aten.split_with_sizes",
    "aten.as_strided", "aten.detach", "aten.alias", "aten.empty", "aten.empty_like",
    "aten.new_empty", "aten.unbind", "aten.permute", "aten.reshape", "aten.empty_strided",
    "aten.new_empty_strided",
}  # fmt: skip
_KERNELS = {
    "tandem.paged_attention_by_address": 2, "tandem.sample_gpu": 2,
    "tandem.varlen_attention_backward_gpu": 2,
}  # fmt: skip
"""Operations of ours that launch more than one kernel."""


class Launches(TorchDispatchMode):
    """Within: every operation that would launch a kernel, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(operation).rsplit(".", 1)[0]
        if name not in _FREE:
            self.seen[name] += _KERNELS.get(name, 1)
        if operation is torch.ops.aten.addmm.dtype_out:  # torch 2.11 has no shape function for it
            return (kwargs or {})["out"]
        return operation(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.seen.values())


def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the meta device for a GPU that runs our kernels."""
    monkeypatch.setattr(gpu, "fuses", lambda x: x.device.type == "meta")
    monkeypatch.setattr(attention_context, "_device_of", lambda step: torch.device("cpu"))


@contextmanager
def kept() -> Iterator[dict[int, int]]:
    """Within: bytes of each storage that a graph keeps, parameters left out, by its number."""
    storages: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if not (tensor.is_leaf and tensor.requires_grad):
            alive.append(tensor)
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        return tensor

    def checkpoint(function: Any, *inputs: Any, **keywords: Any) -> Any:
        """What a checkpoint holds is not saved in the graph."""
        for value in (*inputs, *keywords.values()):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, Tensor):
                    keep(tensor)
        return original(function, *inputs, **keywords)

    original = recompute.checkpoint
    recompute.checkpoint = checkpoint
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield storages
    finally:
        recompute.checkpoint = original
