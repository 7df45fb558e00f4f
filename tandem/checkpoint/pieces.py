"""A training state as each rank writes its share of it, and as any number of ranks read it.

A tensor in pieces is written piece by piece, each by the rank that has it, with the number of its
first row; a whole one by one of the ranks. Nothing is gathered, so nothing need fit on one rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from tandem.errors import CheckpointError
from tandem.files import Spec, TensorFile
from tandem.parallel.pieces import own_rows
from tandem.parallel.world import World

Tensors = Mapping[str, Mapping[str, Tensor]]
"""By part ("actor", "actor_optimizer"), then by name."""

_ROWS = "rows"
_FILE = re.compile(r"(\w+)(?:-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a tensor.

    first_row: None where they are all.
    """

    part: str
    name: str
    rows: Tensor
    first_row: int | None

    def copied(self) -> Piece:
        """Of the rows as they are now, in host memory of their own."""
        return replace(self, rows=self.rows.to("cpu", copy=True))


def own_pieces(tensors: Tensors, world: World) -> list[Piece]:
    """What this rank writes, sharing memory: its pieces, and its share of what all ranks have."""
    loads = [0] * world.size
    pieces = []
    for part, named in tensors.items():
        for name, tensor in named.items():
            if isinstance(tensor, DTensor):
                rows, first = own_rows(tensor)
                if rows.numel():
                    pieces.append(Piece(part, name, rows, first))
                continue
            writer = loads.index(min(loads))
            loads[writer] += max(1, tensor.nbytes)
            if writer == world.rank:
                pieces.append(Piece(part, name, tensor.detach(), None))
    return pieces


def num_bytes(tensors: Tensors) -> int:
    """What all ranks write together; every rank knows it."""
    return sum(Spec.of(t).num_bytes for named in tensors.values() for t in named.values())


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
        name = f"{part}.safetensors"
        if world.size > 1:
            name = f"{part}-{world.rank + 1:05d}-of-{world.size:05d}.safetensors"
        rows = {piece.name: piece.first_row for piece in mine if piece.first_row is not None}
        metadata = {_ROWS: json.dumps(rows)} if rows else None
        specs = {piece.name: Spec.of(piece.rows) for piece in mine}
        with TensorFile(folder / name, specs, metadata) as file:
            for piece in mine:
                file.put(piece.name, piece.rows)
        names.append(name)
    return names


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of one part by name, each put together when it is asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Reads the names alone, of the files of one part.

        Raises:
            CheckpointError: a file is no safetensors file, or its pieces do not fit together.
        """
        self._pieces: dict[str, list[tuple[int, Any]]] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
                first_rows = json.loads((file.metadata() or {}).get(_ROWS, "{}"))
                for name in file.keys():  # noqa: SIM118, it is no mapping
                    self._pieces.setdefault(name, []).append((int(first_rows.get(name, 0)), file))
            except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
                raise CheckpointError(
                    f"{path} must be a part of a checkpoint; got none ({error})."
                ) from None
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece[0])

    def __getitem__(self, name: str) -> Tensor:
        found: list[Tensor] = [file.get_tensor(name) for _, file in self._pieces[name]]
        expected = 0
        for (first, _), rows in zip(self._pieces[name], found, strict=True):
            if first != expected:
                raise CheckpointError(
                    f"the rows of {name} in a checkpoint must follow one another; got row {first} "
                    f"after {expected} rows. Its files are not of one save."
                )
            expected += rows.shape[0] if rows.dim() else 0
        return found[0] if len(found) == 1 else torch.cat(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def read_parts(folder: Path, names: Sequence[str]) -> dict[str, SavedTensors]:
    """The parts whose files a checkpoint's manifest names.

    Raises:
        CheckpointError: as SavedTensors.
    """
    parts: dict[str, list[Path]] = {}
    for name in names:
        if found := _FILE.fullmatch(name):
            parts.setdefault(found[1], []).append(folder / name)
    return {part: SavedTensors(paths) for part, paths in parts.items()}
