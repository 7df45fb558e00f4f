"""An optimizer on the host, for weights on the device: ZeRO-Offload (arXiv:2101.06840).

The copies beside a GPU's computation are tested with a stand-in that delays them; the CUDA calls
themselves (`StreamLane._begin`, pinned memory) have not run on a GPU.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.errors import CheckpointError, ModelError
from tandem.parallel.pieces import local
from tandem.parallel.scaling import Reduce

Waiting = Callable[[], object]


class Lane:
    """Copies between host and device, one way and in order; here both are the host."""

    def down(self, source: Tensor, arrive: Callable[[Tensor], object]) -> None:
        """Call `arrive` with a host copy of `source`, at the latest in `land`."""
        arrive(source)

    def up(self, target: Tensor, source: Tensor) -> None:
        """Copy a host tensor, cast there, into `target` by `land`; it may change at once."""
        target.copy_(source)

    def land(self) -> None:
        """Wait on the host until everything has arrived."""


class StreamLane(Lane):
    """Copies on a stream beside a GPU's computation, through pinned buffers of bounded size."""

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        """At most `max_bytes` stay under way."""
        self._device, self._max_bytes, self._bytes = device, max_bytes, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Both ends are held until the copy is over: neither may be given out again before.
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
        """Begin to copy after what the computation has queued; the result waits on the host."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event().synchronize


class _Slice(NamedTuple):
    """Some elements of one parameter's piece, seen flat."""

    entry: _Entry
    where: slice
    master: Tensor
    step: Tensor


