"""Ranks write their own pieces; any number of ranks reads them; what one rank finds, all say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as SplitAlong

from tandem.checkpoint.folder import read_manifest
from tandem.checkpoint.saver import Saver
from tandem.checkpoint.state import State, load_newest_state
from tandem.errors import TandemError
from tandem.parallel.dtensor import gathered_to, part_of
from tandem.parallel.world import World
from tests.ranks import on_ranks

# Rows that divide evenly, that do not, and that are fewer than the ranks.
SHAPES = {"even": (6, 4), "uneven": (7, 2), "few": (2, 3), "one": (1,)}


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def split_state(world: World, step: int = 1, replicas: int = 1) -> State:
    mesh, placements = init_device_mesh("cpu", (world.size,)), [SplitAlong(0)]
    if replicas > 1:
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (replicas, world.size // replicas), mesh_dim_names=names)
        placements = [Replicate(), SplitAlong(0)]
    split = {n: distribute_tensor(t, mesh, placements) for n, t in whole_tensors().items()}
    plain = {f"plain {i}": torch.full((10,), float(i)) for i in range(4)}
    return State(step, {"actor": {**split, **plain}, "scaler": {"n": torch.tensor(5)}}, {})


def save(world: World, folder: Path, replicas: int = 1) -> None:
    saver = Saver(folder, keep=2, world=world)
    for step in (1, 2):
        saver.save(split_state(world, step, replicas))
    saver.wait()


def load(world: World, folder: Path) -> tuple[int, list[str]]:
    state, notes = load_newest_state(folder, world)
    assert state is not None
    expected = split_state(world).tensors["actor"]
    for name, tensor in whole_tensors().items():
        assert torch.equal(state.tensors["actor"][name].whole(), tensor)
        mine = part_of(state.tensors["actor"][name], expected[name])
        assert torch.equal(mine, expected[name].to_local())  # type: ignore[attr-defined]
    assert torch.equal(state.tensors["actor"]["plain 3"].whole(), torch.full((10,), 3.0))
    assert state.tensors["scaler"]["n"].whole() == 5
    return state.step, notes


@pytest.mark.parametrize("size", [2, 3])
def test_pieces_written_by_their_ranks_come_back_at_any_number_of_ranks(
    tmp_path: Path, size: int
) -> None:
    on_ranks(size, save, tmp_path)
    entries = read_manifest(tmp_path / "step-000002").entries
    assert {n for n in entries if n.startswith("actor")} == {
        f"actor-{rank + 1:05d}-of-{size:05d}.safetensors" for rank in range(size)
    }
    total = sum(4 * t.numel() for t in whole_tensors().values()) + 160
    headers = 1200
    assert max(entry.bytes for entry in entries.values()) < total / size + 60 + headers
    for other in (2, 4):
        assert on_ranks(other, load, tmp_path) == [(2, [])] * other
    state, _ = load_newest_state(tmp_path)
    assert state is not None
    for name, tensor in whole_tensors().items():
        assert torch.equal(state.tensors["actor"][name].whole(), tensor)


def test_a_piece_that_several_replicas_have_is_written_once(tmp_path: Path) -> None:
    on_ranks(4, save, tmp_path, 2)
    entries = read_manifest(tmp_path / "step-000002").entries
    total = sum(4 * t.numel() for t in whole_tensors().values()) + 160
    sizes = [entry.bytes for name, entry in entries.items() if name.startswith("actor")]
    assert len(sizes) == 4
    assert sum(sizes) < total + 4 * 600  # headers
    assert on_ranks(3, load, tmp_path) == [(2, [])] * 3
    assert on_ranks(4, gathered_from_replicas) == [True] * 4


def gathered_from_replicas(world: World) -> bool:
    """Each rank in turn gets a tensor whole that its replica has."""
    for to in range(world.size):
        for name, expected in whole_tensors().items():
            found = gathered_to(split_state(world, replicas=2).tensors["actor"][name], to)
            if world.rank == to and not torch.equal(found, expected):  # type: ignore[arg-type]
                return False
    return True


def test_all_ranks_fall_back_together(tmp_path: Path) -> None:
    on_ranks(2, save, tmp_path)
    (tmp_path / "step-000002/actor-00002-of-00002.safetensors").unlink()
    found = on_ranks(2, load, tmp_path)
    assert found[0] == found[1]
    step, notes = found[0]
    assert step == 1
    assert "actor-00002-of-00002.safetensors must have" in notes[0]


def refused(world: World, folder: Path, what: str) -> str:
    """What every rank says where one cannot write, or has a value that is not finite."""
    saver = Saver(folder, keep=2, world=world)
    saver.save(split_state(world, 1))
    saver.wait()
    state = split_state(world, 2)
    if what == "nan" and world.rank == 1:
        state.tensors["actor"]["even"].to_local()[-1] = torch.nan  # type: ignore[attr-defined]
    elif what == "disk" and world.rank == 1:
        import tandem.checkpoint.saver as module

        def refuse(*arguments: object) -> list[str]:
            raise OSError(28, "No space left on device")

        module.write_pieces = refuse
    elif what == "publish" and world.rank == 0:
        import tandem.checkpoint.saver as module

        def refuse_to_publish(*arguments: object) -> None:
            raise OSError(30, "Read-only file system")

        module.publish = refuse_to_publish
    try:
        saver.save(state)
        saver.wait()
    except TandemError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("what", ["nan", "disk", "publish"])
def test_what_happens_to_one_rank_is_said_by_all(tmp_path: Path, what: str) -> None:
    said = on_ranks(3, refused, tmp_path, what)
    assert len(set(said)) == 1
    expected = {"nan": "NumericsError", "disk": "No space left", "publish": "Read-only file"}[what]
    assert expected in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]


def gathered(world: World, to: int) -> None:
    for name, tensor in split_state(world).tensors["actor"].items():
        found = gathered_to(tensor, to)
        if name not in SHAPES:
            assert found is tensor
        elif world.rank == to:
            assert found is not None
            assert torch.equal(found, whole_tensors()[name])
        else:
            assert found is None


@pytest.mark.parametrize("to", [0, 2])
def test_a_tensor_in_pieces_comes_to_one_rank_alone(to: int) -> None:
    on_ranks(3, gathered, to)
