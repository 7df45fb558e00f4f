"""Tensors of which a rank holds a piece (FSDP2's DTensors, split along dimension 0), and plain
ones, handled alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, sharing memory; a plain tensor is its own piece."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank; a collective for a tensor in pieces."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gathered_to(tensor: Tensor, rank: int) -> Tensor | None:
    """All of it on one rank, None on the others that have pieces too; a plain tensor as it is.

    A collective for a tensor in pieces. No other rank ever holds more than its piece.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    if mesh.size() == 1 or tensor.placements != (Shard(0),):
        return whole(tensor)
    group, piece = mesh.get_group(), tensor.to_local()
    rows = -(-tensor.shape[0] // mesh.size())
    padded = piece.contiguous()
    if piece.shape[0] < rows:
        padded = piece.new_zeros(rows, *tensor.shape[1:])
        padded[: piece.shape[0]] = piece
    to = dist.get_global_rank(group, rank)
    if mesh.get_local_rank() != rank:
        dist.gather(padded, None, dst=to, group=group)
        return None
    # Pieces follow one another, so that the padding is all at the end.
    full = padded.new_empty(rows * mesh.size(), *tensor.shape[1:])
    dist.gather(padded, list(full.split(rows)), dst=to, group=group)
    return full[: tensor.shape[0]]


def piece_like(full: Tensor, like: Tensor) -> Tensor:
    """`full` lying over the ranks as `like` does; no communication.

    Args:
        full: the same whole tensor on every rank, on any device.
    """
    if not isinstance(like, DTensor):
        return full.to(like.device)
    return as_piece(_own_rows(full, like).to(like.device).clone(), like)


def as_piece(piece: Tensor, like: Tensor) -> Tensor:
    """This rank's piece of a tensor that lies over the ranks as `like` does."""
    if not isinstance(like, DTensor):
        return piece
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
    rows = -(-tensor.shape[0] // tensor.device_mesh.size())
    return local(tensor.detach()), tensor.device_mesh.get_local_rank() * rows


@torch.no_grad()
def fill(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor, the same on every rank, into a target that may lie in pieces."""
    if isinstance(target, DTensor):
        target.to_local().copy_(_own_rows(full, target))
    else:
        target.copy_(full)


def _own_rows(full: Tensor, like: DTensor) -> Tensor:
    """The rows that torch.chunk's rule gives this rank, none where there are fewer than ranks."""
    (placement,) = like.placements
    assert isinstance(placement, Shard), placement
    assert placement.dim == 0, placement
    ranks, rank = like.device_mesh.size(), like.device_mesh.get_local_rank()
    rows = -(-full.shape[0] // ranks)
    return full[min(rank * rows, full.shape[0]) : (rank + 1) * rows]
