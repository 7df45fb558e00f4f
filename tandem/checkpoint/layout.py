"""Which rank's file of a checkpoint has what of a training state.

A tensor in pieces is written piece by piece, each by a rank that has it; a whole one by one rank.
One small file lists this, so that a rank opens only files with rows that it needs.

    layout.json    {"ranks": 4, "splits": [[0, 1, 2, 3]],
                    "parts": {"actor": {"weight": {"dtype": "float32", "shape": [8, 2], "split": 0},
                                        "bias": {"dtype": "float32", "shape": [2], "rank": 1}}}}
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tandem.errors import CheckpointError
from tandem.parallel.dtensor import piece_ranks, piece_rows
from tandem.parallel.world import World

Tensors = Mapping[str, Mapping[str, Tensor]]
"""By part ("actor", "actor_optimizer"), then by name."""

LAYOUT = "layout.json"
"""The file with a checkpoint's `Layout`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a checkpoint: piece i of its rows (torch.chunk's) is in `ranks[i]`'s file."""

    dtype: torch.dtype
    shape: torch.Size
    ranks: Sequence[int]

    @property
    def num_rows(self) -> int:
        """1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """The pieces with any of these rows: number, first row, row after the last."""
        if first >= last:
            return
        rows = -(-self.num_rows // len(self.ranks))
        for index in range(first // rows, min(-(-last // rows), len(self.ranks))):
            begin, end = piece_rows(self.num_rows, len(self.ranks), index)
            if max(begin, first) < min(end, last):
                yield index, max(begin, first), min(end, last)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rank's file has what.

    ranks: the number that wrote. parts: every tensor, by part and name.
    """

    ranks: int
    parts: Mapping[str, Mapping[str, Stored]]

    @classmethod
    def of(cls, tensors: Tensors, world: World) -> Layout:
        """The same on every rank: replicas of a piece take turns, and whole tensors are balanced
        over the ranks."""
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
        """As written; every list of ranks is written once."""
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
            ValueError, KeyError, TypeError, AttributeError, IndexError: it is something else.
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
        """The files that these ranks may have written."""
        return [file_of(part, rank, self.ranks) for part in self.parts for rank in ranks]


def file_of(part: str, rank: int, num_ranks: int) -> str:
    """The name of the file with a rank's pieces of a part."""
    if num_ranks == 1:
        return f"{part}.safetensors"
    return f"{part}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def read_layout(folder: Path) -> Layout:
    """A checkpoint's layout.

    Raises:
        CheckpointError: it is missing or unreadable.
    """
    try:
        return Layout.from_json((folder / LAYOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise CheckpointError(
            f"{folder} must hold {LAYOUT}, which lists its tensors; got none that can be read. "
            "Another version of tandem may have written it."
        ) from None
