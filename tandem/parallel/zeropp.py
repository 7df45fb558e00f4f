"""ZeRO++ in a split model: the quantized collectives of its units, and their error feedback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from tandem.parallel.collectives import QuantizedAllGather, QuantizedReduceScatter, node_groups
from tandem.parallel.dtensor import Saved, fill
from tandem.parallel.quantize import shard_numels, unit_parameters
from tandem.parallel.world import World, while_joined


class QuantizedTraffic:
    """The quantized collectives of one model, one object per unit."""

    def __init__(
        self,
        units: Mapping[str, FSDPModule],
        world: World,
        *,
        weights: bool,
        gradient_bits: int,
    ) -> None:
        """Install them in the units; a collective.

        Args:
            units: the split modules by name, over all of `world`.
            weights: gather weights as int8.
            gradient_bits: of gradients between nodes, 8 or 4; 0 sends them exactly.
        Raises:
            ConfigError: nodes of unequal size, or impossible bits.
        """
        self._world = world
        self._reducers: dict[str, QuantizedReduceScatter] = {}
        self._meshes: dict[str, DeviceMesh] = {}
        for name, unit in units.items():
            parameters = unit_parameters(cast(nn.Module, unit))
            if weights and parameters:
                gather = QuantizedAllGather(shard_numels(parameters, world.size), world.size)
                unit.set_custom_all_gather(gather)  # type: ignore[arg-type]
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            if gradient_bits and trained:
                intra, inter = _hops(world)
                self._reducers[name] = QuantizedReduceScatter(
                    intra,
                    inter,
                    # Inside a node 8 bits cost little time; 4 would need an error of every
                    # weight of the unit on every rank.
                    bits_intra=8 if inter is not None else gradient_bits,
                    bits_inter=gradient_bits,
                    error_feedback=gradient_bits == 4,
                    numels=shard_numels(trained, world.size),
                )
                unit.set_custom_reduce_scatter(self._reducers[name])  # type: ignore[arg-type]
                self._meshes[name] = cast(DTensor, trained[0]).device_mesh

    def residuals(self) -> dict[str, Tensor]:
        """Error feedback by unit and hop, part of a run's state; each rank's rows are its piece.
        Empty before the first gradient and at 8 bits."""
        return {
            f"{name}.{hop}": self._piece(name, residual)
            for name, reducer in self._reducers.items()
            for hop, residual in reducer.residuals.items()
        }

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Within: gradients that nobody will use; the error feedback stays as it is."""
        with ExitStack() as stack:
            for reducer in self._reducers.values():
                stack.enter_context(reducer.trial())
            yield

    def _piece(self, name: str, rows: Tensor) -> DTensor:
        return DTensor.from_local(rows, self._meshes[name], [Shard(0)], run_check=False)

    def restore(self, residuals: Mapping[str, Tensor | Saved]) -> None:
        """Continue from whole `residuals` of an earlier run of the same model.

        Those of another number of ranks are ignored: the feedback then starts from zero, which
        costs one step's rounding.
        """
        for name, reducer in self._reducers.items():
            own: dict[str, Tensor] = {}
            for hop, (rows, numel) in reducer.residual_shapes.items():
                whole = residuals.get(f"{name}.{hop}")
                if whole is not None and whole.shape == (rows * self._world.size, numel):
                    own[hop] = torch.empty(rows, numel, device=self._world.device)
                    fill(self._piece(name, own[hop]), whole)
            reducer.restore(own)


@while_joined
def _hops(world: World) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """`node_groups`, made once for all models."""
    return node_groups(world.ranks_per_node)
