"""Quantized collectives at 4 ranks as 2 nodes of 2, alone and inside FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from bench.traffic import Total, counting_traffic
from tandem.errors import ConfigError, ShapeError, TandemError
from tandem.ops.blockwise import INT8, dequantize, quantize
from tandem.parallel.collectives import QuantizedAllGather, QuantizedReduceScatter, node_groups
from tandem.parallel.quantize import shard_numels, unit_parameters
from tandem.parallel.world import World
from tests.ranks import on_ranks

SUM = dist.ReduceOp.SUM


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def reduced(comm: QuantizedReduceScatter, gradient: Tensor) -> Tensor:
    """What FSDP2 does with the object: buffers from `allocate`, keywords."""
    size = (gradient.numel() // group().size(),)
    output = comm.allocate(size, dtype=gradient.dtype, device=gradient.device)
    comm(output_tensor=output, input_tensor=gradient, group=group(), op=SUM, async_op=False)
    return output


def exact_sums(world: World, ranks_per_node: int) -> bool:
    """Multiples of what int8 says exactly, whose sums over nodes and all are such multiples too."""
    base = torch.arange(-127, 128).float().repeat(8)[: 2 * 255 * 4] * 2.0**-9
    multiple = (1.0, 1.0, 0.0, 3.0)[world.rank]
    comm = QuantizedReduceScatter(*node_groups(ranks_per_node), block=510, numels=(510,))
    got = reduced(comm, base * multiple)
    want = torch.empty(510)
    dist.reduce_scatter_tensor(want, base * multiple)
    return torch.equal(got, want)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
@pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor. is deprecated:FutureWarning")
def test_what_int8_says_exactly_is_summed_exactly(ranks_per_node: int) -> None:
    assert on_ranks(4, exact_sums, ranks_per_node) == [True] * 4


def sums(world: World) -> dict[tuple[Any, ...], tuple[float, bool]]:
    """Relative error against the float64 sum, and whether a second call gives the same bits."""
    found = {}
    runs = (1024, 77, 3000)
    n = sum(runs)
    scales = torch.cat([torch.full((k,), s) for k, s in zip(runs, (1.0, 1e-3, 30.0), strict=True)])
    parts = [normal(4, n, seed=rank) * scales for rank in range(4)]
    for ranks_per_node in (1, 2, 4):
        groups = node_groups(ranks_per_node)
        for bits in ((8, 8), (8, 4), (4, 4)):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                want = sum(part.to(dtype).double() for part in parts)[world.rank]  # type: ignore[index]
                comm = QuantizedReduceScatter(
                    *groups, bits_intra=bits[0], bits_inter=bits[1], numels=runs
                )
                gradient = parts[world.rank].to(dtype).flatten()
                before = gradient.clone()
                got = reduced(comm, gradient)
                assert got.dtype == dtype
                assert torch.equal(gradient, before), "FSDP2's buffer is left alone"
                assert not comm.residuals
                # Each parameter has blocks of its own: the small one is as exact as the large.
                worst = max(
                    relative(a, b) for a, b in zip(got.split(runs), want.split(runs), strict=True)
                )
                found[ranks_per_node, bits, dtype] = worst, torch.equal(got, reduced(comm, before))
    return found


def test_sums_err_as_much_as_their_codes_whatever_the_nodes() -> None:
    for rank in on_ranks(4, sums):
        for (ranks_per_node, bits, dtype), (error, is_repeatable) in rank.items():
            hops = {1: bits[1:], 2: bits, 4: bits[:1]}[ranks_per_node]
            bound = math.hypot(*(0.009 if b == 8 else 0.15 for b in hops)) + 0.004
            assert error < bound, (ranks_per_node, bits, dtype)
            if 4 in hops and dtype == torch.float32:
                assert error > 0.08, "int4 is what travelled"
            assert is_repeatable


def fed_back(world: World, bits: tuple[int, int], feedback: bool) -> tuple[list[float], int]:
    """Error of the mean over 1, 8 and 64 equal gradients; memory of the residuals."""
    comm = QuantizedReduceScatter(
        *node_groups(2), bits_intra=bits[0], bits_inter=bits[1], error_feedback=feedback,
        numels=(600, 400),
    )  # fmt: skip
    parts = [normal(4, 1000, seed=rank) for rank in range(4)]
    want = torch.stack(parts).sum(0)[world.rank]
    total, errors = torch.zeros(1000), []
    for step in range(1, 65):
        total += reduced(comm, parts[world.rank].flatten())
        if step in (1, 8, 64):
            errors.append(relative(total / step, want))
    return errors, sum(residual.nbytes for residual in comm.residuals.values())


def test_error_feedback_makes_the_mean_over_steps_right() -> None:
    for (first, eighth, last), memory in on_ranks(4, fed_back, (4, 4), True):
        assert 0.1 < first < 0.2
        assert eighth < first / 5
        assert last < first / 40
        # 4 bytes for each number a hop sends: 4 shares inside the node, 2 between nodes.
        assert memory == 4 * (4 * 1000 + 2 * 1000)
    for (_, _, last), memory in on_ranks(4, fed_back, (8, 4), True):
        assert last < 0.015, "int8's error inside the node is all that is left"
        assert memory == 4 * 2 * 1000
    for (first, _, last), memory in on_ranks(4, fed_back, (4, 4), False):
        assert last == pytest.approx(first, rel=1e-3)
        assert memory == 0


def poisoned(world: World) -> tuple[bool, bool, bool, bool]:
    """An inf, then finite gradients: seen in its block alone, and forgotten by the residuals."""
    comm = QuantizedReduceScatter(
        *node_groups(2), bits_intra=4, bits_inter=4, error_feedback=True, numels=(512,)
    )
    gradient = normal(4, 512, seed=world.rank)
    if world.rank == 3:
        gradient[1, 300] = math.inf
    first = reduced(comm, gradient.flatten())
    hurt = slice(256, 512) if world.rank == 1 else slice(0, 0)
    spared = torch.ones(512, dtype=torch.bool)
    spared[hurt] = False
    residuals = comm.residuals
    is_clean = all(bool(r.isfinite().all()) for r in residuals.values())
    kept = {name: r.clone() for name, r in residuals.items()}
    second = reduced(comm, normal(2048, seed=9 + world.rank))
    other = QuantizedReduceScatter(
        *node_groups(2), bits_intra=4, bits_inter=4, error_feedback=True, numels=(512,)
    )
    other.restore(kept)
    resumed = reduced(other, normal(2048, seed=9 + world.rank))
    return (
        bool(first[hurt].isnan().all()) and bool(first[spared].isfinite().all()),
        is_clean,
        bool(second.isfinite().all()),
        torch.equal(second, resumed),
    )


def test_what_is_not_finite_is_seen_and_does_not_stay() -> None:
    assert on_ranks(4, poisoned) == [(True, True, True, True)] * 4


def complaints(world: World) -> list[str]:
    """What is refused, as one line each."""
    groups = node_groups(2)
    gradient, output = torch.zeros(16), torch.zeros(4)

    def message(function: Callable[[], object], error: type[TandemError]) -> str:
        with pytest.raises(error) as caught:
            function()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    fed = QuantizedReduceScatter(*groups, bits_intra=4, error_feedback=True)
    reduced(fed, gradient)
    plain = QuantizedReduceScatter(*groups)
    crossed = QuantizedReduceScatter(groups[1], groups[0])
    gather = QuantizedAllGather((3,), 4)
    return [
        message(lambda: node_groups(3), ConfigError),
        message(lambda: plain(output, gradient, group(), dist.ReduceOp.AVG), ConfigError),
        message(lambda: plain(output, gradient, groups[0], SUM), ConfigError),  # type: ignore[arg-type]
        message(lambda: plain(output.long(), gradient.long(), group(), SUM), ShapeError),
        message(lambda: QuantizedReduceScatter(*groups, bits_inter=2), ConfigError),
        message(lambda: reduced(fed, torch.zeros(32)), ShapeError),
        message(lambda: gather(gradient, output, group()), ShapeError),
        message(lambda: crossed(output, gradient, group(), SUM), ConfigError)
        if world.rank in (1, 2)
        else "place 1 of rank 2",
    ]


def test_what_cannot_be_right_is_refused() -> None:
    parts = (
        "ranks_per_node must divide the ranks; got 3 of 4",
        "must sum; got",
        "must be the 2 ranks, node by node; got 2 nodes of 2",
        "float32, bfloat16 or float16; got torch.int64",
        "bits must be 8 or 4; got 2",
        "the same gradients each time; got (4, 8) after (4, 4)",
        "add up to the 4 numbers",
        "node by node; got 2 nodes of 2 and place",
    )
    for rank, lines in enumerate(on_ranks(4, complaints)):
        for part, line in zip(parts[: 8 if rank in (1, 2) else 7], lines, strict=False):
            assert part in line


def gathered(world: World) -> list[bool]:
    runs = (300, 5, 0, 40)
    comm = QuantizedAllGather(runs, 4)
    shares = [normal(345, seed=rank) for rank in range(4)]
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        output = comm.allocate((4 * 345,), dtype=dtype, device=torch.device("cpu"))
        # As FSDP2 does: the input is the rank's part of the output.
        own = output.narrow(0, 345 * world.rank, 345)
        own.copy_(shares[world.rank])
        assert comm(output_tensor=output, input_tensor=own, group=group(), async_op=False) is None
        whole = torch.stack(shares).to(dtype)
        want = dequantize(*quantize(whole, INT8, runs), 345, INT8, dtype, runs)
        found.append(torch.equal(output.view(4, -1), want))
    # Smaller groups, and bytes of a unit of mixed dtypes, travel as they are.
    intra, _ = node_groups(2)
    assert intra is not None
    output = torch.empty(2 * 345)
    comm(output_tensor=output, input_tensor=shares[world.rank], group=intra)
    first = world.rank // 2 * 2
    found.append(torch.equal(output, torch.cat(shares[first : first + 2])))
    content = shares[world.rank].view(torch.uint8)
    bytes_out = torch.empty(4 * content.numel(), dtype=torch.uint8)
    comm(output_tensor=bytes_out, input_tensor=content, group=group())
    found.append(torch.equal(bytes_out.view(torch.float32), torch.cat(shares)))
    return found


def test_every_rank_gets_the_same_bits_its_own_share_included() -> None:
    assert on_ranks(4, gathered) == [[True] * 5] * 4


VOCABULARY = 128


@dataclass(frozen=True)
class Plan:
    """What travels how; reshard: FSDP2's reshard_after_forward of the blocks."""

    weights: bool = False
    bits: tuple[int, int] | None = None
    reshard: bool | int = True
    feedback: bool = False
    dtype: torch.dtype = torch.float32


