"""Copies between host and device that overlap with the computation.

They are tested with a stand-in that delays them; the CUDA calls themselves (`StreamLane._begin`,
pinned memory) have not run on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Waiting = Callable[[], object]


class Lane:
    """Copies in order, one way, between host and device; in this class both are the host."""

    def down(self, source: Tensor, arrive: Callable[[Tensor], object]) -> None:
        """Call `arrive` with a host copy of `source`, in `land` at the latest."""
        arrive(source)

    def up(self, target: Tensor, source: Tensor) -> None:
        """Cast a host tensor and copy it into `target`, in `land` at the latest; `source` may
        change at once."""
        target.copy_(source)

    def land(self) -> None:
        """Wait on the host until every copy has ended."""


class StreamLane(Lane):
    """Copies on a stream beside a GPU's computation, through pinned buffers of bounded size."""

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        """At most `max_bytes` are in flight."""
        self._device, self._max_bytes, self._bytes = device, max_bytes, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Both ends are held until the copy ends: neither may be allocated again before.
        self._under_way: deque[tuple[Waiting, Waiting, tuple[Tensor, Tensor]]] = deque()

    def down(self, source: Tensor, arrive: Callable[[Tensor], object]) -> None:
        buffer = self._buffer(source, source.dtype)
        self._send(buffer, source, partial(arrive, buffer))

    def up(self, target: Tensor, source: Tensor) -> None:
        self._send(target, self._buffer(source, target.dtype).copy_(source), lambda: None)

    def land(self) -> None:
        self._land_beyond(-1)

    def _buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(like.shape, dtype=dtype, pin_memory=self._device.type == "cuda")

    def _send(self, target: Tensor, source: Tensor, arrived: Waiting) -> None:
        self._under_way.append((self._begin(target, source), arrived, (target, source)))
        self._bytes += target.nbytes
        self._land_beyond(self._max_bytes)

    def _land_beyond(self, num_bytes: int) -> None:
        while self._under_way and self._bytes > num_bytes:
            wait, arrived, (target, _) = self._under_way.popleft()
            wait()
            arrived()
            self._bytes -= target.nbytes

    def _begin(self, target: Tensor, source: Tensor) -> Waiting:
        """Copy after the work that is queued now; the result waits on the host."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event().synchronize
