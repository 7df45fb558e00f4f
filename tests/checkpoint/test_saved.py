"""A rank reads its own rows and no more, whatever the numbers of ranks that wrote and that read."""

from __future__ import annotations

import multiprocessing
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tandem.checkpoint.layout import LAYOUT, Layout, Stored, read_layout
from tandem.checkpoint.saved import PieceFiles
from tandem.checkpoint.shard_files import Piece, write_pieces
from tandem.errors import CheckpointError
from tandem.parallel.dtensor import fill, piece_rows
from tandem.parallel.world import World

# Rows that divide, that do not, that are fewer than the ranks; none; and a number.
SHAPES = {"matrix": (5120, 16), "odd": (4099, 8), "few": (48, 4), "none": (0, 3), "count": ()}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def write(folder: Path, num_ranks: int) -> None:
    """As so many ranks would, each its rows; the last alone has what is whole."""
    stored = {
        name: Stored(
            tensor.dtype, tensor.shape, range(num_ranks) if tensor.dim() else [num_ranks - 1]
        )
        for name, tensor in tensors().items()
    }
    layout = Layout(num_ranks, {"model": stored})
    (folder / LAYOUT).write_text(layout.to_json())
    for rank in range(num_ranks):
        pieces = []
        for name, tensor in tensors().items():
            if tensor.dim() == 0:
                rows = tensor if rank == num_ranks - 1 else tensor[None][:0]
            else:
                first, last = piece_rows(len(tensor), num_ranks, rank)
                rows = tensor[first:last]
            if rows.numel():
                pieces.append(Piece("model", name, rows))
        write_pieces(folder, pieces, World(rank, num_ranks))


def read(folder: Path, size: int, replicas: int, rank: int) -> tuple[int, int, int]:
    """Bytes read of tensors, bytes that lie with the rank, files opened."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    mesh = init_device_mesh("cpu", (size,))
    placements: list[Shard | Replicate] = [Shard(0)]
    if replicas > 1:
        mesh = init_device_mesh(
            "cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard")
        )
        placements = [Replicate(), Shard(0)]
    files = PieceFiles(
        read_layout(folder), World(rank, size), lambda writer: (0,), lambda writer: folder
    )
    saved = files.tensors("model")
    own = 0
    for name, tensor in tensors().items():
        if tensor.dim() == 0:
            assert torch.equal(saved[name].whole(), tensor)
            own += tensor.nbytes
            continue
        pieces = size // replicas
        first, last = piece_rows(len(tensor), pieces, rank % pieces)
        like = DTensor.from_local(
            torch.zeros(last - first, *tensor.shape[1:]),
            mesh,
            placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        fill(like, saved[name])
        assert torch.equal(like.to_local(), tensor[first:last]), name
        own += like.to_local().nbytes
    found = files.bytes_read, own, len(files._open)
    dist.destroy_process_group()
    return found


def reader(pipe: Connection, folder: Path, size: int, replicas: int, ranks: list[int]) -> None:
    try:
        pipe.send([read(folder, size, replicas, rank) for rank in ranks])
    except BaseException:
        pipe.send(traceback.format_exc())


@pytest.mark.parametrize("num_writers", [1, 48, 256])
@pytest.mark.parametrize("replicas", [1, 128])
def test_a_rank_of_1024_reads_its_own_bytes(
    tmp_path: Path, num_writers: int, replicas: int
) -> None:
    write(tmp_path, num_writers)
    context = multiprocessing.get_context("fork")  # a fake process group is not to stay
    ours, theirs = context.Pipe()
    ranks = [0, 1, 47, 511, 818, 1022, 1023]
    process = context.Process(target=reader, args=(theirs, tmp_path, 1024, replicas, ranks))
    process.start()
    assert ours.poll(120)
    found = ours.recv()
    process.join()
    assert isinstance(found, list), found
    for bytes_read, own, num_open in found:
        assert bytes_read <= 1.2 * own
        # Of each tensor the files with its rows, and the one that has the number.
        assert num_open <= 1 + 3 * (-(-num_writers * replicas // 1024) + 1)


def test_files_that_are_not_of_one_save_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 2)
    text = (tmp_path / LAYOUT).read_text()
    files = PieceFiles(
        Layout.from_json(text), World(), lambda writer: (0,), lambda writer: tmp_path
    )
    assert torch.equal(files.tensors("model")["odd"].whole(), tensors()["odd"])
    (tmp_path / LAYOUT).write_text(text.replace("[4099, 8]", "[4099, 4]"))
    files = PieceFiles(read_layout(tmp_path), World(), lambda writer: (0,), lambda writer: tmp_path)
    with pytest.raises(CheckpointError, match="not of one save"):
        files.tensors("model")["odd"].whole()
    (tmp_path / LAYOUT).write_text(text[:-9])
    with pytest.raises(CheckpointError, match=r"must hold layout\.json"):
        read_layout(tmp_path)