def llama(width: int = 128) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip


def split(model: LlamaForCausalLM, plan: Plan, world: World) -> list[FSDPModule]:
    """The model over the ranks, each unit with collectives of its own."""
    mesh = init_device_mesh("cpu", (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=plan.dtype, reduce_dtype=torch.float32)
    groups = node_groups(world.ranks_per_node)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=plan.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
        parameters = unit_parameters(unit)
        if plan.weights:
            numels = shard_numels(parameters, world.size)
            unit.set_custom_all_gather(QuantizedAllGather(numels, world.size))  # type: ignore[arg-type]
        if plan.bits:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            comm = QuantizedReduceScatter(
                *groups, bits_intra=plan.bits[0], bits_inter=plan.bits[1],
                error_feedback=plan.feedback, numels=shard_numels(trained, world.size),
            )  # fmt: skip
            unit.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
    return units


def batch(world: World, seed: int) -> Tensor:
    tokens = torch.randint(3, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(seed))
    return tokens[world.rank :: world.size]


def loss_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Divided by all ranks' count, as gradients are summed."""
    return model(input_ids=tokens, labels=tokens).loss / dist.get_world_size()


@dataclass(frozen=True)
class Seen:
    """What one step showed on one rank."""

    forward: Total
    backward_gathers: Total
    reduces: Total
    gradients: dict[str, Tensor]
    weights: list[Tensor]


def one_step(world: World, plan: Plan) -> Seen:
    model = llama()
    units = split(model, plan, world)
    with counting_traffic(world.ranks_per_node) as traffic:
        with traffic.phase("forward"):
            loss = loss_of(model, batch(world, 1))
        with traffic.phase("backward"):
            loss.backward()
    assert not traffic.unknown
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    for unit in units:
        unit.unshard()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return Seen(
        traffic.total("all_gather", "forward"),
        traffic.total("all_gather", "backward"),
        Total(
            *(
                getattr(traffic.total("reduce_scatter"), name)
                + getattr(traffic.total("all_to_all"), name)
                for name in ("count", "buffer_bytes", "sent_bytes", "inter_node_bytes")
            )
        ),
        gradients,
        weights,
    )


PLANS = {
    "plain": Plan(),
    "qwz": Plan(weights=True),
    "qgz 8/8": Plan(bits=(8, 8)),
    "qgz 8/4": Plan(bits=(8, 4)),
    "qgz 4/4": Plan(bits=(4, 4)),
    "all": Plan(weights=True, bits=(8, 8), reshard=2),
    "bf16": Plan(dtype=torch.bfloat16),
    "all, bf16": Plan(weights=True, bits=(8, 8), reshard=2, dtype=torch.bfloat16),
}


def all_plans(world: World) -> dict[str, Seen]:
    return {name: one_step(world, plan) for name, plan in PLANS.items()}


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Seen]]:
    """One step of every plan, by rank."""
    return on_ranks(4, all_plans, ranks_per_node=2)


