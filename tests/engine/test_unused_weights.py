"""Weights that a step's forwards do not use stay as they are, on one rank and over several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.config.engine import engine_settings
from tandem.config.schema import OptimizerConfig, ParallelConfig, RunConfig
from tandem.engine.forward import rank_micro_batches_of, response_logprobs
from tandem.engine.learner import Learner
from tandem.engine.placement import Placement
from tandem.models.load import new_causal_lm
from tandem.parallel.dtensor import whole
from tandem.parallel.shard import ShardPlan, shard
from tandem.parallel.world import World
from tests.models.decoders import decoder_config
from tests.models.families import ragged_batch
from tests.ranks import on_ranks

WIDTH = 16
USED = ((True, True), (False, True), (True, False))
"""Whether each step uses the second block and the spare matrix."""
KINDS: dict[str, dict[str, Any]] = {
    "torch's own": {},
    "bf16 moments": {"optimizer_states": "bf16"},
    "8-bit moments": {"optimizer_states": "8bit"},
    "on the host": {"offload": ("optimizer",)},
}


class Block(nn.Module):
    """A layer, and one beside it that nothing uses by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.uses_idle = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.idle(x) if self.uses_idle else x
        return x + self.layer(x).tanh()


class Model(nn.Module):
    """Two blocks, of which the second may be skipped, and a matrix that may not be used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, second: bool, spare: bool) -> Tensor:
        x = self.blocks[0](x)
        x = self.blocks[1](x) if second else x
        x = self.spare(x) if spare else x
        return self.head(x)


def trained(
    world: World,
    stage: int,
    kind: str,
    *,
    spare_in: tuple[int, ...] = (0, 1, 2, 3),
    **plan: Any,
) -> dict[str, Tensor]:
    """The weights after three steps of four micro-batches, and the moments' counts of steps.

    Args:
        spare_in: the micro-batches that use the spare matrix, where a step does.
        plan: of the shards.
    """
    model: Any = Model()
    blocks = list(model.blocks) if stage else []
    shards = shard(model, blocks, ShardPlan(stage, **plan), world)
    settings = OptimizerConfig(learning_rate=0.01, weight_decay=0.5, max_grad_norm=0.5)
    learner = Learner("x", model, settings, parallel=ParallelConfig(**KINDS[kind]))
    mine = range(world.rank, 4, world.size)
    for step, (second, spare) in enumerate(USED):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        for part in mine:
            # A value for each call: the split model runs it as its forward.
            forward = partial(
                model,
                x[part::4].to(plan.get("gather_dtype") or x.dtype),
                second,
                spare and part in spare_in,
            )
            loss = shards.forward(forward).float().square().sum()
            learner.backward(loss, len(x), is_last=part == mine[-1])
        learner.step()
    state = learner.state_tensors()
    steps = {name: value for name, value in state.items() if name.startswith("step.")}
    return {name: whole(value) for name, value in (learner.weights() | steps).items()}


def of_each(world: World, function: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> Any:
    """What a function returns for each case, by the same ranks: a process's first model takes half
    of what a case does."""
    return [function(world, *case) for case in cases]


def assert_unused_stay(found: dict[str, Tensor]) -> None:
    for name, value in Model().named_parameters():
        if ".idle." in name:
            assert torch.equal(found[name], value), name
            assert found.get(f"step.{name}", torch.zeros(())) == 0
        else:
            times = sum(second for second, _ in USED) if "blocks.1" in name else len(USED)
            times = sum(spare for _, spare in USED) if "spare" in name else times
            assert found[f"step.{name}"] == times, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_without_gradient_stays_at_every_stage(kind: str) -> None:
    alone = trained(World(), 0, kind)
    assert_unused_stay(alone)
    for by_stage in on_ranks(2, of_each, trained, [(stage, kind) for stage in range(4)]):
        for found in by_stage:
            assert_unused_stay(found)
            for name, value in alone.items():
                if name in found:  # torch makes no state for what never had a gradient
                    # A sum's last bit may round a packed moment to the other neighbor.
                    near = 2e-3 if "moments" in kind else 1e-5
                    torch.testing.assert_close(found[name], value, rtol=1e-5, atol=near)


BF16 = {"gather_dtype": torch.bfloat16}
LAYOUTS: dict[tuple[int, int], list[dict[str, Any]]] = {
    (2, 2): [
        *({"stage": stage} for stage in range(4)),
        *({"stage": stage, **BF16} for stage in (1, 2, 3)),
    ],
    (4, 4): [{"stage": 2, "replicas": 2}],
    (2, 1): [{"stage": 2, "gradient_bits": bits} for bits in (8, 4)],
}
"""Ranks and ranks per node -> what the plans of the shards say."""


def of_one_rank(world: World, kind: str, part: int, plan: dict[str, Any]) -> dict[str, Tensor]:
    return trained(world, kind=kind, spare_in=(part,), **plan)


@pytest.mark.parametrize("part", [1, 3])
@pytest.mark.parametrize(("ranks", "per_node"), LAYOUTS)
def test_a_gradient_of_one_rank_moves_the_weight_on_all(
    ranks: int, per_node: int, part: int
) -> None:
    """In its first or only in its last micro-batch; the others have none of this weight."""
    plans = LAYOUTS[ranks, per_node]
    cases = [("torch's own", part, plan) for plan in plans]
    alone = trained(World(), 0, "torch's own", spare_in=(part,))
    by_rank = on_ranks(ranks, of_each, of_one_rank, cases, ranks_per_node=per_node)
    for plan, *found in zip(plans, *by_rank, strict=True):
        # AdamW's first steps make much of a small gradient that is rounded or sent in few bits.
        exact = not plan.keys() & {"gather_dtype", "gradient_bits"}
        near = 8e-3 if plan.get("gradient_bits") == 4 else 2e-3
        assert_unused_stay(found[0])
        for name, value in found[0].items():
            if exact:
                torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-6)
            assert float((value - alone[name]).abs().mean()) < near, (plan, name)
            assert all(torch.equal(value, other[name]) for other in found), (plan, name)


@pytest.mark.parametrize("stage", [0, 3])
def test_every_optimizer_takes_a_gradient_of_one_rank(stage: int) -> None:
    cases = [(kind, 3, {"stage": stage}) for kind in KINDS]
    for kind, first, second in zip(KINDS, *on_ranks(2, of_each, of_one_rank, cases), strict=True):
        alone = trained(World(), 0, kind, spare_in=(3,))
        assert_unused_stay(first)
        assert not torch.equal(first["spare.weight"], Model().spare.weight)
        for name, value in first.items():
            assert torch.equal(value, second[name]), (kind, name)
            # A sum's last bit may round a packed moment to the other neighbor.
            near = 2e-3 if "moments" in kind else 1e-5
            torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=near)


def of_units_unused(world: World, stage: int) -> dict[str, Tensor]:
    """After two steps in which only the last of two rows uses what is trained of the first block,
    behind which the head is."""
    model: Any = Model()
    model.requires_grad_(False)
    for trained_here in (model.blocks[0].idle, model.head):
        trained_here.requires_grad_()
    shards = shard(model, list(model.blocks) if stage else [], ShardPlan(stage), world)
    learner = Learner("x", model, OptimizerConfig(learning_rate=0.01))
    for _ in range(2):
        for part in range(world.rank, 2, world.size):
            model.blocks[0].uses_idle = part == 1
            x = torch.ones(2, WIDTH)
            loss = shards.forward(partial(model, x, True, False)).square().sum()
            learner.backward(loss, 4.0, is_last=part + world.size >= 2)
        learner.step()
    return {name: whole(value) for name, value in learner.weights().items()}


def test_rows_of_one_rank_that_use_no_trained_weight_of_a_unit() -> None:
    """As those of adapters on deepseek_v4's compressors, whose lengths differ by layer."""
    alone = of_units_unused(World(), 0)
    assert not torch.equal(alone["blocks.0.idle.weight"], Model().blocks[0].idle.weight)
    for by_stage in on_ranks(2, of_each, of_units_unused, [(stage,) for stage in range(4)]):
        for found in by_stage:
            for name, value in alone.items():
                torch.testing.assert_close(found[name], value)


