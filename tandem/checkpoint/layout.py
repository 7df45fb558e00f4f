"""What of a training state lies in which rank's file of a checkpoint.

A tensor in pieces is written piece by piece, each by a rank that has it; a whole one by one of the
ranks. It is said in one small file, so that a rank opens no file but those with rows that it takes.

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
"""What lies in which rank's file, of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a checkpoint: piece i of its rows, by torch.chunk's rule, in the file of
    `ranks[i]`."""

    dtype: torch.dtype
    shape: torch.Size
    ranks: Sequence[int]

    @property
    def num_rows(self) -> int:
        """One for a number."""
        return self.shape[0] if self.shape else 1

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """The pieces that have some of the rows: number, first row, row after the last."""
        if first >= last:
            return
        rows = -(-self.num_rows // len(self.ranks))
        for index in range(first // rows, min(-(-last // rows), len(self.ranks))):
            begin, end = piece_rows(self.num_rows, len(self.ranks), index)
            if max(begin, first) < min(end, last):
                yield index, max(begin, first), min(end, last)


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
