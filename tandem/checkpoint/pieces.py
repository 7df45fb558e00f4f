"""A training state as each rank writes its share of it, and as any number of ranks read it.

A tensor in pieces is written piece by piece, each by a rank that has it; a whole one by one of the
ranks. Nothing is gathered, so nothing need fit on one rank. What lies where is in one small file
beside the pieces, so that a rank opens no file but those with rows that it takes.

    layout.json    {"ranks": 4, "splits": [[0, 1, 2, 3]],
                    "parts": {"actor": {"weight": {"dtype": "float32", "shape": [8, 2], "split": 0},
                                        "bias": {"dtype": "float32", "shape": [2], "rank": 1}}}}
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from tandem.errors import CheckpointError
from tandem.files import Spec, TensorFile
from tandem.parallel.pieces import local, own_rows, piece_ranks, piece_rows
from tandem.parallel.world import World

Tensors = Mapping[str, Mapping[str, Tensor]]
"""By part ("actor", "actor_optimizer"), then by name."""

LAYOUT = "layout.json"
"""What lies in which rank's file, of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a checkpoint: piece i of its rows, by torch.chunk's rule, in the file of
    `ranks[i]`."""

    dtype: torch.dtype
    shape: torch.Size
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Layout:
    """What lies in which rank's file.

    ranks: how many wrote. parts: every tensor, by part and name.
    """

    ranks: int
    parts: Mapping[str, Mapping[str, Stored]]

    @classmethod
    def of(cls, tensors: Tensors, world: World) -> Layout:
        """Every rank comes to the same: replicas of a piece take turns, and so do the ranks that
        all have a tensor whole."""
        loads = [(0, rank) for rank in range(world.size)]
        num_split = 0
        parts: dict[str, dict[str, Stored]] = {}
        for part, named in tensors.items():
            parts[part] = {}
            for name, tensor in named.items():
                if isinstance(tensor, DTensor):
                    replicas = piece_ranks(tensor)
                    ranks = replicas[num_split % len(replicas)]
                    num_split += 1
                else:
                    load, writer = loads[0]
                    heapq.heapreplace(loads, (load + max(1, tensor.nbytes), writer))
                    ranks = [writer]
                parts[part][name] = Stored(tensor.dtype, tensor.shape, ranks)
        return cls(world.size, parts)

    def to_json(self) -> str:
        """As written: the same ranks are named once."""
        splits: dict[tuple[int, ...], int] = {}
        parts: dict[str, dict[str, dict[str, Any]]] = {}
        for part, named in self.parts.items():
            parts[part] = {}
            for name, stored in named.items():
                said: dict[str, Any] = {
                    "dtype": str(stored.dtype).removeprefix("torch."),
                    "shape": list(stored.shape),
                }
                if len(stored.ranks) == 1:
                    said["rank"] = stored.ranks[0]
                else:
                    said["split"] = splits.setdefault(tuple(stored.ranks), len(splits))
                parts[part][name] = said
        value = {"ranks": self.ranks, "splits": [list(ranks) for ranks in splits], "parts": parts}
        return json.dumps(value)

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """What `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, IndexError: something else.
        """
        value = json.loads(text)

        def stored(said: Mapping[str, Any]) -> Stored:
            dtype = getattr(torch, said["dtype"])
            ranks = value["splits"][said["split"]] if "split" in said else [said["rank"]]
            return Stored(dtype, torch.Size(said["shape"]), ranks)

        parts = {
            part: {name: stored(said) for name, said in named.items()}
            for part, named in value["parts"].items()
        }
        return cls(int(value["ranks"]), parts)

    def files(self, ranks: Sequence[int]) -> list[str]:
        """The names of the files that these ranks may have written."""
        return [file_of(part, rank, self.ranks) for part in self.parts for rank in ranks]


def file_of(part: str, rank: int, num_ranks: int) -> str:
    """The file of a rank's pieces of a part."""
    if num_ranks == 1:
        return f"{part}.safetensors"
    return f"{part}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a tensor, or all."""

    part: str
    name: str
    rows: Tensor

    def copied(self) -> Piece:
        """Of the rows as they are now, in host memory of their own."""
        return replace(self, rows=self.rows.to("cpu", copy=True))


def own_pieces(tensors: Tensors, layout: Layout, world: World) -> list[Piece]:
    """What this rank writes, sharing memory: its pieces, and its share of what all ranks have."""
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


class PieceFiles:
    """The files of one checkpoint: those that this rank sees, and those that only others do.

    What lies on no file system of a rank comes to it from a rank that sees it; then reading a
    tensor is a collective, and every rank must read the same tensors in the same order.
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
            folder_of: where a writing rank's files are, if this rank's keeper is among those.
        """
        self.layout = layout
        self.world = world
        self.bytes_read = 0
        self.bytes_sent = 0
        self._holders = {rank: frozenset(holders(rank)) for rank in range(layout.ranks)}
        self._folder_of = folder_of
        self._open: dict[Path, Any] = {}
        self._seeing = {keeper: world.seeing(keeper) for keeper in world.folders}
        self._everywhere = frozenset(self._seeing)
        self.all_here = all(held >= self._everywhere for held in self._holders.values())

    def rows(self, part: str, name: str, first: int, last: int) -> Tensor:
        """Rows of a tensor, from files that this rank sees."""
        stored = self.layout.parts[part][name]
        if len(stored.ranks) == 1 and (first < last or not stored.shape):
            return self._read(part, name, stored.ranks[0], first, last)
        found = [
            self._read(part, name, stored.ranks[index], begin, end)
            for index, begin, end in _overlaps(stored, first, last)
        ]
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty(0, *stored.shape[1:], dtype=stored.dtype)

    def exchanged(self, part: str, name: str, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Rows of a tensor that lies on several file systems, a range for each rank; a collective
        where a rank does not see all of its own.

        Args:
            ranges: the first row that a rank takes, and the one after its last.
        """
        stored = self.layout.parts[part][name]
        world = self.world
        # Of each rank: the pieces with its rows, and who reads them for it.
        plan = [
            [
                (self._reader(stored.ranks[index], rank), index, begin, end)
                for index, begin, end in _overlaps(stored, *ranges[rank])
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
        self.bytes_sent += sum(map(len, sends))
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
        return torch.cat(found) if found else torch.empty(0, *stored.shape[1:], dtype=stored.dtype)

    def broadcast(self, part: str, name: str) -> Tensor:
        """All of a tensor on every rank; a collective where a rank does not see all of it."""
        stored = self.layout.parts[part][name]
        rows = []
        for index, begin, end in _overlaps(stored, 0, _num_rows(stored)):
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
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _reader(self, writer: int, rank: int) -> int:
        """Who reads a writing rank's file for a rank: itself if it sees it."""
        keepers = self.world.keepers
        held = self._holders[writer]
        if (keepers[rank] if keepers else 0) in held:
            return rank
        seeing = self._seeing[min(held)]
        return seeing[rank % len(seeing)]

    def _read(self, part: str, name: str, writer: int, first: int, last: int) -> Tensor:
        """Rows of a tensor as the whole counts them, from the file of the rank that wrote them."""
        stored = self.layout.parts[part][name]
        path = self._folder_of(writer) / file_of(part, writer, self.layout.ranks)
        offset = 0
        if len(stored.ranks) > 1:
            index = stored.ranks.index(writer)
            offset = piece_rows(stored.shape[0], len(stored.ranks), index)[0]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
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
    """A tensor of a checkpoint, read when it is asked for, no more of it than is (a `Saved`)."""

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
        if 0 in self.shape:  # nothing was written of it
            return torch.empty(self.shape, dtype=self._stored.dtype)
        if not self.files.all_here:
            return self.files.broadcast(self.part_name, self.name)
        return self.files.rows(self.part_name, self.name, 0, self.shape[0] if self.shape else 0)

    def part(self, like: Tensor) -> Tensor:
        """This rank's rows, where it lies over the ranks as `like` does; in host memory."""
        if not isinstance(like, DTensor) or 0 in self.shape:
            return self.whole()
        ranges = [(0, 0)] * self.files.world.size
        for ranks in piece_ranks(like):
            for index, rank in enumerate(ranks):
                ranges[rank] = piece_rows(self.shape[0], len(ranks), index)
        if self.files.all_here:
            return self.files.rows(self.part_name, self.name, *ranges[self.files.world.rank])
        return self.files.exchanged(self.part_name, self.name, ranges)


class SavedTensors(Mapping[str, SavedTensor]):
    """The tensors of one part of a checkpoint, by name."""

    def __init__(self, files: PieceFiles, part: str) -> None:
        """Reads nothing."""
        self._tensors = {name: SavedTensor(files, part, name) for name in files.layout.parts[part]}

    def __getitem__(self, name: str) -> SavedTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def whole(self) -> dict[str, Tensor]:
        """All of them, in host memory."""
        return {name: tensor.whole() for name, tensor in self._tensors.items()}


def read_layout(folder: Path) -> Layout:
    """What lies where, of a checkpoint.

    Raises:
        CheckpointError: nothing says it.
    """
    try:
        return Layout.from_json((folder / LAYOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise CheckpointError(
            f"{folder} must hold {LAYOUT}, which says what lies where; got none that can be read. "
            "Another version of tandem may have written it."
        ) from None


def _num_rows(stored: Stored) -> int:
    return stored.shape[0] if stored.shape else 1


def _overlaps(stored: Stored, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """The pieces that have some of the rows: number, first row, row after the last."""
    num_rows, num_pieces = _num_rows(stored), len(stored.ranks)
    if first >= last:
        return
    rows = -(-num_rows // num_pieces)
    for index in range(first // rows, min(-(-last // rows), num_pieces)):
        begin, end = piece_rows(num_rows, num_pieces, index)
        if max(begin, first) < min(end, last):
            yield index, max(begin, first), min(end, last)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