def gradients_of(world: World, stage: int) -> dict[str, Tensor]:
    """Of deepseek_v4, whose compressors take 6 and 12 tokens, over a row of 20 and one of 4."""
    rates = {"compressed_sparse_attention": 6, "heavily_compressed_attention": 12}
    source = new_causal_lm(decoder_config("deepseek_v4", compress_rates=rates), seed=0)
    parallel = ParallelConfig(actor_zero_stage=stage)
    place = Placement(engine_settings(RunConfig(parallel=parallel)), world)
    model = place.policy(source, trained=True, seed=0)
    learner = Learner("actor", model, OptimizerConfig(), parallel=parallel)
    batch = ragged_batch((20, 4))
    for rows, part in rank_micro_batches_of(batch, 20, world):
        loss = -response_logprobs(model, batch.select(rows))[0].sum()
        learner.backward(loss, 1.0, weight=part.weight, is_last=part.is_last)
    learner.sound_norm(learner.finished_gradients())
    named = model.named_parameters()
    return {name: whole(p.grad) for name, p in named if p.grad is not None}


def test_rows_shorter_than_a_compressor_takes_on_one_rank() -> None:
    alone = gradients_of(World(), 0)
    assert any("compressor" in name for name in alone)
    for by_stage in on_ranks(2, of_each, gradients_of, [(stage,) for stage in range(4)]):
        for found in by_stage:
            assert found.keys() == alone.keys()
            for name, value in alone.items():
                scale = float(value.abs().max())
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5 * scale)


