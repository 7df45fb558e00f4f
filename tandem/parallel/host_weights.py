"""Frozen weights kept in host memory and copied to the device block by block for a forward.

The order of fetching, using and dropping is tested with a stand-in for the copy to a device; the
CUDA calls themselves (`_streamed`, pinned memory) have not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tandem.errors import ModelError

Waiting = Callable[[], object]
ToDevice = Callable[[Sequence[Tensor]], tuple[list[Tensor], Waiting]]
"""Starts copying tensors to the device; the second result makes later work wait for them."""


class HostWeights:
    """A frozen model whose weights stay on the host and are on the device only while used.

    Entries of the modules' own tables are replaced in place, so that a twin, which shares the
    tables, sees the same. Tied weights stay one tensor. Where the device is the host, nothing is
    copied.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        device: torch.device,
        *,
        to_device: ToDevice | None = None,
    ) -> None:
        """Move the model to the host, pinned where it is for a GPU.

        Args:
            blocks: modules of `model` in the order of its forward, one on the device at a time.
            to_device: how tensors are copied to the device; None chooses by `device`.
        Raises:
            ModelError: a weight of the model is trained.
        """
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        if trained:
            raise ModelError(
                f"weights that rest on the host must be frozen; got {len(trained)} trained ones, "
                f"{trained[0]} first. Offload the optimizer of a model that is trained."
            )
        self._copies = to_device is not None or device.type == "cuda"  # else the host computes
        self._to_device = to_device or partial(_streamed, device)
        self._blocks = list(blocks)
        inside = {id(module) for block in blocks for module in block.modules()}
        rest = [module for module in model.modules() if id(module) not in inside]
        self._places = [_places(block.modules()) for block in blocks] + [_places(rest)]
        self._coming: dict[int, tuple[dict[int, Tensor], Waiting]] = {}
        for _, _, host in (place for places in self._places for place in places):
            if device.type == "cuda" and not host.is_pinned():
                host.data = host.data.cpu().pin_memory()

    @contextmanager
    def onload(self, *runs: Sequence[nn.Module]) -> Iterator[None]:
        """Within: a forward without gradient finds each block's weights on the device, the next
        block's being copied, and those outside the blocks always there. After: none of them.

        Args:
            runs: lists of blocks whose forwards run, in the order of the model's own: its twin's,
                say. Without any, the model's own.
        """
        if not self._copies:
            yield
            return
        handles = [
            handle
            for blocks in runs or (self._blocks,)
            for number, block in enumerate(blocks)
            for handle in (
                block.register_forward_pre_hook(partial(self._enter, number)),
                block.register_forward_hook(partial(self._drop, number)),
            )
        ]
        rest = len(self._blocks)
        try:
            self._fetch(rest)
            self._install(rest)
            self._fetch(0)
            yield
        finally:
            for handle in handles:
                handle.remove()
            for number in list(self._coming):
                self._drop(number)

    def _enter(self, number: int, *_: object) -> None:
        if torch.is_grad_enabled():
            raise ModelError(
                "weights that rest on the host must run without gradient; got a forward with it. "
                "Use torch.no_grad()."
            )
        for other in set(self._coming) - {number, len(self._blocks)}:
            self._drop(other)  # blocks ran in another order than given
        self._fetch(number)
        self._install(number)
        self._fetch(number + 1)

    def _fetch(self, number: int) -> None:
        if number not in self._coming and number < len(self._places):
            hosts = list({id(host): host for _, _, host in self._places[number]}.values())
            copies, ready = self._to_device(hosts)
            for i, host in enumerate(hosts):
                if isinstance(host, nn.Parameter):
                    copies[i] = nn.Parameter(copies[i], requires_grad=False)
            self._coming[number] = dict(zip(map(id, hosts), copies, strict=True)), ready

    def _install(self, number: int) -> None:
        here, ready = self._coming[number]
        ready()
        for table, name, host in self._places[number]:
            table[name] = here[id(host)]

    def _drop(self, number: int, *_: object) -> None:
        # A copy must have ended before its memory is reused.
        self._coming.pop(number)[1]()
        for table, name, host in self._places[number]:
            table[name] = host


def _places(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Tensor]]:
    """The tables that modules keep tensors in, the names there, and the tensors."""
    return [
        (table, name, tensor)
        for module in modules
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]


def _streamed(device: torch.device, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Waiting]:
    """Copy pinned tensors to a GPU beside its computation."""
    # Memory of the computing stream, which waits for the copy: given back in that stream's order.
    here = [torch.empty_like(tensor, device=device) for tensor in tensors]
    computing, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(computing)
    with torch.cuda.stream(stream):
        for target, source in zip(here, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        event = stream.record_event()
    return here, partial(computing.wait_event, event)