class _Entry(Mapping[str, Tensor]):
    """What the host keeps of one parameter; as a mapping, its state to save, split as it is."""

    def __init__(self, parameter: nn.Parameter) -> None:
        if not local(parameter).is_contiguous():
            raise ModelError(
                "weights must be contiguous for an optimizer on the host; got strides "
                f"{parameter.stride()}. Use no --offload optimizer."
            )
        self.parameter = parameter
        # Made from the parameter, so that a split one's state is split likewise, on the host.
        self.tensors = {
            name: torch.zeros_like(parameter.detach(), dtype=torch.float32, device="cpu")
            for name in ("exp_avg", "exp_avg_sq", "master")
        }
        self.gradient = torch.empty_like(local(self.tensors["master"]))
        self.has_gradient = False
        self.slices: list[_Slice] = []

    def __getitem__(self, name: str) -> Tensor:
        return self.slices[0].step if name == "step" else self.tensors[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        own = local(value)
        if name not in self or own.shape != local(self[name]).shape:
            raise CheckpointError(
                f"AdamW's state must be step, exp_avg, exp_avg_sq or master, shaped as its weight; "
                f"got {name} of shape {tuple(value.shape)}. Use another checkpoint."
            )
        for target in [s.step for s in self.slices] if name == "step" else [local(self[name])]:
            target.copy_(own)

    def __iter__(self) -> Iterator[str]:
        return iter(("step", *self.tensors))

    def __len__(self) -> int:
        return 1 + len(self.tensors)


class HostAdamW:
    """AdamW whose masters, moments and arithmetic are on the host; the device keeps the weights.

    One process's float32 weights become those of torch.optim.AdamW(fused=True), bit for bit; bf16
    or fp16 weights are what the float32 masters round to. A step runs bucket by bucket: while one
    is computed, the weights of the one before travel up.

    Plain weights' gradients travel down during backward, as each is done; they are added up on
    the host in float32, and none stays on the device. Those of split weights (FSDP2), a rank's
    share only, are read in `collect`: in a hook torch 2.11 may hand them out too early.

    Host memory: 16 bytes per weight (master, two moments, gradient). Only the travelling buffers
    are pinned: locking all of it would take it from everything else on the machine.

    Attributes:
        param_groups: as torch's; `lr` and `weight_decay` are read at every step.
        state: per parameter `step`, `exp_avg`, `exp_avg_sq`, `master`, float32 on the host, split
            as the parameter is; setting one copies into it.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        *,
        betas: tuple[float, float],
        stream: bool,
        eps: float = 1e-8,
        bucket_bytes: int = 2**26,
        lane: Callable[[torch.device, int], Lane] | None = None,
    ) -> None:
        """The masters start from what the weights are now; casting the model comes after.

        Args:
            groups: `params`, `lr`, `weight_decay` and what else the caller keeps there.
            stream: take plain weights' gradients during backward. False where something must be
                done with them on the device first, as summing them over ranks (ZeRO stage 0).
            bucket_bytes: float32 bytes of one bucket, and what may travel at a time each way.
            lane: makes what copies; None picks by the device.
        Raises:
            ModelError: a weight is not contiguous.
        """
        self.param_groups: list[dict[str, Any]] = [dict(group) for group in groups]
        entries = [_Entry(p) for group in self.param_groups for p in group["params"]]
        self.state: dict[nn.Parameter, _Entry] = {entry.parameter: entry for entry in entries}
        device = local(entries[0].parameter).device if entries else torch.device("cpu")
        make = lane or (StreamLane if device.type == "cuda" else lambda *_: Lane())
        self._down, self._up = make(device, bucket_bytes), make(device, bucket_bytes)
        self.read_weights()
        # Multiples of a cache line: the kernel rounds the same elements as over the whole.
        size = max(1, bucket_bytes // 4096) * 1024
        self._buckets = [
            (group, slices, _fused(slices, betas, eps))
            for group in self.param_groups
            for slices in _bucketed([self.state[p] for p in group["params"]], size)
        ]
        for parameter in [p for p in self.state if stream and not isinstance(p, DTensor)]:
            parameter.register_post_accumulate_grad_hook(partial(_taken, weakref.ref(self)))

    @torch.no_grad()
    def read_weights(self) -> None:
        """Set the masters to what the weights are now, after others changed these."""
        for entry in self.state.values():
            local(entry.tensors["master"]).copy_(local(entry.parameter))

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> None:
        """Send a gradient down, add it to what is there, and leave none on the device."""
        entry = self.state[parameter]
        add = Tensor.add_ if entry.has_gradient else Tensor.copy_
        assert parameter.grad is not None
        source, target = local(parameter.grad).reshape(-1), entry.gradient.view(-1)
        for s in entry.slices:
            self._down.down(source[s.where], partial(add, target[s.where]))
        entry.has_gradient = True
        parameter.grad = None

    def collect(self) -> list[Tensor]:
        """All gradients, this rank's pieces, float32 on the host; `step` uses these very tensors.

        Parameters without one are left out. The device holds none afterwards.
        """
        for parameter in [p for p in self.state if p.grad is not None]:
            self.take(parameter)
        self._down.land()
        return [entry.gradient for entry in self.state.values() if entry.has_gradient]

    @torch.no_grad()
    def clip_(self, max_norm: float, reduce: Reduce | None = None) -> float:
        """Scale finite gradients of a larger norm down to `max_norm`, as torch's clip_grad_norm_.

        Args:
            reduce: adds a float64 scalar over the ranks in place, where weights are split; every
                rank must then call this. None where gradients are whole.
        Returns:
            the norm before, the same number on every rank.
        """
        gradients = self.collect()
        if reduce is None:
            norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        else:
            norms = torch._foreach_norm([g for g in gradients if g.numel()] or [torch.zeros(1)])
            total = torch.stack(norms).double().square().sum()
            reduce(total)
            norm = math.sqrt(float(total))
        scale = max_norm / (norm + 1e-6)
        if scale < 1.0 and math.isfinite(norm):
            torch._foreach_mul_(gradients, scale)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Update masters and weights with the gradients collected; a weight without one stays."""
        self.collect()
        for group, slices, optimizer in self._buckets:
            moving = [s for s in slices if s.entry.has_gradient]
            for s in moving:
                s.master.grad = s.entry.gradient.view(-1)[s.where]
            optimizer.param_groups[0].update(lr=group["lr"], weight_decay=group["weight_decay"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for s in moving:
                self._up.up(local(s.entry.parameter).detach().view(-1)[s.where], s.master)
        self._up.land()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, on the device and on the host; `set_to_none` is always so."""
        for parameter, entry in self.state.items():
            parameter.grad = None
            entry.has_gradient = False


def _taken(held: weakref.ref[HostAdamW], parameter: nn.Parameter) -> None:
    """Give a gradient to the optimizer, as long as there is one."""
    if (optimizer := held()) is not None:
        optimizer.take(parameter)


def _bucketed(entries: Iterable[_Entry], size: int) -> Iterator[list[_Slice]]:
    """Cut every entry into slices of at most `size` elements, and put them into such buckets."""
    bucket: list[_Slice] = []
    filled = 0
    for entry in entries:
        master = local(entry["master"]).view(-1)
        # A rank whose piece is empty counts its steps too.
        for begin in range(0, max(1, master.numel()), size):
            end = min(begin + size, master.numel())
            if filled + end - begin > size:
                yield bucket
                bucket, filled = [], 0
            where = slice(begin, end)
            bucket.append(_Slice(entry, where, master[where], torch.zeros(())))
            entry.slices.append(bucket[-1])
            filled += end - begin
    if bucket:
        yield bucket


def _fused(slices: list[_Slice], betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    """torch's AdamW over slices of masters, its state being slices of ours."""
    optimizer = torch.optim.AdamW([s.master for s in slices], betas=betas, eps=eps, fused=True)
    for s in slices:
        optimizer.state[s.master]["step"] = s.step
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[s.master][name] = local(s.entry[name]).view(-1)[s.where]
    return optimizer
