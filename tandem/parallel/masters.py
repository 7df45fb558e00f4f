"""Float32 masters of weights in the compute type, and the AdamW that updates them.

Mixed precision (arXiv:1710.03740): the model computes with bf16 or fp16 weights that stay at their
addresses; the optimizer keeps float32 masters, sums gradients in float32, and writes rounded
weights back in place. The masters may be on the host: ZeRO-Offload (arXiv:2101.06840).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from tandem.config.parallel import OptimizerStates
from tandem.ops import gpu
from tandem.parallel.dtensor import local
from tandem.parallel.lanes import Lane, StreamLane
from tandem.parallel.master_entries import Entry, Slice, bucketed
from tandem.parallel.moments import MOMENTS

AddUp = Callable[[Sequence[Tensor | None], Sequence[Tensor]], list[Tensor | None]]

_hooks = WeakTensorKeyDictionary()
"""Of weights whose gradients an optimizer takes: its hook, and it."""
_MASTERS = "tandem_masters"
"""Where a model keeps its masters until an optimizer takes them."""


@torch.no_grad()
def cast_weights(model: nn.Module, dtype: torch.dtype, *, splits: bool = False) -> None:
    """Cast a model's weights to the compute type, in place.

    Float32 values of trained weights are kept for the optimizer (`take_masters`). Integers and
    buffers are not cast, nor trained weights that have no memory yet.

    Args:
        splits: the model will be split over the ranks. Trained pieces are their own masters and
            stay float32; they are cast whenever they are gathered.
    """
    masters: dict[nn.Parameter, Tensor] = model.__dict__.setdefault(_MASTERS, {})
    for parameter in model.parameters():
        if not parameter.is_floating_point() or isinstance(parameter, DTensor):
            continue
        if not parameter.requires_grad:
            wanted = dtype
        elif parameter.is_meta:
            continue
        elif splits:
            wanted = torch.float32
        else:
            wanted = dtype
            if parameter.dtype != dtype and dtype != torch.float32:
                masters[parameter] = parameter.data.float()
        if parameter.dtype != wanted:
            parameter.data = parameter.data.to(wanted)


def take_masters(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """The float32 values that `cast_weights` rounded; the model drops them."""
    taken: dict[nn.Parameter, Tensor] = model.__dict__.pop(_MASTERS, {})
    return taken


def release(parameters: Iterable[nn.Parameter]) -> None:
    """Let an optimizer that was made of weights before take no more of their gradients: somebody
    may still hold it."""
    for parameter in parameters:
        hook, held = _hooks.pop(parameter, (None, None))
        if hook is None:
            continue
        hook.remove()
        gpu.drop_sum(parameter)
        if (optimizer := held()) is not None:
            optimizer.is_released = True


def is_superseded(optimizer: object, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether gradients of an optimizer's weights have become another's that was made since."""
    if isinstance(optimizer, MasterAdamW):
        return optimizer.is_released
    # Usually there are no hooks at all, and each look-up takes a microsecond.
    return len(_hooks) > 0 and any(p in _hooks and _hooks[p][1]() for p in parameters)


