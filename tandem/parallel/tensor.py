"""Tensor parallelism for generation: the ranks of a group hold slices of the same weights.

A group's ranks compute one batch together, each with its share of the heads and of the inner
width, and add their partial results up (arXiv:1909.08053). The slices are made of ZeRO's pieces by
one all-to-all per weight, in which every rank receives exactly its slice; no rank ever holds more.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tandem.errors import ConfigError
from tandem.parallel.dtensor import local, piece_group, piece_rows
from tandem.parallel.world import World


def check_divides(world: World, size: int) -> None:
    """Refuse groups of `size` that do not fill the nodes; makes none.

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
        """Every rank makes it, at the same time: it makes process groups.

        Raises:
            ConfigError: `size` does not divide the ranks, or a group would span nodes.
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
        """The groups as one would see ranks: what prompts are dealt to."""
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

    def slice(self, weight: Tensor, dim: int) -> Tensor:
        """This rank's of `size` equal slices along `dim`, whole along the other; a new tensor.

        Every rank of the world calls it for the same weights in the same order.

        Args:
            weight: (R, C) or (R,), plain or in pieces along dimension 0, over a multiple of `size`
                ranks.
        """
        if not isinstance(weight, DTensor):
            return weight.detach().chunk(self.size, dim)[self.index].clone()
        piece, group = local(weight.detach()), piece_group(weight)
        own, num_pieces = group.rank(), group.size()
        sends = [
            self._part_for(piece, weight.shape, dim, num_pieces, source=own, target=other)
            for other in range(num_pieces)
        ]
        shapes = [
            self._part_shape(weight.shape, dim, num_pieces, source=other, target=own)
            for other in range(num_pieces)
        ]
        counts = [_count(shape) for shape in shapes]
        received = torch.empty(sum(counts), dtype=piece.dtype, device=piece.device)
        dist.all_to_all_single(
            received,
            torch.cat([part.flatten() for part in sends]),
            counts,
            [part.numel() for part in sends],
            group=group,
        )
        parts = [
            part.view(shape) for part, shape in zip(received.split(counts), shapes, strict=True)
        ]
        return torch.cat(parts)

    def _rows(
        self, num_rows: int, dim: int, num_pieces: int, source: int, target: int
    ) -> tuple[int, int]:
        """First and last row (of the whole) that `source` has and `target` wants."""
        first, last = piece_rows(num_rows, num_pieces, source)
        if dim == 0:
            share = num_rows // self.size
            wanted = (target % self.size) * share
            first, last = max(first, wanted), min(last, wanted + share)
        return first, max(first, last)

    def _part_for(
        self,
        piece: Tensor,
        shape: torch.Size,
        dim: int,
        num_pieces: int,
        source: int,
        target: int,
    ) -> Tensor:
        first, last = self._rows(shape[0], dim, num_pieces, source, target)
        offset, _ = piece_rows(shape[0], num_pieces, source)
        rows = piece[first - offset : last - offset]
        return rows.chunk(self.size, 1)[target % self.size] if dim == 1 else rows

    def _part_shape(
        self, shape: torch.Size, dim: int, num_pieces: int, source: int, target: int
    ) -> tuple[int, ...]:
        first, last = self._rows(shape[0], dim, num_pieces, source, target)
        rest = [shape[1] // self.size] if dim == 1 else list(shape[1:])
        return (last - first, *rest)


@cache
def tensor_group(world: World, size: int) -> TensorGroup | None:
    """This rank's group of `size`, made once; None for groups of one.

    Raises:
        ConfigError: `size` does not divide the ranks of a node.
    """
    return TensorGroup(world, size) if size > 1 else None


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
