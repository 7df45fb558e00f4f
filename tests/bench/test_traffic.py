"""The byte counter against closed forms, collective by collective and inside DTensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bench.traffic import Collective, Total, counting_traffic
from tandem.parallel.world import World
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
B = 4 * 24  # bytes of 24 float32


def every_collective(world: World) -> tuple[list[Collective], set[str]]:
    """One of each kind, in a fixed order; 24 float32 from every rank."""
    full, part = torch.zeros(24), torch.zeros(6)
    wide = torch.zeros(96)
    pieces = [torch.zeros(6) for _ in range(4)]
    fulls = [torch.zeros(24) for _ in range(4)]
    uneven = [0, 3, 6, 15]  # to ranks 0 to 3, of every rank
    came = torch.zeros(4 * uneven[world.rank])
    peer = world.rank ^ 2
    calls: list[Callable[[], object]] = [
        lambda: dist.all_gather_into_tensor(wide, full),
        lambda: dist.all_gather(fulls, full),
        lambda: dist.reduce_scatter_tensor(part, full),
        lambda: dist.reduce_scatter(part, pieces),
        lambda: dist.all_reduce(full),
        lambda: dist.all_to_all_single(full.clone(), full),
        lambda: dist.all_to_all_single(came, full, [uneven[world.rank]] * 4, uneven),
        lambda: dist.broadcast(full, 1),
        lambda: dist.reduce(full, 1),
        lambda: dist.gather(full, fulls if world.rank == 1 else None, 1),
        lambda: dist.scatter(part, pieces if world.rank == 1 else None, 1),
        lambda: dist.send(full, peer) if world.rank < 2 else dist.recv(full, peer),
        lambda: functional.all_gather_tensor(full, 0, dist.group.WORLD).sum(),
        lambda: functional.reduce_scatter_tensor(full, "sum", 0, dist.group.WORLD).sum(),
        lambda: functional.all_reduce(full, "sum", dist.group.WORLD).sum(),
        lambda: functional.all_to_all_single(full, None, None, dist.group.WORLD).sum(),
        lambda: functional.broadcast(full, 1, dist.group.WORLD).sum(),
        lambda: dist.barrier(),
    ]
    with counting_traffic(2) as traffic:
        for number, call in enumerate(calls):
            with traffic.phase(str(number)):
                call()
    return traffic.records, traffic.unknown


# Sent by each rank, and what of it leaves the node: each rank has 1 peer inside, 2 outside.
EVERYBODY = {
    0: ("all_gather", 3 * B, 2 * B),
    1: ("all_gather", 3 * B, 2 * B),
    2: ("reduce_scatter", 3 * B // 4, B // 2),
    3: ("reduce_scatter", 3 * B // 4, B // 2),
    4: ("all_reduce", 6 * B // 4, B),
    5: ("all_to_all", 3 * B // 4, B // 2),
    12: ("all_gather", 3 * B, 2 * B),
    13: ("reduce_scatter", 3 * B // 4, B // 2),
    14: ("all_reduce", 6 * B // 4, B),
    15: ("all_to_all", 3 * B // 4, B // 2),
}


def test_each_collective_sends_what_it_must() -> None:
    for rank, (records, unknown) in enumerate(on_ranks(4, every_collective)):
        found = {int(r.phase): (r.kind, r.sent_bytes, r.inter_node_bytes) for r in records}
        assert unknown == set()
        assert {number: found[number] for number in EVERYBODY} == EVERYBODY
        shares = [0, 12, 24, 60]
        outside = sum(shares[2:]) if rank < 2 else sum(shares[:2])
        assert found[6] == ("all_to_all", B - shares[rank], outside)
        root = rank == 1
        for number in (7, 16):
            assert found[number] == ("broadcast", 3 * B * root, 2 * B * root)
        away = {0: (B, 0), 1: (0, 0), 2: (B, B), 3: (B, B)}[rank]
        assert found[8] == ("reduce", *away)
        assert found[9] == ("gather", *away)
        assert found[10] == ("scatter", 3 * B // 4 * root, B // 2 * root)
        assert found.get(11) == (("send", B, B) if rank < 2 else None)
        assert 17 not in found, "a barrier carries nothing"
        buffers = {int(r.phase): (r.buffer_bytes, r.dtype, r.group_size) for r in records}
        assert buffers[0] == buffers[1] == buffers[12] == (4 * B, torch.float32, 4)
        assert buffers[2] == buffers[4] == buffers[5] == (B, torch.float32, 4)


def groups_and_phases(world: World) -> tuple[dict[tuple[str, str], Total], Total, Total, int]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = torch.zeros(8, dtype=torch.bfloat16)
    dist.all_reduce(x)
    with counting_traffic(2) as traffic:
        dist.all_reduce(x, group=pairs[world.rank // 2])
        with traffic.phase("forward"):
            dist.all_reduce(x, group=across[world.rank % 2])
            with traffic.phase("inner"):
                dist.broadcast(x, 0)
            dist.all_reduce(x)
    dist.all_reduce(x)
    return (
        traffic.totals(),
        traffic.total("all_reduce"),
        traffic.total(phase="forward"),
        len(traffic.records),
    )


def test_totals_by_kind_and_phase() -> None:
    (totals, reduces, forward, count), *_ = on_ranks(4, groups_and_phases)
    assert totals == {
        ("", "all_reduce"): Total(1, 16, 16, 0),
        ("forward", "all_reduce"): Total(2, 32, 16 + 24, 16 + 16),
        ("inner", "broadcast"): Total(1, 16, 48, 32),
    }
    assert reduces == Total(3, 48, 56, 32)
    assert forward == Total(2, 32, 40, 32)
    assert count == 4, "what is outside is not counted"


class Gathers(torch.autograd.Function):
    """A collective of the backward pass."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        total = grad.clone()
        dist.all_reduce(total)
        return total


def hidden(world: World) -> list[tuple[str, int]]:
    """Collectives that nobody calls by name: of DTensor, and of a backward pass."""
    mesh = init_device_mesh("cpu", (world.size,))
    x = torch.ones(8, 3, requires_grad=True)
    with counting_traffic(2) as traffic:
        whole = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None)
        with traffic.phase("full"):
            whole.full_tensor()
        with traffic.phase("norm"):
            # The root of a sum in parts needs the sum: DTensor adds up by itself.
            root = whole.sum().sqrt()
        assert float(root.full_tensor()) == pytest.approx(32**0.5)
        with traffic.phase("backward"):
            Gathers.apply(x).sum().backward()
    assert not traffic.unknown
    return [(r.phase + " " + r.kind, r.sent_bytes) for r in traffic.records]


def test_collectives_of_dtensor_and_of_backward_are_seen() -> None:
    for seen in on_ranks(4, hidden):
        assert seen == [
            ("full all_gather", 3 * 32),
            ("norm all_reduce", 6),
            ("backward all_reduce", 6 * 96 // 4),
        ]
