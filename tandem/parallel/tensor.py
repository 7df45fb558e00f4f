"""Tensor parallelism for generation: the ranks of a group hold slices of the same weights.

The ranks of a group compute one batch together, each with its share of the heads and of the inner
width, and add up their partial results (arXiv:1909.08053). One all-to-all per weight makes the
slices from ZeRO's shards; every rank receives exactly its slice.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tandem.errors import ConfigError
from tandem.ops.spans import Spans, length, taken, within
from tandem.parallel.dtensor import local, piece_group, piece_rows
from tandem.parallel.world import World, while_joined


def check_divides(world: World, size: int) -> None:
    """Check that groups of `size` fill the nodes.

    Raises:
        ConfigError: `size` does not divide the ranks, or a group would span nodes.
    """
    if world.size % size or world.ranks_per_node % size:
        raise ConfigError(
            f"parallel.inference_tp_size must divide the ranks of a node; got {size} for "
            f"{world.ranks_per_node} a node, {world.size} in all. Use a divisor."
        )


class TensorGroup:
    """This rank's group: ranks g * size to (g + 1) * size - 1 for the g-th."""

    def __init__(self, world: World, size: int) -> None:
        """A collective of all ranks, which makes process groups.

        Raises:
            ConfigError: as `check_divides`.
        """
        check_divides(world, size)
        self.world = world
        self.size = size
        self.index = world.rank % size
        self.group: dist.ProcessGroup | None = None
        for first in range(0, world.size, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= world.rank < first + size:
                self.group = group

    @property
    def batches(self) -> World:
        """The groups seen as ranks: prompts are divided among them."""
        return World(self.world.rank // self.size, self.world.size // self.size)

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum of the group's partial results, the same bits on every rank; in place."""
        dist.all_reduce(partial, group=self.group)
        return partial

    def lowest(self, number: int) -> int:
        """The group's lowest number."""
        tensor = torch.tensor(number, device=self.world.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return int(tensor)

    def slice(self, weight: Tensor, dim: int, spans: Spans) -> Tensor:
        """What this rank holds of a weight along `dim`; a new tensor.

        A collective of all ranks of the world for weights in pieces.

        Args:
            weight: (R, ...), plain or in pieces along dimension 0, over a multiple of `size` ranks.
            spans: of each of the group's ranks.
        """
        if not isinstance(weight, DTensor):
            return taken(weight.detach(), dim, spans[self.index])
        piece, group = local(weight.detach()), piece_group(weight)
        own, num_pieces = group.rank(), group.size()
        rows = [piece_rows(len(weight), num_pieces, source) for source in range(num_pieces)]
        sends, sizes = [], []
        for target in range(num_pieces):
            wanted = spans[target % self.size]
            if dim == 0:
                parts = [piece[first:last].flatten() for first, last in within(wanted, rows[own])]
            else:
                parts = [taken(piece, dim, wanted).flatten()]
            sends += parts
            sizes.append(sum(map(len, parts)))
        mine, shape = spans[self.index], list(weight.shape[1:])
        if dim > 0:
            shape[dim - 1] = length(mine)
        counts = [
            (length(within(mine, held)) if dim == 0 else held[1] - held[0]) * math.prod(shape)
            for held in rows
        ]
        received = piece.new_empty(sum(counts))
        sent = torch.cat(sends) if sends else received[:0]
        dist.all_to_all_single(received, sent, counts, sizes, group)
        return received.view(-1, *shape)


@while_joined
def tensor_group(world: World, size: int) -> TensorGroup | None:
    """This rank's group of `size`, made once; None for groups of one (see `TensorGroup`)."""
    return TensorGroup(world, size) if size > 1 else None
