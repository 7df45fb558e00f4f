"""One model over many ranks: ZeRO's stages on FSDP2 (arXiv:1910.02054).

stage 0   whole weights everywhere; gradients are summed once per step
stage 1   optimizer states and weights are in pieces between steps; weights are gathered and
          gradients reduced once per step
stage 2   as 1, and gradients are reduced, and kept in pieces, after every micro-batch
stage 3   as 2, and a block's weights are gathered when it runs and freed after

A model is split block by block in place: every rank has one piece of each parameter. Forwards go
through `Shards.forward`, or run inside `Shards.gathered`, where all weights are whole and no hook
is needed. On one rank nothing is wrapped.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from tandem.parallel.integers import shard_integers
from tandem.parallel.unused import WholeReductions, keep_in_graph
from tandem.parallel.world import World, while_joined
from tandem.parallel.zeropp import QuantizedTraffic

Result = TypeVar("Result")

SHARDS = "tandem_shards"
"""Where a model keeps its `Shards`."""
SHARDED_CALL = "sharded_call"
"""The method of a split model that runs any function under its forward hooks."""

_BUCKET_ELEMENTS = 2**23
"""Gradient elements per all-reduce at stage 0: 32 MiB in float32."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How one model is split over the ranks.

    stage: ZeRO stage, 0 to 3; from 1 on a model is split, on one rank too.
    gather_dtype: type of gathered weights; None: that of the pieces.
    hpz: keep a second copy in pieces within each node from forward to backward (ZeRO++), so that
        the backward gathers inside it. For stage 3.
    offload_params: the pieces are in host memory and are copied to the device block by block.
    quantized_weights: weights are gathered as int8 (ZeRO++); the pieces stay exact. For stages 1
        to 3.
    gradient_bits: gradients are sent between nodes in 8 or 4 bits, inside a node in 8 (ZeRO++);
        0: exactly. For stages 1 to 3.
    replicas: copies of the pieces, each over ranks / replicas; gradients are summed over the copies
        (HSDP, arXiv:2304.11277).
    """

    stage: int = 0
    gather_dtype: torch.dtype | None = None
    hpz: bool = False
    offload_params: bool = False
    quantized_weights: bool = False
    gradient_bits: int = 0
    replicas: int = 1


class Shards:
    """A model split over the ranks, or whole, and the operations that depend on which."""

    def __init__(self, model: nn.Module, plan: ShardPlan, world: World) -> None:
        """Made by `shard`, after a model is split.

        Raises:
            ConfigError: nodes of unequal size where gradients are quantized.
        """
        self.plan = plan
        self.world = world
        named = {
            name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)
        }
        self.units = list(named.values())
        self._reductions: WholeReductions | None = None
        if named and world.size > 1:
            self._reductions = WholeReductions(self.units)
        self.quantized: QuantizedTraffic | None = None
        """What is sent in few bits; None if nothing is."""
        if named and world.size > 1 and (plan.quantized_weights or plan.gradient_bits):
            self.quantized = QuantizedTraffic(
                named, world, weights=plan.quantized_weights, gradient_bits=plan.gradient_bits
            )
        self._call = getattr(model, SHARDED_CALL, None)

    @property
    def is_split(self) -> bool:
        """Whether weights are in pieces."""
        return bool(self.units)

    def forward(self, function: Callable[[], Result]) -> Result:
        """Run `function`, which computes with the model, as its forward. All ranks call it equally
        often."""
        return function() if self._call is None else self._call(function)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within: every weight is whole on every rank, by one collective per block.

        The modules then have plain parameters, in `gather_dtype`, with the bits that a training
        forward computes with. No rank waits for another inside.
        """
        if not self.units:
            yield
            return
        self.reshard()
        with torch.no_grad():
            self.forward(lambda: None)  # the first call sets up the streams
        handles = [unit.unshard(async_op=True) for unit in self.units]
        for handle in handles:
            if handle is not None:
                handle.wait()
        try:
            yield
        finally:
            self.reshard()

    def reshard(self) -> None:
        """Free gathered weights: the model's parameters are pieces again."""
        for unit in self.units:
            unit.reshard()

    def before_backward(self, *, last: bool) -> None:
        """Prepare for a backward, the last of its optimizer step or not."""
        if not self.units:
            return
        for unit in self.units:
            if self.plan.stage == 1:
                unit.set_requires_gradient_sync(last, recurse=False)
            elif self.plan.replicas > 1:  # copies are summed once per step
                unit.set_requires_all_reduce(last, recurse=False)
            if self.plan.stage < 3:
                unit.set_reshard_after_backward(last, recurse=False)
            unit.set_is_last_backward(last)

    def finish_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the last backward: free gathered weights; sum gradients at stage 0."""
        self.reshard()
        if self.sums_gradients:
            sums = self.sum_gradients([parameter.grad for parameter in parameters], parameters)
            for parameter, gradient in zip(parameters, sums, strict=True):
                parameter.grad = gradient

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are still each rank's own after the last backward (stage 0)."""
        return self.world.size > 1 and not self.units

    @torch.no_grad()
    def sum_gradients(
        self, gradients: Sequence[Tensor | None], like: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Add whole gradients over the ranks, in place and in buckets; all ranks call it.

        A rank without one adds -0.0, which a sum keeps only where every rank added it: what no
        rank has a gradient of has none afterwards, and AdamW leaves it as it is.

        Args:
            gradients: float32.
            like: where a gradient that only others have is made, and of what shape.
        """
        some = [g[(0,) * g.dim()] for g in gradients if g is not None and g.numel()]
        if some:
            torch._foreach_add_(some, 0.0)  # makes 0.0 of -0.0
        sums = [
            torch.full_like(other, -0.0, dtype=torch.float32) if gradient is None else gradient
            for gradient, other in zip(gradients, like, strict=True)
        ]
        bucket: list[Tensor] = []
        size = 0
        for part in sums:
            bucket.append(part)
            size += part.numel()
            if size >= _BUCKET_ELEMENTS:
                _sum_bucket(bucket)
                bucket, size = [], 0
        _sum_bucket(bucket)
        return [
            None if gradient is None and _is_nothing(part) else part
            for gradient, part in zip(gradients, sums, strict=True)
        ]

    def restart_feedback(self) -> None:
        """Begin the error feedback of quantized gradients again from zero."""
        if self.quantized is not None:
            self.quantized.restore({})

    def forget_gradients(self) -> None:
        """Forget which gradients this rank has made, once they are dropped."""
        if self._reductions is not None:
            self._reductions.forget()

    def gradient_norm(self, gradients: Sequence[Tensor]) -> tuple[float, list[nn.Parameter]]:
        """Euclidean norm of the whole gradient, from this rank's pieces, and the weights of
        which no rank made a gradient; the same on every rank, by one collective.

        Raises:
            ModelError: as `WholeReductions.require_run`.
        """
        if self._reductions is None:
            return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0, []
        # Squares, and of each weight the ranks that made a gradient.
        total = torch.tensor(
            [0.0, *self._reductions.has_own], device=self.world.device, dtype=torch.float64
        )
        if pieces := [g for g in gradients if g.numel()]:  # a rank may have none
            norms = torch._foreach_norm(pieces, dtype=torch.float32)
            total[0] = torch.stack([n.to(total.device) for n in norms]).double().square().sum()
        self.world.all_reduce_(total)
        squares, *made = total.tolist()
        if squares:
            self._reductions.require_run()
        unused = self._reductions.where(count == 0 for count in made)
        return math.sqrt(squares / self.plan.replicas), unused


def shards_of(model: nn.Module) -> Shards:
    """A model's `Shards`; a model that was never placed is whole on one rank."""
    found = model.__dict__.get(SHARDS)
    return found if isinstance(found, Shards) else Shards(model, ShardPlan(), World())


def shard(model: nn.Module, blocks: Sequence[nn.Module], plan: ShardPlan, world: World) -> Shards:
    """Split `model` over the ranks in place, block by block.

    Every rank has the same weights before. Parameter objects change: make optimizers afterwards.

    Args:
        blocks: modules that are gathered one at a time; the rest of the model is one more unit,
            which stays gathered from forward to backward.
    """
    if plan.stage > 0:
        if world.size == 1 and not dist.is_initialized():
            # FSDP2 needs a group on one rank too, where offloaded weights are split.
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        _split(model, blocks, plan, world)
    # On the model itself: a global table would keep it alive.
    model.__dict__[SHARDS] = Shards(model, plan, world)
    return shards_of(model)


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device memory of undefined content; tied ones stay tied. A model
    that is split block by block thus never has more than one whole block."""
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                memory = torch.empty_like(parameter, device=device)
                made[id(parameter)] = nn.Parameter(memory, parameter.requires_grad)
            child._parameters[name] = made[id(parameter)]


def _split(model: nn.Module, blocks: Sequence[nn.Module], plan: ShardPlan, world: World) -> None:
    # Blocks of some families return views; none changes one in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = _mesh(world, plan.replicas)
    offload: OffloadPolicy = OffloadPolicy()
    if plan.offload_params:
        offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    settings: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": offload,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=plan.gather_dtype,
            # Summed in float32 whatever the weights compute in.
            reduce_dtype=torch.float32,
            # Masks, positions and rotation tables must keep their type.
            cast_forward_inputs=False,
        ),
    }
    shard_integers()
    after_forward: bool | int = plan.stage == 3
    if plan.stage == 3 and plan.hpz and 1 < world.ranks_per_node < world.size:
        after_forward = world.ranks_per_node
    for block in blocks:
        give_memory(block, world.device)
        fully_shard(block, reshard_after_forward=after_forward, **settings)
        if world.size > 1:
            keep_in_graph(block)
    give_memory(model, world.device)
    own = type(model)
    fully_shard(model, reshard_after_forward=False, **settings)
    # FSDP2 makes a class of its own; transformers goes by the class's name and module to convert
    # the weights' names and to copy a model's own code where it is saved.
    for name in ("__module__", "__name__", "__qualname__"):
        setattr(type(model), name, getattr(own, name))
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # Losses are divided once, by the count over all ranks: gradients add up.
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)
    _add_call(model)


@while_joined
def _mesh(world: World, replicas: int) -> DeviceMesh:
    """Replicas by pieces, made once for all models; of one dimension without replicas."""
    if replicas == 1:
        return init_device_mesh(world.device.type, (world.size,))
    shape = (replicas, world.size // replicas)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _add_call(model: Any) -> None:
    """Add `SHARDED_CALL` to the model."""

    def sharded_call(self: nn.Module, function: Callable[[], Any]) -> Any:
        return _without_views(function())

    setattr(model, SHARDED_CALL, types.MethodType(sharded_call, model))
    register_fsdp_forward_method(model, SHARDED_CALL)


def _without_views(output: Any) -> Any:
    """Copies of views: FSDP2 hooks a forward's output, and changing a view in place loses that."""
    if isinstance(output, tuple):
        return tuple(_without_views(part) for part in output)
    if isinstance(output, Tensor) and output._is_view():
        return output.clone()
    return output


def _is_nothing(gradient: Tensor) -> bool:
    return bool(((gradient == 0) & gradient.signbit()).all())


def _sum_bucket(gradients: list[Tensor]) -> None:
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