def of_unused_rows(world: World, stage: int) -> dict[str, Tensor]:
    """After a step of rows that do not use the spare matrix, the only one trained, and of rows that
    do."""
    model: Any = Model()
    model.requires_grad_(False)
    model.spare.requires_grad_()
    shards = shard(model, list(model.blocks) if stage else [], ShardPlan(stage), world)
    learner = Learner("x", model, OptimizerConfig(learning_rate=0.01))
    for part in range(world.rank, 2, world.size):
        x = torch.ones(2, WIDTH)
        loss = shards.forward(partial(model, x, True, part == 1)).sum()
        learner.backward(loss, 4.0, is_last=part + world.size >= 2)
    learner.step()
    return {name: whole(value) for name, value in learner.weights().items()}


def test_rows_that_use_no_trained_weight_add_nothing() -> None:
    alone = of_unused_rows(World(), 0)
    assert not torch.equal(alone["spare.weight"], Model().spare.weight)
    for found in (*on_ranks(2, of_unused_rows, 0), of_unused_rows(World(), 3)):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value)


def test_rows_that_use_no_trained_weight_are_refused_where_ranks_wait_for_theirs() -> None:
    with pytest.raises(AssertionError, match="x: a micro-batch of a sharded model must use"):
        on_ranks(2, of_unused_rows, 2)


def of_another_torch(world: World, kind: str) -> None:
    """A step where FSDP2 does not look for its method on the group."""
    model: Any = Model()
    shards = shard(model, list(model.blocks), ShardPlan(2), world)
    for unit in shards.units:
        group: Any = unit._get_fsdp_state()._fsdp_param_group
        del group.post_backward
    parallel = ParallelConfig(**KINDS[kind])
    learner = Learner("x", model, OptimizerConfig(), parallel=parallel)
    loss = shards.forward(partial(model, torch.ones(2, WIDTH), True, True)).sum()
    learner.backward(loss, 4.0)
    learner.step()


@pytest.mark.parametrize("kind", ["torch's own", "on the host"])
def test_a_torch_that_reduces_in_another_way_is_refused(kind: str) -> None:
    with pytest.raises(AssertionError, match=r"which goes another way\. Use an earlier torch"):
        on_ranks(2, of_another_torch, kind)
