"""Ranks with a simulated GPU each: what NCCL would send goes by gloo, from the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simulated_gpu.cuda import CUDAGraph

NAME = "simulated"
# torch's names for what a group does, newer ones too, and gloo's for the same.
_BY_GLOO = {
    **{name: name for name in (
        "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allreduce",
        "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather",
        "recv", "recv_anysource", "reduce", "reduce_scatter", "scatter", "send")},
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}  # fmt: skip
_SEVERAL_BY_GLOO = {
    "all_gather_single_coalesced": "_allgather_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}


class HostGroup(dist.ProcessGroup):
    """Collectives over tensors of the device and of the host."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._over = dist.ProcessGroupGloo(store, rank, size, timeout)

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802, torch calls it
        return NAME


def _collective(name: str) -> Any:
    def call(group: HostGroup, *args: Any, **kwargs: Any) -> Any:
        moved = {key: _on_host(value) for key, value in kwargs.items()}
        values = [_on_host(value) for value in args]
        return _done(lambda: getattr(group._over, name)(*values, **moved))

    return call


def _each(name: str) -> Any:
    def call(group: HostGroup, outputs: Any, inputs: Any, *options: Any) -> Any:
        pairs = [(_on_host(to), _on_host(of)) for to, of in zip(outputs, inputs, strict=True)]

        def work() -> Any:
            begun = [getattr(group._over, name)(*pair, *options) for pair in pairs]
            for earlier in begun[:-1]:
                earlier.wait()
            return begun[-1]

        return _done(work)

    return call


def _done(work: Callable[[], Any]) -> Any:
    """Do it, and again when a graph that is being recorded is replayed."""
    if CUDAGraph.recording is not None:
        CUDAGraph.recording.launched(lambda: work().wait())
    return work()


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_cuda:
        return torch.ops.simulated_gpu.on_host(value.detach())
    if isinstance(value, list | tuple):
        return [_on_host(item) for item in value]
    return value


def install() -> None:
    """From now on groups of GPUs are these."""
    for name, of_gloo in _BY_GLOO.items():
        setattr(HostGroup, name, _collective(of_gloo))
    for name, of_gloo in _SEVERAL_BY_GLOO.items():
        setattr(HostGroup, name, _each(of_gloo))
    dist.Backend.register_backend(NAME, HostGroup, devices=["cpu", "cuda"])
    begin: Any = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        begin(NAME if backend and "nccl" in backend else backend, *args, **kwargs)

    patched: Any = dist
    patched.init_process_group = init_process_group
