"""A process group that is left, and another that the same processes join later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tandem.parallel.dtensor import own_rows, whole
from tandem.parallel.shard import ShardPlan, shard
from tandem.parallel.tensor import tensor_group
from tandem.parallel.world import World
from tests.ranks import on_ranks


def gradient(world: World, plan: dict[str, Any]) -> Tensor:
    """The first weight's, of a split model; the sum over slices is in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    shards = shard(model, list(model), ShardPlan(**plan), world)
    loss = shards.forward(lambda: model(torch.ones(2, 4)).sum())
    shards.before_backward(last=True)
    loss.backward()
    assert isinstance(model[0].weight.grad, Tensor)
    return whole(model[0].weight.grad)


def first_row() -> int:
    """Of this rank's piece of a split weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    shard(model, list(model), ShardPlan(stage=3), World())
    return own_rows(model[0].weight)[1]


def twice(world: World, folder: Path, plan: dict[str, Any]) -> None:
    first = gradient(world, plan)
    slices = tensor_group(world, 2)
    assert slices is not None
    assert slices is tensor_group(world, 2)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/again", rank=world.rank, world_size=world.size
    )
    assert torch.equal(gradient(world, plan), first)
    again = tensor_group(world, 2)
    assert again is not slices
    assert again is not None
    assert again.lowest(world.rank) == 0


@pytest.mark.parametrize(
    "plan", [{"stage": 3}, {"stage": 2, "gradient_bits": 8}, {"stage": 2, "replicas": 2}], ids=str
)
def test_ranks_that_join_again_make_their_groups_again(
    tmp_path: Path, plan: dict[str, Any]
) -> None:
    on_ranks(2, twice, tmp_path, plan)


def alone(world: World) -> None:
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="MPI"):  # torch names groups by counting attempts
        dist.init_process_group("mpi")
    first = gradient(World(), {"stage": 3})
    assert first_row() == 0
    dist.destroy_process_group()
    assert torch.equal(gradient(World(), {"stage": 3}), first)
    assert first_row() == 0  # asks the mesh for its group, by name


def test_a_split_model_on_one_rank_after_the_group_of_another() -> None:
    # In a process of its own: FSDP2 starts threads where torch is built for GPUs, and a process
    # that was forked afterwards, as other tests' ranks are, could make no gradients.
    on_ranks(1, alone)