@contextmanager
def exactly(weights: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Within: parameters have these values and types, for saving only; after: their own again, at
    the same addresses.

    Args:
        weights: for plain parameters, on any device.
    """
    own = {parameter: parameter.data for parameter in weights}
    try:
        for parameter, exact in weights.items():
            parameter.data = exact
        yield
    finally:
        for parameter, data in own.items():
            parameter.data = data


class MasterAdamW:
    """AdamW on float32 masters; the model has weights rounded to their own type.

    On one process float32 weights become those of torch.optim.AdamW(fused=True), bit for bit; bf16
    or fp16 weights are the rounded masters, at unchanged addresses. A step runs bucket by bucket:
    with masters on the host, one bucket's weights are copied up while the next is computed, and
    the gradients of the one after are copied down, if their sums are on the device.

    A plain weight's gradient is added to a float32 sum as soon as backward has made it. Gradients
    of split weights (FSDP2), a rank's share only, are read in `collect`: in a hook torch 2.11 may
    return them too early.

    Memory: 12 bytes per weight (master, two moments; less with smaller moments, see `moments`), and
    4 from the first gradient of a step to its end. On the host these 4 stay allocated, and only
    copy buffers are pinned, which leaves the rest of the memory to other programs. Float32 weights
    beside which the moments are kept are their own masters.

    Attributes:
        param_groups: as torch's; `lr` and `weight_decay` are read at every step.
        state: per parameter `step`, `exp_avg`, `exp_avg_sq`, `master`, split as the parameter is,
            and in 8 bits `exp_avg_scale`, `exp_avg_sq_scale`; setting one copies into it.
        is_released: whether gradients of its weights have become another optimizer's (`release`).
    """

    is_released = False

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        *,
        betas: tuple[float, float],
        device: torch.device | None = None,
        masters: Mapping[nn.Parameter, Tensor] | None = None,
        sums_on_device: bool = False,
        host_share: float = 1.0,
        states: OptimizerStates = "fp32",
        bucket_bytes: int = 2**26,
        lane: Callable[[torch.device, int], Lane] | None = None,
    ) -> None:
        """
        Args:
            groups: `params`, `lr`, `weight_decay` and anything else the caller keeps there.
            device: of masters and moments; None: the weights'.
            masters: float32 values that weights were rounded from, not copied; other masters start
                from the weights.
            sums_on_device: sum gradients where the weights are, wherever the masters are, because
                they must then be summed over ranks, or the host has no memory for them.
            host_share: share of the weights whose masters and moments are on `device`, the last
                ones, whose gradients backward makes first; the others' stay beside their weights.
            states: how the moments are kept.
            bucket_bytes: float32 bytes of one bucket, and at most in flight each way.
            lane: makes what copies; None chooses by the devices.
        Raises:
            ModelError: a weight is not contiguous.
        """
        self.param_groups: list[dict[str, Any]] = [dict(group) for group in groups]
        parameters = [p for group in self.param_groups for p in group["params"]]
        here = local(parameters[0]).device if parameters else torch.device("cpu")
        # Weights that the moments are beside are not copied.
        are_masters = device is None
        device = device or here
        masters = masters or {}
        stays = (1.0 - host_share) * sum(local(p).numel() for p in parameters)
        entries: list[Entry] = []
        for i, p in enumerate(parameters):
            travels = are_masters or host_share == 1.0 or stays <= 0
            stays -= local(p).numel()
            own = are_masters or not travels
            where = device if travels else local(p).device
            entries.append(Entry(p, where, masters.get(p), states, i, is_own_master=own))
            entries[-1].travels = travels
        self.state: dict[nn.Parameter, Entry] = {entry.parameter: entry for entry in entries}
        self._is_apart = device.type != here.type
        streams = here.type == "cuda" and self._is_apart
        make = lane or (StreamLane if streams else lambda *_: Lane())
        self._down, self._up = make(here, bucket_bytes), make(here, bucket_bytes)
        self._sums_on_device = sums_on_device
        # Sums of the device travel when the step is taken, one bucket ahead of it.
        self._fetches = sums_on_device and (self._is_apart or lane is not None)
        self._adopts = lane is None and not streams and (sums_on_device or not self._is_apart)
        # Multiples of a cache line, so that the kernel rounds as over the whole.
        size = max(1, bucket_bytes // 4096) * 1024
        # Those of the device first: it computes while the host does.
        self._buckets = [
            (group, slices, _fused(slices, betas))
            for travels in (False, True)
            for group in self.param_groups
            for slices in bucketed(self._of_group(group, travels), size)
        ]
        release(parameters)
        held = weakref.ref(self)
        for parameter, entry in self.state.items():
            if isinstance(parameter, DTensor):
                continue
            hook = parameter.register_post_accumulate_grad_hook(partial(_taken, held))
            _hooks[parameter] = hook, held
            stays = not self._is_apart or sums_on_device or not entry.travels
            if stays and lane is None:
                gpu.keep_sum(parameter, partial(_sum_of, held))

    def _of_group(self, group: Mapping[str, Any], travels: bool) -> list[Entry]:
        entries = [self.state[parameter] for parameter in group["params"]]
        return [entry for entry in entries if entry.travels is travels]

    @property
    def masters(self) -> dict[nn.Parameter, Tensor]:
        """The float32 values of every trained weight."""
        return {parameter: entry.tensors["master"] for parameter, entry in self.state.items()}

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> None:
        """Move a weight's gradient to the float32 sum of those before it."""
        entry = self.state[parameter]
        assert parameter.grad is not None
        whole = local(parameter.grad)
        source = whole.reshape(-1)
        is_sum = whole.dtype == torch.float32 and whole.is_contiguous()
        if (self._adopts or not entry.travels) and is_sum and entry.gradient is None:
            entry.gradient = whole
        elif self._sums_on_device or not entry.travels:
            if entry.gradient is None:
                entry.gradient = source.to(torch.float32, copy=True).view_as(local(parameter))
            else:
                entry.gradient.view(-1).add_(source)
        else:
            self._send_down(entry, source)
        parameter.grad = None

    def _send_down(self, entry: Entry, source: Tensor) -> None:
        add: Callable[[Tensor, Tensor], Tensor] = Tensor.add_
        if entry.gradient is None:
            if entry.spare is None:
                entry.spare = torch.empty_like(local(entry["master"]))
            add, entry.gradient, entry.spare = Tensor.copy_, entry.spare, None
        target = entry.gradient.view(-1)
        for s in entry.slices:
            self._down.down(source[s.where], partial(add, target[s.where]))

    def sum_of(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """The float32 sum of a weight's gradients so far, to be added to, and whether it was made
        just now, where its weight is, to be filled."""
        entry = self.state[parameter]
        is_new = entry.gradient is None
        if entry.gradient is None:
            entry.gradient = torch.empty_like(parameter.detach(), dtype=torch.float32)
        return entry.gradient, is_new

    def collect(self) -> list[Tensor]:
        """This rank's pieces of all gradients that there are, float32, moved from the weights;
        `step` uses these very tensors."""
        for parameter in [p for p in self.state if p.grad is not None]:
            self.take(parameter)
        self._down.land()
        return [entry.gradient for entry in self.state.values() if entry.gradient is not None]

    def collect_sums(self, add_up: AddUp) -> list[Tensor]:
        """As `collect`, of gradients added over the ranks by `Shards.sum_gradients`."""
        self.collect()
        entries = list(self.state.values())
        like = [
            local(entry.parameter.detach() if self._sums_on_device else entry["master"])
            for entry in entries
        ]
        sums = add_up([entry.gradient for entry in entries], like)
        for entry, gradient in zip(entries, sums, strict=True):
            entry.gradient = gradient
        return self.collect()

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Update masters and weights with the collected gradients; a weight without one stays.

        Args:
            scale: what each gradient is multiplied by, bucket by bucket, as a clip does.
        """
        self.collect()
        for bucket, following in zip_longest([None, *self._buckets], self._buckets):
            self._down.land()
            if following is not None:  # its gradients travel while this bucket is computed
                self._fetch(following[1], scale)
            if bucket is not None:
                self._update(*bucket)
        self._up.land()

    def _fetch(self, slices: list[Slice], scale: float) -> None:
        """Give masters their gradients: at once, or once `_down` has landed."""
        for s in slices:
            if s.entry.gradient is None:
                continue
            source = s.entry.gradient.view(-1)[s.where]
            if scale != 1.0:
                source.mul_(scale)
            if self._fetches and s.entry.travels:
                self._down.down(source, partial(setattr, s.master, "grad"))
            else:
                s.master.grad = source

    def _update(
        self, group: Mapping[str, Any], slices: list[Slice], optimizer: torch.optim.AdamW
    ) -> None:
        """AdamW over a bucket whose gradients are there; its weights go up meanwhile."""
        moving = [s for s in slices if s.entry.gradient is not None]
        packed = [s for s in moving if s.entry.kind != "fp32"]
        for s in packed:
            optimizer.state[s.master].update(zip(MOMENTS, s.entry.unpack(s), strict=True))
        optimizer.param_groups[0].update(lr=group["lr"], weight_decay=group["weight_decay"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for s in packed:  # only this bucket's are ever in float32
            s.entry.pack(s, [optimizer.state[s.master].pop(name) for name in MOMENTS])
        for s in moving:
            weights = local(s.entry.parameter).detach().view(-1)[s.where]
            if weights.data_ptr() == s.master.data_ptr():
                continue
            if s.entry.travels:
                self._up.up(weights, s.master)
            else:
                weights.copy_(s.master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; `set_to_none` has no effect."""
        self._down.land()
        for parameter in self.state:
            self.drop(parameter)

    def drop(self, parameter: nn.Parameter) -> None:
        """Drop one weight's gradient, once all have landed."""
        entry = self.state[parameter]
        leaves = self._is_apart and entry.travels and not self._sums_on_device
        if leaves and entry.gradient is not None:
            entry.spare = entry.gradient  # host memory is slow to allocate
        parameter.grad = entry.gradient = None


def _taken(held: weakref.ref[MasterAdamW], parameter: nn.Parameter) -> None:
    """Give a gradient to the optimizer, if it still exists."""
    optimizer = held()
    if optimizer is not None and parameter.grad is not None:  # None: it is in the sum already
        optimizer.take(parameter)


def _sum_of(held: weakref.ref[MasterAdamW], weight: Tensor) -> tuple[Tensor, bool] | None:
    """A weight's sum, if the optimizer still exists."""
    optimizer = held()
    return None if optimizer is None else optimizer.sum_of(cast(nn.Parameter, weight))


def _fused(slices: list[Slice], betas: tuple[float, float]) -> torch.optim.AdamW:
    """torch's AdamW over slices of masters; its state is slices of ours, without packed moments."""
    optimizer = torch.optim.AdamW([s.master for s in slices], betas=betas, fused=True)
    for s in slices:
        state = optimizer.state[s.master]
        state["step"] = s.step
        if s.entry.kind == "fp32":
            state.update(zip(MOMENTS, s.entry.unpack(s), strict=True))
    return optimizer
