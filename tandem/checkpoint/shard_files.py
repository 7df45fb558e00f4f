"""Each rank's share of a training state, written without gathering anything on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tandem.checkpoint.layout import Layout, Tensors, file_of
from tandem.parallel.dtensor import local, own_rows
from tandem.parallel.world import World
from tandem.tensor_files import Spec, TensorFile


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a tensor, or all."""

    part: str
    name: str
    rows: Tensor

    def copied(self) -> Piece:
        """With a copy of the rows in host memory."""
        return replace(self, rows=self.rows.to("cpu", copy=True))


def own_pieces(tensors: Tensors, layout: Layout, world: World) -> list[Piece]:
    """What this rank writes, sharing memory: its pieces, and its share of whole tensors."""
    return [
        Piece(part, name, own_rows(tensor)[0])
        for part, named in tensors.items()
        for name, tensor in named.items()
        if local(tensor).numel() and world.rank in layout.parts[part][name].ranks
    ]


def not_finite(pieces: Sequence[Piece]) -> str:
    """The first piece with a value that is not finite, as part/name; empty if there is none."""
    for piece in pieces:
        if piece.rows.is_floating_point() and not bool(torch.isfinite(piece.rows).all()):
            return f"{piece.part}/{piece.name}"
    return ""


def write_pieces(folder: Path, pieces: Sequence[Piece], world: World) -> list[str]:
    """One synced file per part that this rank has anything of; returns their names.

    Raises:
        OSError: the disk refuses.
    """
    names = []
    for part in dict.fromkeys(piece.part for piece in pieces):
        mine = [piece for piece in pieces if piece.part == part]
        name = file_of(part, world.rank, world.size)
        specs = {piece.name: Spec.of(piece.rows) for piece in mine}
        with TensorFile(folder / name, specs) as file:
            for piece in mine:
                file.put(piece.name, piece.rows)
        names.append(name)
    return names
