"""The four roles under ZeRO++ at 4 ranks as 2 nodes of 2: all see what training sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.traffic import counting_traffic
from tandem.config.lora import LoraConfig
from tandem.config.schema import ParallelConfig, RunConfig, SamplingConfig
from tandem.engine.forward import scored, whole_weights
from tandem.engine.hybrid import RLHFEngine
from tandem.models.twin import shares_every_tensor
from tandem.parallel.shard import shards_of
from tandem.parallel.world import World
from tandem.training.make_engine import make_engine
from tandem.types import PromptRow, Source, TokenBatch
from tests.models.families import tiny_model, tiny_scalar, tokenizer
from tests.ranks import on_ranks

ALL = ParallelConfig(
    actor_zero_stage=3,
    critic_zero_stage=3,
    zero_quantized_weights=True,
    zero_quantized_gradients=True,
    zero_hpz=True,
)
EXACT = replace(ALL, zero_quantized_weights=False)
SAMPLING = SamplingConfig(max_new_tokens=10, samples_per_prompt=2)
BASE = RunConfig(sampling=SAMPLING, device="cpu")


def prompts() -> list[PromptRow]:
    return [
        PromptRow(tuple(4 + (i * j) % 90 for j in range(n)), (), {}, Source("x", "x", i))
        for i, n in enumerate((3, 9, 4, 17, 2))
    ]


def engine(world: World, config: RunConfig) -> RLHFEngine:
    return make_engine(
        actor=tiny_model("llama"),
        reward_model=tiny_scalar("llama"),
        config=config,
        tokenizer=tokenizer(),
        reward_tokenizer=tokenizer(),
        world=world,
    )


def step(roles: RLHFEngine, batch: TokenBatch) -> None:
    """An update of the actor that makes its every log-prob likelier."""
    logprobs, _ = roles.actor_logprobs(batch, with_entropy=False)
    loss = -logprobs.sum()
    roles.actor_learner.backward(loss, batch.num_response_tokens * roles.world.size)
    roles.actor_learner.step()


def seen(world: World, config: RunConfig) -> dict[str, tuple[Tensor, ...]]:
    """Numbers of a rollout before an update and after: the sampler's, and a training forward's."""
    roles = engine(world, config)
    found = {}
    for moment in ("before", "after"):
        rollout = roles.rollout(prompts(), step=0)

        def forward(part: TokenBatch) -> tuple[Tensor, ...]:
            return roles.actor_logprobs(part, with_entropy=True)

        roles.actor.eval()
        logprobs, entropy = scored(rollout.batch, 60, forward, [roles.actor])
        numbers = roles.policy_numbers(rollout)
        found[moment] = (
            rollout.rollout_logprobs,
            logprobs,
            rollout.rollout_entropy,
            entropy,
            numbers.ref_logprobs,
            numbers.values,
            roles.scores(rollout),
        )
        step(roles, rollout.batch)
    with whole_weights(roles.actor):
        assert shares_every_tensor(roles.actor)
    return found


CASES = {
    "exact": replace(BASE, parallel=EXACT),
    "stage 3": replace(BASE, parallel=ALL),
    "stage 2": replace(BASE, parallel=replace(ALL, actor_zero_stage=2, critic_zero_stage=2)),
    "stage 1": replace(BASE, parallel=replace(ALL, actor_zero_stage=1, critic_zero_stage=1)),
    "bf16": replace(BASE, parallel=ALL, dtype="bf16"),
    "weights on the host": replace(BASE, parallel=replace(ALL, offload=("params",))),
    "lora": replace(BASE, parallel=ALL, lora=LoraConfig(rank=2)),
}


def seen_in(world: World, names: Sequence[str]) -> dict[str, dict[str, tuple[Tensor, ...]]]:
    return {name: seen(world, CASES[name]) for name in names}


@pytest.mark.parametrize(
    "names",
    [
        ("exact", "stage 3", "bf16", "lora"),
        pytest.param(tuple(CASES), marks=pytest.mark.slow, id="all"),
    ],
)
def test_sampler_training_and_frozen_roles_see_the_same_weights(names: Sequence[str]) -> None:
    first, *others = on_ranks(4, seen_in, names, ranks_per_node=2)
    for name, moments in first.items():
        for moment, numbers in moments.items():
            sampled, forward, entropy, recomputed, reference, values, scores = numbers
            assert torch.equal(sampled, forward), (name, moment)
            assert torch.equal(entropy, recomputed), (name, moment)
            assert sampled.ne(0).any()
            if CASES[name].parallel.actor_zero_stage == 3:
                # The reference started as the actor, and travels as it does.
                assert torch.equal(reference, sampled) == (moment == "before"), name
            for other in others:
                for ours, theirs in zip(numbers, other[name][moment], strict=True):
                    assert torch.equal(ours, theirs), (name, moment)
            assert values.isfinite().all()
            assert scores.isfinite().all()
    # Int8 is what they saw, the reward model's and the critic's weights too.
    exact, rounded = first["exact"]["before"], first["stage 3"]["before"]
    for place in (0, 4, 5, 6):
        assert exact[place].shape != rounded[place].shape or not torch.equal(
            exact[place], rounded[place]
        )


def traffic(world: World, quantized: bool) -> tuple[int, int, int]:
    """Bytes between nodes that a rollout's gathering and a frozen model's scoring send; gathers."""
    roles = engine(world, replace(BASE, parallel=ALL if quantized else EXACT))
    rollout = roles.rollout(prompts(), step=0)
    with counting_traffic(world.ranks_per_node) as counted:
        with counted.phase("gather"), whole_weights(roles.actor):
            pass
        with counted.phase("score"):
            roles.scores(rollout)
    assert shards_of(roles.actor).quantized is not None
    return (
        counted.total("all_gather", "gather").inter_node_bytes,
        counted.total("all_gather", "score").inter_node_bytes,
        counted.total("all_gather").count,
    )


def both(world: World) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    return traffic(world, False), traffic(world, True)


def test_a_rollout_and_frozen_models_gather_fewer_bytes() -> None:
    for exact, rounded in on_ranks(4, both, ranks_per_node=2):
        # Biases and norms of a tiny model have a scale for every few numbers.
        assert exact[0] > 3.5 * rounded[0] > 0
        assert exact[1] > 3.5 * rounded[1] > 0
        assert exact[2] == rounded[2]
