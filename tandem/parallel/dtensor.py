"""Tensors of which each rank holds a piece (FSDP2's DTensors, split along dimension 0), and plain
ones, handled alike.

Pieces are torch.chunk's: ceil(rows / pieces) rows, fewer or none on the last ranks. A mesh of two
dimensions (HSDP) has pieces along the second and replicates them along the first.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard


class Saved(Protocol):
    """A whole tensor that is not in memory, from which a rank reads what it needs."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""

    def dim(self) -> int:
        """Dimensions of the whole."""

    def whole(self) -> Tensor:
        """All of it."""

    def part(self, like: Tensor) -> Tensor:
        """This rank's rows if it is split as `like` is; all for a plain tensor."""


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, sharing memory; a plain tensor is its own piece."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank; a collective for a tensor in pieces."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_of(full: Tensor | Saved) -> Tensor:
    """The tensor in memory, read if it is saved."""
    return full if isinstance(full, Tensor) else full.whole()


def piece_ranks(tensor: DTensor) -> list[list[int]]:
    """The ranks that hold the pieces, in order, once per replica."""
    if tensor.placements == (Shard(0),):
        return [tensor.device_mesh.mesh.tolist()]
    assert tensor.placements == (Replicate(), Shard(0)), tensor.placements
    replicas: list[list[int]] = tensor.device_mesh.mesh.tolist()
    return replicas


def piece_group(tensor: DTensor) -> ProcessGroup:
    """The ranks that hold this rank's replica, in the order of the pieces."""
    return tensor.device_mesh.get_group(len(tensor.placements) - 1)


def piece_rows(num_rows: int, num_pieces: int, index: int) -> tuple[int, int]:
    """First row of a piece, and the row after its last."""
    rows = -(-num_rows // num_pieces)
    return min(index * rows, num_rows), min((index + 1) * rows, num_rows)


@torch.no_grad()
def gathered_to(tensor: Tensor, rank: int) -> Tensor | None:
    """The whole tensor on one rank, None on the others; a plain tensor as it is.

    A collective for a tensor in pieces. No other rank ever holds more than its piece.

    Args:
        rank: among all.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    replica = next(ranks for ranks in piece_ranks(tensor) if rank in ranks)
    if len(replica) == 1:
        return tensor.to_local()
    if dist.get_rank() not in replica:
        return None
    group, piece = piece_group(tensor), tensor.to_local()
    rows = -(-tensor.shape[0] // len(replica))
    padded = piece.contiguous()
    if piece.shape[0] < rows:
        padded = piece.new_zeros(rows, *tensor.shape[1:])
        padded[: piece.shape[0]] = piece
    if dist.get_rank() != rank:
        dist.gather(padded, None, dst=rank, group=group)
        return None
    # Pieces are in order, so all padding is at the end.
    full = padded.new_empty(rows * len(replica), *tensor.shape[1:])
    dist.gather(padded, list(full.split(rows)), dst=rank, group=group)
    return full[: tensor.shape[0]]


def as_piece(piece: Tensor, like: Tensor) -> Tensor:
    """A tensor split as `like` is, from this rank's piece, and on the piece's device."""
    if not isinstance(like, DTensor):
        return piece
    if piece.device.type != like.device_mesh.device_type:
        # What is kept on the host; from_local would take it to the mesh's GPU.
        made = torch.empty_like(like.detach(), dtype=piece.dtype, device=piece.device)
        local(made).copy_(piece)
        return made
    return DTensor.from_local(
        piece,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's piece of a tensor, sharing memory, and the number of its first row."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    return local(tensor.detach()), _own_range(tensor.shape[0], tensor)[0]


@torch.no_grad()
def fill(target: Tensor, full: Tensor | Saved) -> None:
    """Copy a whole tensor, the same on every rank or saved, into one that may be in pieces."""
    local(target).copy_(part_of(full, target))


def part_of(full: Tensor | Saved, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor split as `like` is; sharing memory."""
    if not isinstance(full, Tensor):
        return full.part(like)
    if not isinstance(like, DTensor):
        return full
    first, last = _own_range(full.shape[0], like)
    return full[first:last]


def _own_range(num_rows: int, like: DTensor) -> tuple[int, int]:
    """This rank's rows of `num_rows`, split as `like` is."""
    num_pieces = len(piece_ranks(like)[0])
    index = like.device_mesh.get_local_rank(len(like.placements) - 1)
    return piece_rows(num_rows, num_pieces, index)
