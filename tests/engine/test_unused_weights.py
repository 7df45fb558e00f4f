"""Weights that a step's forwards do not use stay as they are, on one rank and over several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.config.optimizer import OptimizerConfig
from tandem.config.parallel import ParallelConfig
from tandem.engine.learner import Learner
from tandem.parallel.dtensor import whole
from tandem.parallel.shard import ShardPlan, shard
from tandem.parallel.world import World
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
    """A layer, and one beside it that nothing ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
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
    world: World, stage: int, kind: str, *, spare_on: int | None = None
) -> dict[str, Tensor]:
    """The weights after three steps, and the moments' counts of steps.

    Args:
        spare_on: the rank that alone uses the spare matrix; None: all do.
    """
    model: Any = Model()
    shards = shard(model, list(model.blocks) if stage else [], ShardPlan(stage), world)
    settings = OptimizerConfig(learning_rate=0.01, weight_decay=0.5, max_grad_norm=0.5)
    learner = Learner("x", model, settings, parallel=ParallelConfig(**KINDS[kind]))
    for step, (second, spare) in enumerate(USED):
        spare = spare and spare_on in (None, world.rank)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        mine = x[world.rank :: world.size]
        loss = shards.forward(
            lambda mine=mine, second=second, spare=spare: model(mine, second, spare)
        )
        learner.backward(loss.square().sum(), len(x))
        learner.step()
    state = learner.state_tensors()
    steps = {name: value for name, value in state.items() if name.startswith("step.")}
    return {name: whole(value) for name, value in (learner.weights() | steps).items()}


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
    for stage in range(4):
        for found in on_ranks(2, trained, stage, kind):
            assert_unused_stay(found)
            for name, value in alone.items():
                if name in found:  # torch makes no state for what never had a gradient
                    # A sum's last bit may round a packed moment to the other neighbor.
                    near = 2e-3 if "moments" in kind else 1e-5
                    torch.testing.assert_close(found[name], value, rtol=1e-5, atol=near)


def with_a_spare(world: World, kind: str) -> dict[str, Tensor]:
    return trained(world, 0, kind, spare_on=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_one_rank_moves_the_weight_on_all(kind: str) -> None:
    first, second = on_ranks(2, with_a_spare, kind)
    assert_unused_stay(first)
    assert not torch.equal(first["spare.weight"], Model().spare.weight)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
