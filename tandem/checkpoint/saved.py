"""The tensors of a checkpoint, from which any number of ranks read what they need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from tandem.checkpoint.layout import LAYOUT, Layout, Stored, file_of
from tandem.errors import CheckpointError
from tandem.parallel.dtensor import piece_ranks, piece_rows
from tandem.parallel.world import World
from tandem.tensor_files import open_tensors


class PieceFiles:
    """The files of one checkpoint, those that this rank sees and those that only others see.

    Rows that a rank does not see are sent by a rank that does; reading a tensor is then a
    collective, and every rank must read the same tensors in the same order.
    """

    def __init__(
        self,
        layout: Layout,
        world: World,
        holders: Callable[[int], Collection[int]],
        folder_of: Callable[[int], Path],
    ) -> None:
        """
        Args:
            holders: the keepers whose folders have a writing rank's files; the same on all ranks.
            folder_of: the folder of a writing rank's files, if this rank's keeper is among those.
        """
        self.layout = layout
        self.world = world
        self.bytes_read = 0
        self._holders = {rank: frozenset(holders(rank)) for rank in range(layout.ranks)}
        self._folder_of = folder_of
        self._open: dict[Path, Any] = {}
        self._seeing = {keeper: world.seeing(keeper) for keeper in world.folders}
        self._everywhere = frozenset(self._seeing)
        self.all_here = all(held >= self._everywhere for held in self._holders.values())

    def tensors(self, part: str) -> dict[str, SavedTensor]:
        """The tensors of one part by name; reads nothing."""
        return {name: SavedTensor(self, part, name) for name in self.layout.parts[part]}

    def rows(self, part: str, name: str, first: int, last: int) -> Tensor:
        """Rows of a tensor, from files that this rank sees."""
        stored = self.layout.parts[part][name]
        return _joined(
            stored,
            [
                self._read(part, name, stored.ranks[index], begin, end)
                for index, begin, end in stored.pieces(first, last)
            ],
        )

    def exchanged(self, part: str, name: str, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """This rank's rows of a tensor on several file systems; a collective if any rank does not
        see all of its own.

        Args:
            ranges: of each rank, its first row and the one after its last.
        """
        stored = self.layout.parts[part][name]
        world = self.world
        # For each rank: the pieces with its rows, and who reads them.
        plan = [
            [
                (self._reader(stored.ranks[index], rank), index, begin, end)
                for index, begin, end in stored.pieces(*ranges[rank])
            ]
            for rank in range(world.size)
        ]

        def read(index: int, begin: int, end: int) -> Tensor:
            return self._read(part, name, stored.ranks[index], begin, end)

        if all(reader == rank for rank, rows in enumerate(plan) for reader, *_ in rows):
            return self.rows(part, name, *ranges[world.rank])
        row = torch.empty(stored.shape[1:], dtype=stored.dtype).nbytes
        sends = [
            torch.cat([_bytes(read(i, a, b)) for reader, i, a, b in rows if reader == world.rank])
            if rank != world.rank and any(reader == world.rank for reader, *_ in rows)
            else torch.empty(0, dtype=torch.uint8)
            for rank, rows in enumerate(plan)
        ]
        mine = plan[world.rank]
        counts = [0] * world.size
        for reader, _, begin, end in mine:
            counts[reader] += (end - begin) * row if reader != world.rank else 0
        came = torch.empty(sum(counts), dtype=torch.uint8)
        dist.all_to_all_single(came, torch.cat(sends), counts, [len(sent) for sent in sends])
        parts = list(came.split(counts))
        found = []
        for reader, index, begin, end in mine:
            if reader == world.rank:
                found.append(read(index, begin, end))
                continue
            taken, parts[reader] = parts[reader].tensor_split([(end - begin) * row])
            found.append(taken.clone().view(stored.dtype).view(end - begin, *stored.shape[1:]))
        return _joined(stored, found)

    def broadcast(self, part: str, name: str) -> Tensor:
        """A whole tensor on every rank; a collective if any rank does not see all of it."""
        stored = self.layout.parts[part][name]
        rows = []
        for index, begin, end in stored.pieces(0, stored.num_rows):
            writer = stored.ranks[index]
            reader = min(self._holders[writer])
            is_seen = self.world.keeper in self._holders[writer]
            shape = (end - begin, *stored.shape[1:]) if stored.shape else ()
            tensor = torch.empty(shape, dtype=stored.dtype)
            if is_seen:
                tensor = self._read(part, name, writer, begin, end)
            if self._holders[writer] < self._everywhere:
                flat = _bytes(tensor)
                dist.broadcast(flat, reader)
                tensor = flat.view(stored.dtype).view(shape)
            rows.append(tensor)
        return _joined(stored, rows)

    def _reader(self, writer: int, rank: int) -> int:
        """Which rank reads a writing rank's file for `rank`: itself if it sees the file."""
        keepers = self.world.keepers
        held = self._holders[writer]
        if (keepers[rank] if keepers else 0) in held:
            return rank
        seeing = self._seeing[min(held)]
        return seeing[rank % len(seeing)]

    def _read(self, part: str, name: str, writer: int, first: int, last: int) -> Tensor:
        """Rows of a tensor, counted in the whole, from the file of the rank that wrote them."""
        stored = self.layout.parts[part][name]
        path = self._folder_of(writer) / file_of(part, writer, self.layout.ranks)
        offset = 0
        if len(stored.ranks) > 1:
            index = stored.ranks.index(writer)
            offset = piece_rows(stored.shape[0], len(stored.ranks), index)[0]
        try:
            if path not in self._open:
                self._open[path] = open_tensors(path)
            file = self._open[path]
            if not stored.shape:
                tensor: Tensor = file.get_tensor(name)
            else:
                tensor = file.get_slice(name)[first - offset : last - offset]
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} must hold {name} of a checkpoint; got none ({error})."
            ) from None
        if tensor.dtype != stored.dtype or tensor.shape[1:] != stored.shape[1:]:
            raise CheckpointError(
                f"{path} must hold {name} as {LAYOUT} says; got {tensor.dtype} "
                f"{tuple(tensor.shape)}. Its files are not of one save."
            )
        self.bytes_read += tensor.nbytes
        return tensor


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint, of which only the rows asked for are read (a `Saved`)."""

    files: PieceFiles
    part_name: str
    name: str

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        return self._stored.shape

    @property
    def _stored(self) -> Stored:
        return self.files.layout.parts[self.part_name][self.name]

    def dim(self) -> int:
        """Dimensions of the whole."""
        return len(self.shape)

    def whole(self) -> Tensor:
        """All of it, in host memory."""
        if 0 in self.shape:  # none of it was written
            return torch.empty(self.shape, dtype=self._stored.dtype)
        if not self.files.all_here:
            return self.files.broadcast(self.part_name, self.name)
        return self.files.rows(self.part_name, self.name, 0, self._stored.num_rows)

    def part(self, like: Tensor) -> Tensor:
        """This rank's rows if it is split as `like` is; in host memory."""
        if not isinstance(like, DTensor) or 0 in self.shape:
            return self.whole()
        ranges = [(0, 0)] * self.files.world.size
        for ranks in piece_ranks(like):
            for index, rank in enumerate(ranks):
                ranges[rank] = piece_rows(self.shape[0], len(ranks), index)
        if self.files.all_here:
            return self.files.rows(self.part_name, self.name, *ranges[self.files.world.rank])
        return self.files.exchanged(self.part_name, self.name, ranges)


def _joined(stored: Stored, pieces: list[Tensor]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else torch.empty(0, *stored.shape[1:], dtype=stored.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
