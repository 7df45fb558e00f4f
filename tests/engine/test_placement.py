"""Training over ranks against one process: every stage, accumulation, adapters, both roles."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tandem.config.engine import EngineSettings, engine_settings
from tandem.config.schema import (
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
)
from tandem.engine import rollouts
from tandem.engine.ema import MovingAverage
from tandem.engine.forward import (
    rank_micro_batches,
    rank_micro_batches_of,
    response_logprobs,
    scored,
    token_values,
    whole_weights,
)
from tandem.engine.learner import Learner
from tandem.engine.placement import prepare_for_training, shard_model
from tandem.engine.rollouts import shared_rollout
from tandem.engine.shard_plan import shard_plan
from tandem.generation.stops import Stops
from tandem.models.twin import shares_every_tensor
from tandem.parallel.dtensor import local, whole
from tandem.parallel.shard import ShardPlan
from tandem.parallel.world import World
from tandem.types import PromptRow, Rollout, Source, TokenBatch
from tests.models.families import EOS, PAD, ragged_batch, tiny_model, tiny_scalar
from tests.ranks import on_ranks

Item = TypeVar("Item")

LENGTHS = (9, 5, 12, 3, 7, 30, 4, 4, 11)
SETTINGS = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup=0)


def trained(
    world: World,
    family: str,
    stage: int,
    rank: int,
    micro_batch: int,
    role: str = "actor",
    replicas: int = 1,
) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, gradient norms, weights and average of three steps."""
    config = RunConfig(lora=LoraConfig(rank=rank), parallel=ParallelConfig(replicas=replicas))
    model = tiny_model(family) if role == "actor" else tiny_scalar(family)
    prepare_for_training(model, engine_settings(config), seed=5)
    model.eval()  # some families bring dropout
    shard_model(model, shard_plan(stage, engine_settings(config), world, trained=True), world)
    with torch.no_grad():  # leaves weights whole, which must not be taken for the trained ones
        model(torch.ones(1, 3, dtype=torch.long))
    learner = Learner(role, model, replace(SETTINGS, lora_learning_rate=1e-2), num_steps=3)
    average = MovingAverage(model, 0.5)
    losses, norms = [], []
    for step in range(3):
        batch = ragged_batch(LENGTHS, seed=step)
        count = batch.num_response_tokens
        total = 0.0
        for rows, part in rank_micro_batches_of(batch, micro_batch, world):
            chosen = batch.select(rows)
            if role == "actor":
                loss = -response_logprobs(model, chosen)[0].sum()
            else:
                values = token_values(model, chosen)[chosen.response_mask]
                loss = (values - 1.0).square().sum()
            learner.backward(loss, count, weight=part.weight, is_last=part.is_last)
            total += part.weight * float(loss.detach())
        losses.append(world.all_reduce_sum({"loss": total})["loss"] / count)
        norms.append(learner.step())
        average.update()
    weights = {name: whole(weight).clone() for name, weight in learner.weights().items()}
    shadow = {name: whole(value).clone() for name, value in average.state_tensors().items()}
    return losses, norms, weights, shadow


Trained = tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]


@cache
def trained_alone(family: str, adapters: int = 0, role: str = "actor") -> Trained:
    """By one process with whole weights, which every stage is compared with; made once."""
    return trained(World(), family, 0, adapters, 1000, role)


def assert_same(
    theirs: Trained,
    alone: Trained,
) -> None:
    assert theirs[0] == pytest.approx(alone[0], rel=1e-5)
    assert theirs[1] == pytest.approx(alone[1], rel=1e-5)
    for ours, reference in ((theirs[2], alone[2]), (theirs[3], alone[3])):
        assert ours.keys() == reference.keys()
        for name, weight in reference.items():
            assert ours[name].shape == weight.shape
            # AdamW turns a gradient near 0 into a step of the learning rate, whatever its sign;
            # a bias of keys has no other.
            apart = (ours[name] - weight).abs()
            assert float(apart.mean()) < (1e-3 if name.endswith("bias") else 2e-5), name
            assert float(apart.max()) < 3e-3, name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("adapters", [0, 2])
