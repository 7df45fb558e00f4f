"""One rollout by all ranks: each answers its share of the prompts, then all know all answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.engine import EngineSettings
from tandem.config.schema import SamplingConfig
from tandem.engine.forward import balanced, generation_weights
from tandem.generation.generator import Stops, generate
from tandem.models.modes import evaluating
from tandem.parallel.shard import shards_of
from tandem.parallel.tensor import TensorGroup, tensor_group
from tandem.parallel.world import World
from tandem.types import PromptRow, Rollout, TokenBatch

_PER_TOKEN = ("rollout_logprobs", "sampled_logprobs", "rollout_entropy")


@contextmanager
def generating(model: PreTrainedModel, group: TensorGroup | None) -> Iterator[None]:
    """Within: the model generates, with weights whole on every rank or in slices over `group`; no
    gradient, no dropout."""
    with evaluating(model), torch.no_grad(), generation_weights(model, group):
        yield


def rollout_of(
    model: PreTrainedModel,
    prompts: Sequence[PromptRow],
    settings: EngineSettings,
    stops: Stops,
    *,
    step: int,
    numbers: Sequence[int] | None = None,
) -> Rollout:
    """A placed policy's answers as a run is configured to sample them.

    Args:
        step, numbers: with the seed they key the sampling (see `generation.generate`).
    """
    world = shards_of(model).world
    group = tensor_group(world, settings.parallel.inference_tp_size)
    with generating(model, group):
        return shared_rollout(
            model,
            prompts,
            settings.sampling,
            stops,
            world,
            seed=settings.seed,
            step=step,
            prompt_numbers=numbers,
            batch_size=settings.generation_batch_size,
            group=group,
            by_hugging_face=not settings.hybrid_engine,
        )


def shared_rollout(
    model: PreTrainedModel,
    prompts: Sequence[PromptRow],
    sampling: SamplingConfig,
    stops: Stops,
    world: World,
    *,
    seed: int,
    step: int,
    prompt_numbers: Sequence[int] | None = None,
    batch_size: int = 64,
    group: TensorGroup | None = None,
    by_hugging_face: bool = False,
) -> Rollout:
    """`generation.generate` by all ranks together; the same texts at any number of ranks.

    Inside `forward.generation_weights`. Prompts are dealt by their lengths, to ranks, or to the
    groups of ranks that hold slices of the same weights.

    Returns:
        the rollout of all prompts, in their order, on every rank.
    """
    settings: dict[str, Any] = {
        "seed": seed,
        "step": step,
        "batch_size": batch_size,
        "by_hugging_face": by_hugging_face,
    }
    if group is not None:
        settings["agreed_blocks"] = group.lowest  # a group's ranks must schedule alike
    if world.size == 1:
        return generate(model, prompts, sampling, stops, prompt_numbers=prompt_numbers, **settings)
    numbers = list(prompt_numbers) if prompt_numbers is not None else list(range(len(prompts)))
    together = group.size if group is not None else 1
    batches = world if group is None else group.batches
    costs = [len(prompt) + sampling.max_new_tokens for prompt in prompts]
    dealt = [sorted(hand) for hand in balanced(costs, batches.size)]
    mine = dealt[batches.rank]
    # One rank of a group brings what all of them have made.
    hands = [dealt[rank // together] if rank % together == 0 else [] for rank in range(world.size)]
    start = time.perf_counter()
    own = (
        generate(
            model,
            [prompts[i] for i in mine],
            sampling,
            stops,
            prompt_numbers=[numbers[i] for i in mine],
            **settings,
        )
        if mine
        else None
    )
    seconds = tuple(world.all_gather_object(time.perf_counter() - start))
    if not hands[world.rank]:
        own = None
    rollout = _exchanged(own, prompts, hands, sampling.samples_per_prompt, stops, world)
    return replace(rollout, rank_seconds=seconds)


def _exchanged(
    own: Rollout | None,
    prompts: Sequence[PromptRow],
    hands: Sequence[Sequence[int]],
    samples: int,
    stops: Stops,
    world: World,
) -> Rollout:
    """Every rank's rows put together in the order of the prompts."""
    rows = [len(hand) * samples for hand in hands]
    none = torch.zeros(0, dtype=torch.long)
    lengths = world.gather_flat(own.batch.lengths() if own else none, rows)
    per_rank = [int(part.sum()) for part in lengths.split(rows)]

    def gathered(values: Tensor | None, dtype: torch.dtype) -> Tensor:
        mine = values[own.batch.attention_mask] if own and values is not None else none
        return world.gather_flat(mine.to(dtype), per_rank)

    order = torch.tensor([i * samples + s for hand in hands for i in hand for s in range(samples)])
    places = order.to(lengths.device)
    width = int(lengths.max())
    mask = torch.zeros((len(order), width), dtype=torch.bool, device=lengths.device)
    mask[places] = torch.arange(width, device=lengths.device) < lengths[:, None]

    def placed(values: Tensor, fill: float) -> Tensor:
        """(N,) in the order of the ranks to (B, T) in the order of the prompts."""
        ranked = torch.full((len(order), width), fill, dtype=values.dtype, device=values.device)
        ranked[mask[places]] = values
        ordered = torch.empty_like(ranked)
        ordered[places] = ranked
        return ordered

    token_ids = placed(gathered(own.batch.token_ids if own else None, torch.long), 0)
    token_ids[~mask] = stops.pad_token_id
    response = placed(gathered(own.batch.response_mask if own else None, torch.uint8), 0).bool()
    texts = [
        text for part in world.all_gather_object(own.responses if own else ()) for text in part
    ]
    responses = [""] * len(order)
    for place, text in zip(order.tolist(), texts, strict=True):
        responses[place] = text
    ended = world.gather_flat(own.finished.to(torch.uint8) if own else none.to(torch.uint8), rows)
    finished = torch.empty_like(ended)
    finished[places] = ended
    per_token: dict[str, Any] = {
        name: placed(gathered(getattr(own, name) if own else None, torch.float32), 0.0)
        for name in _PER_TOKEN
    }
    return Rollout(
        batch=TokenBatch(token_ids, mask, response),
        finished=finished.bool(),
        prompts=tuple(prompt for prompt in prompts for _ in range(samples)),
        responses=tuple(responses),
        group=torch.arange(len(order), device=finished.device) // samples,
        **per_token,
    )