def test_fewer_bytes_travel(steps: list[dict[str, Seen]]) -> None:
    for seen in steps:
        plain, qwz, both = seen["plain"], seen["qwz"], seen["all"]
        assert plain.forward.count == qwz.forward.count == 3
        for name in ("forward", "backward_gathers"):
            before, after = getattr(plain, name), getattr(qwz, name)
            assert before.sent_bytes > 3.9 * after.sent_bytes
            assert before.inter_node_bytes > 3.9 * after.inter_node_bytes
        assert plain.forward.sent_bytes > 3.9 * both.forward.sent_bytes
        assert both.backward_gathers.count == 2, "every block is gathered again, not the rest"
        assert both.backward_gathers.sent_bytes > 0
        assert both.backward_gathers.inter_node_bytes == 0
        for name in ("qgz 8/8", "all"):
            assert plain.reduces.sent_bytes > 3.9 * seen[name].reduces.sent_bytes
            # Only the node's sum goes between nodes: half of the numbers, a quarter of the bytes.
            assert plain.reduces.inter_node_bytes > 7.8 * seen[name].reduces.inter_node_bytes
        assert plain.reduces.inter_node_bytes > 15 * seen["qgz 8/4"].reduces.inter_node_bytes
        assert plain.reduces.sent_bytes > 7.5 * seen["qgz 4/4"].reduces.sent_bytes
        narrow = seen["bf16"].forward.sent_bytes / seen["all, bf16"].forward.sent_bytes
        assert 1.95 < narrow < 2