def test_two_ranks_train_as_one(stage: int, adapters: int) -> None:
    alone = trained_alone("llama", adapters)
    for result in on_ranks(2, trained, "llama", stage, adapters, 20):
        assert_same(result, alone)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_four_ranks_train_a_critic_as_one(stage: int) -> None:
    alone = trained_alone("llama", role="critic")
    for result in on_ranks(4, trained, "llama", stage, 0, 15, "critic"):
        assert_same(result, alone)


@pytest.mark.parametrize(("stage", "adapters"), [(1, 0), (2, 0), (3, 0), (3, 2)])
def test_four_ranks_in_two_replicas_train_as_one(stage: int, adapters: int) -> None:
    alone = trained_alone("llama", adapters)
    found = on_ranks(4, trained, "llama", stage, adapters, 15, "actor", 2, ranks_per_node=2)
    for result in found:
        assert_same(result, alone)
        assert result[:2] == found[0][:2]  # replicas do not drift apart
        for ours, theirs in ((result[2], found[0][2]), (result[3], found[0][3])):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("family", ["opt", "gpt2", "gemma2", "gpt_neox"])
def test_every_family_is_split_alike(family: str) -> None:
    alone = trained_alone(family)
    for result in on_ranks(3, trained, family, 3, 0, 20):
        assert_same(result, alone)


def scores(world: World, stage: int) -> Tensor:
    model = tiny_model("llama")
    if stage == 3:
        model.requires_grad_(False)
    shard_model(
        model, shard_plan(stage, engine_settings(RunConfig()), world, trained=stage < 3), world
    )
    batch = ragged_batch(LENGTHS)

    def forward(part: TokenBatch) -> tuple[Tensor, ...]:
        return response_logprobs(model, part, with_entropy=True)

    return torch.stack(scored(batch, 25, forward, [model]))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_scores_are_bitwise_those_of_one_process(stage: int) -> None:
    alone = scores(World(), stage)
    for result in on_ranks(3, scores, stage):
        assert torch.equal(result, alone)


def prompts(lengths: tuple[int, ...]) -> list[PromptRow]:
    return [
        PromptRow(tuple(4 + (i * j) % 90 for j in range(n)), (), {}, Source("x", "x", i))
        for i, n in enumerate(lengths)
    ]


def sampled(sampling: SamplingConfig) -> EngineSettings:
    return replace(engine_settings(RunConfig(seed=1)), sampling=sampling)


def rolled(world: World, stage: int, lengths: tuple[int, ...]) -> tuple[list[object], bool, int]:
    model = tiny_model("llama").eval()
    shard_model(model, shard_plan(stage, engine_settings(RunConfig()), world, trained=True), world)
    sampling = SamplingConfig(max_new_tokens=12, samples_per_prompt=2)
    stops = Stops((EOS,), PAD, lambda ids: " ".join(map(str, ids)))
    with torch.no_grad(), whole_weights(model):
        shares = shares_every_tensor(model)
        rollout = shared_rollout(model, prompts(lengths), sampled(sampling), stops, step=2)
    held = sum(local(p).untyped_storage().size() for p in model.parameters())
    kept = [
        rollout.batch.token_ids,
        rollout.batch.response_mask,
        rollout.batch.attention_mask,
        rollout.rollout_logprobs,
        rollout.sampled_logprobs,
        rollout.rollout_entropy,
        rollout.finished,
        rollout.responses,
        [row.source.line for row in rollout.prompts],
    ]
    return kept, shares, held


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("lengths", [(3, 9, 4, 17, 2), (5, 2)])
def test_a_rollout_is_bitwise_that_of_one_process(stage: int, lengths: tuple[int, ...]) -> None:
    alone, _, whole_bytes = rolled(World(), stage, lengths)
    for kept, shares, held in on_ranks(3, rolled, stage, lengths):
        assert shares
        for ours, reference in zip(kept, alone, strict=True):
            if isinstance(reference, Tensor):
                assert torch.equal(ours, reference)
            else:
                assert ours == reference
        if stage:
            assert held < whole_bytes / 2  # gathered weights were given back


