"""Prompt groups over micro-batches and ranks: what stays together, and the same gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.config.engine import engine_settings
from tandem.config.schema import OptimizerConfig, RunConfig
from tandem.engine.forward import (
    groups_of,
    rank_micro_batches,
    response_logprobs,
    scored,
    token_values,
)
from tandem.engine.learner import Learner
from tandem.engine.placement import prepare_for_training, shard_model
from tandem.engine.shard_plan import shard_plan
from tandem.engine.update import LossTerm, MicroBatchLoss, _accumulated
from tandem.models import packed
from tandem.models.beginnings import PromptGroup
from tandem.parallel.dtensor import whole
from tandem.parallel.world import World
from tandem.types import TokenBatch
from tests.models.alike_rows import PROMPTS, beginning_batch, grouped_batch
from tests.models.families import tiny_model, tiny_scalar
from tests.ranks import on_ranks

ROWS = [(13, (9, 1, 17, 4)), (3, (6,)), (33, (2, 2, 5)), (1, (4, 12))]


def micro_batches(
    lengths: list[int], max_tokens: int, groups: list[PromptGroup], size: int = 1
) -> list[list[list[int]]]:
    """The rows of each rank's micro-batches."""
    return [
        [
            part.rows
            for part in rank_micro_batches(lengths, max_tokens, World(rank, size), groups)
            if part.weight
        ]
        for rank in range(size)
    ]


def test_a_group_fills_a_micro_batch_by_what_its_rows_add() -> None:
    groups = [PromptGroup([0, 1, 2], 100), PromptGroup([3], 10), PromptGroup([4, 5], 20)]
    lengths = [110, 120, 105, 30, 25, 28]
    # 100 + 10 + 20 + 5 tokens, 30 tokens, and 20 + 5 + 8.
    assert micro_batches(lengths, 135, groups) == [[[0, 1, 2], [4, 5, 3]]]
    assert micro_batches(lengths, 134, groups) == [[[0, 1], [2], [4, 5, 3]]]
    assert micro_batches(lengths, 10, groups) == [[[1], [0], [2], [3], [5], [4]]]
    assert micro_batches(lengths, 250, []) == [[[1, 0], [2, 3, 5, 4]]]


def test_ranks_share_the_rows_of_a_large_group() -> None:
    rows = list(range(8))
    ranks = micro_batches([40] * 8, 400, [PromptGroup(rows, 20)], size=4)
    assert sorted(row for rank in ranks for part in rank for row in part) == rows
    assert [sum(map(len, rank)) for rank in ranks] == [2] * 4


def test_every_row_comes_once() -> None:
    batch = grouped_batch(ROWS)
    groups = groups_of(batch, [tiny_model("llama")])
    lengths = batch.lengths().tolist()
    for size in (1, 2, 3):
        for max_tokens in (1, 30, 64, 1000):
            ranks = micro_batches(lengths, max_tokens, groups, size)
            found = sorted(row for rank in ranks for part in rank for row in part)
            assert found == list(range(len(batch)))
            shared = {row: group.prompt_tokens for group in groups for row in group.rows}
            for part in (part for rank in ranks for part in rank if len(part) > 1):
                prompts = {row: group for group in groups for row in group.rows}
                tokens = sum(lengths[row] - shared[row] for row in part)
                tokens += sum({id(prompts[row]): shared[row] for row in part}.values())
                assert tokens <= max_tokens


def test_a_model_that_shares_nothing_has_no_groups() -> None:
    model, batch = tiny_model("llama", attention_dropout=0.1), grouped_batch(ROWS)
    model.config.attention_dropout = 0.1
    assert len(groups_of(batch, [model])) == len(ROWS)
    assert groups_of(batch, [model.train()]) == []


def learned(
    world: World, stage: int, max_tokens: int, batch: TokenBatch
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Gradients of both terms' loss, and the log-probs and values of a scoring pass."""
    settings = engine_settings(RunConfig())
    models = [tiny_model("llama"), tiny_scalar("llama")]
    for model in models:
        prepare_for_training(model, settings, seed=5)
        shard_model(model, shard_plan(stage, settings, world, trained=True), world)
    actor, critic = models
    numbers = scored(
        batch,
        max_tokens,
        lambda part: (response_logprobs(actor, part)[0], token_values(critic, part)),
        models,
    )
    learner = Learner("actor", actor, OptimizerConfig(learning_rate=0.1), num_steps=1)

    def loss(rows: list[int]) -> MicroBatchLoss:
        part = batch.select(torch.tensor(rows))
        return MicroBatchLoss(response_logprobs(actor, part)[0].square().sum())

    term = LossTerm(batch.lengths().tolist(), batch.num_response_tokens, loss, batch=batch)
    _accumulated(learner, term, max_tokens, is_last=True)
    learner.shards.finish_gradients(list(actor.parameters()))
    gradients = {
        name: whole(p.grad).clone() for name, p in actor.named_parameters() if p.grad is not None
    }
    return gradients, *numbers


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 0), (2, 2), (2, 3)])
@pytest.mark.parametrize("max_tokens", [30, 500])
def test_any_ranks_and_micro_batches_give_the_unshared_numbers(
    size: int, stage: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_unshared_numbers(grouped_batch(ROWS), size, stage, max_tokens, monkeypatch)


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 0), (2, 3)])
@pytest.mark.parametrize("max_tokens", [70, 500])
def test_so_do_prompts_that_begin_alike(
    size: int, stage: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = beginning_batch(PROMPTS["in each other"])
    require_unshared_numbers(batch, size, stage, max_tokens, monkeypatch)


def require_unshared_numbers(
    batch: TokenBatch, size: int, stage: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_ranks(size, learned, stage, max_tokens, batch)
    monkeypatch.setattr(packed, "shares_prompts", lambda model: False)
    gradients, *numbers = learned(World(), 0, 60, batch)
    for theirs, *others in found:
        for ours, number in zip(others, numbers, strict=True):
            assert torch.allclose(ours, number, atol=1e-6)
        assert theirs.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert float((theirs[name] - gradient).norm()) <= 2e-6 * float(gradient.norm()), name