def test_bytes_are_those_of_codes_and_scales(steps: list[dict[str, Seen]]) -> None:
    model = llama()
    units = [list(block.parameters()) for block in model.model.layers]
    inside = {id(parameter) for unit in units for parameter in unit}
    units.append([p for p in model.parameters() if id(p) not in inside])
    share = [[p.numel() // 4 for p in unit] for unit in units]
    assert all(p.shape[0] % 4 == 0 for p in model.parameters())
    row = sum(sum(n + 4 * math.ceil(n / 256) for n in numels) for numels in share)
    seen = steps[0]
    assert seen["qwz"].forward.sent_bytes == 3 * row
    # To the one peer inside the node 2 rows, to the one between nodes 1.
    assert seen["qgz 8/8"].reduces.sent_bytes == 3 * row
    assert seen["qgz 8/8"].reduces.inter_node_bytes == row
    assert seen["plain"].forward.sent_bytes == 3 * 4 * sum(map(sum, share))


def test_gradients_err_within_bounds(steps: list[dict[str, Seen]]) -> None:
    def error(name: str, plain: str = "plain") -> float:
        got, want = steps[0][name].gradients, steps[0][plain].gradients
        return relative(
            torch.cat([got[key].flatten() for key in want]),
            torch.cat([want[key].flatten() for key in want]),
        )

    assert error("qwz") < 0.03
    assert 0.002 < error("qgz 8/8") < 0.015
    assert 0.05 < error("qgz 8/4") < 0.16
    assert 0.08 < error("qgz 4/4") < 0.2
    assert error("all") < 0.035
    assert error("all, bf16", "bf16") < 0.05
    for name, parameter in steps[0]["plain"].gradients.items():
        assert relative(steps[0]["qgz 8/8"].gradients[name], parameter) < 0.03, name


def test_every_rank_computes_with_the_same_bits(steps: list[dict[str, Seen]]) -> None:
    for name in PLANS:
        first = steps[0][name]
        for other in steps[1:]:
            for a, b in zip(first.weights, other[name].weights, strict=True):
                assert torch.equal(a, b), name
    exact, rounded = steps[0]["plain"].weights, steps[0]["qwz"].weights
    assert any(not torch.equal(a, b) for a, b in zip(exact, rounded, strict=True))


class Lora(nn.Module):
    """A frozen linear layer and an adapter of rank 2: over 4 ranks, two hold none of `down`."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapters(world: World) -> tuple[list[int], float, float, float]:
    """Numbers of `down` held here; gradient errors of int8, and of int4's mean over 30 steps."""
    gradients: list[Tensor] = []
    empty: list[int] = []
    int8 = Plan(weights=True, bits=(8, 8), reshard=2)
    for plan in (Plan(), int8, Plan(bits=(4, 4), feedback=True)):
        model = llama(64).requires_grad_(False)
        for block in model.model.layers:
            block.self_attn.q_proj = Lora(block.self_attn.q_proj)
        split(model, plan, world)
        trained = [p for p in model.parameters() if p.requires_grad]
        empty = [p.to_local().numel() for p in trained if p.shape[0] == 2]
        steps = 30 if plan.feedback else 1
        for _ in range(steps):
            loss_of(model, batch(world, 1)).backward()
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in trained]) / steps)
    want, got, mean = gradients
    return empty, relative(got, want), relative(mean, want), float(want.norm())


def test_adapters_of_which_some_ranks_hold_nothing() -> None:
    found = on_ranks(4, adapters, ranks_per_node=2)
    assert [held for held, *_ in found] == [[64, 64], [64, 64], [0, 0], [0, 0]]
    for _, int8, int4_mean, norm in found:
        assert norm > 0
        assert int8 < 0.04
        assert int4_mean < 0.02


def trained(world: World, plans: list[Plan]) -> list[float]:
    """The last loss of 60 steps over the same batch, by plan."""
    last = []
    for plan in plans:
        model = llama(64)
        split(model, plan, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(60):
            loss = loss_of(model, batch(world, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        last.append(float(total))
    return last


@pytest.mark.slow
def test_training_converges_as_without() -> None:
    plans = [
        Plan(),
        Plan(weights=True, bits=(8, 8), reshard=2),
        Plan(weights=True, bits=(4, 4), reshard=2, feedback=True),
    ]
    (plain, int8, int4), *others = on_ranks(4, trained, plans, ranks_per_node=2)
    assert plain < 0.1
    assert int8 < 1.1 * plain
    assert int4 < 1.25 * plain
    assert others == [[plain, int8, int4]] * 3