def rolled_by_a_straggler(world: World) -> tuple[float, ...]:
    if world.rank == 1:
        quick = rollouts.generate

        def slow(*arguments: Any, **settings: Any) -> Rollout:
            time.sleep(0.4)
            return quick(*arguments, **settings)

        rollouts.generate = slow
    model = tiny_model("llama").eval()
    shard_model(model, shard_plan(0, engine_settings(RunConfig()), world, trained=True), world)
    sampling, stops = SamplingConfig(max_new_tokens=2), Stops((EOS,), PAD, str)
    with torch.no_grad():
        rollout = shared_rollout(model, prompts((3, 4)), sampled(sampling), stops, step=2)
    return rollout.rank_seconds


def test_every_rank_knows_who_was_slow() -> None:
    for seconds in on_ranks(2, rolled_by_a_straggler):
        assert seconds[1] > seconds[0] + 0.3


def test_deal_gives_every_row_once_and_as_many_micro_batches_to_all() -> None:
    lengths = [7, 100, 3, 3, 50, 8, 1]
    for size in (1, 2, 3, 5, 9):
        dealt = [rank_micro_batches(lengths, 60, World(rank, size)) for rank in range(size)]
        assert len({len(parts) for parts in dealt}) == 1
        rows = [row for parts in dealt for part in parts if part.weight for row in part.rows]
        assert sorted(rows) == list(range(len(lengths)))
        for parts in dealt:
            assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
            for part in parts:
                assert sum(lengths[i] for i in part.rows) <= 60 or len(part.rows) == 1
    loads = [
        sum(
            lengths[i]
            for part in rank_micro_batches(lengths, 60, World(r, 2))
            if part.weight
            for i in part.rows
        )
        for r in range(2)
    ]
    assert abs(loads[0] - loads[1]) <= 28  # 100 tokens against all the others' 72


class ManyRanks(World):
    """One of 1,024 ranks without the others: what it collects, all of them say."""

    def all_gather_object(self, item: Item) -> list[Item]:
        return [item] * self.size


@pytest.mark.parametrize("parts", [1, 8])
def test_a_rollout_is_dealt_once_however_many_the_ranks(
    monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    world = ManyRanks(rank=1000, size=1024, ranks_per_node=8)
    rows = prompts(tuple(3 + number % 97 for number in range(8192)))
    answered: list[PromptRow] = []
    dealt: list[list[list[int]]] = []

    def answers(model: object, mine: list[PromptRow], *others: object, **settings: object) -> None:
        answered.extend(mine)

    def exchanged(own: None, rows: object, hands: list[list[int]], *others: object) -> Rollout:
        dealt.append(hands)
        none = torch.zeros(0, 0)
        batch = TokenBatch(none.long(), none.bool(), none.bool())
        return Rollout(batch, none, none, none, none.bool(), (), (), none.long())

    monkeypatch.setattr("tandem.engine.rollouts.generate", answers)
    monkeypatch.setattr("tandem.engine.rollouts._exchanged", exchanged)
    group: Any = SimpleNamespace(
        size=parts, batches=World(1000 // parts, 1024 // parts), lowest=lambda number: number
    )
    start = time.process_time()
    model = tiny_model("llama")
    shard_model(model, ShardPlan(), world)
    shared_rollout(
        model,
        rows,
        sampled(SamplingConfig(max_new_tokens=5)),
        Stops((EOS,), PAD, str),
        step=2,
        group=group if parts > 1 else None,
    )
    assert time.process_time() - start < 1.0  # of the processor; dealing for each rank took minutes
    assert sorted(row for hand in dealt[0] for row in hand) == list(range(8192))
    assert [bool(hand) for hand in dealt[0]] == [rank % parts == 0 for rank in range(1024)]
    assert answered == [rows[i] for i in dealt[0][1000]]
    loads = [sum(len(rows[i]) for i in hand) for hand in dealt[0] if hand]
    assert max(loads) - min(loads) <= 99
