"""One rollout by all ranks: each answers its share of the prompts, and all get every answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.engine import EngineSettings
from tandem.config.schema import SamplingConfig
from tandem.engine.forward import generation_weights
from tandem.engine.units import balanced
from tandem.generation.conversing import ConversationRow, Conversing
from tandem.generation.following import Following
from tandem.generation.generator import generate
from tandem.generation.keeping import StateKeeper
from tandem.generation.stops import Stops
from tandem.models.modes import evaluating
from tandem.models.twin import decodes
from tandem.parallel.shard import shards_of
from tandem.parallel.tensor import TensorGroup, tensor_group
from tandem.parallel.world import World
from tandem.types import PromptRow, Rollout, TokenBatch


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
    following: Following | None = None,
    conversing: Conversing | None = None,
    keeper: StateKeeper | None = None,
) -> Rollout:
    """A placed policy's answers as a run is configured to sample them.

    Args:
        step, numbers: with the seed they key the sampling (see `generation.generate`).
        following, keeper: as there; for one rank alone.
        conversing: as there, each rank's own; not with weights in slices.
    """
    group = tensor_group(shards_of(model).world, settings.parallel.inference_tp_size)
    with generating(model, group):
        return shared_rollout(
            model,
            prompts,
            settings,
            stops,
            step=step,
            numbers=numbers,
            group=group,
            following=following,
            conversing=conversing,
            keeper=keeper,
        )


def shared_rollout(
    model: PreTrainedModel,
    prompts: Sequence[PromptRow],
    settings: EngineSettings,
    stops: Stops,
    *,
    step: int,
    numbers: Sequence[int] | None = None,
    group: TensorGroup | None = None,
    following: Following | None = None,
    conversing: Conversing | None = None,
    keeper: StateKeeper | None = None,
) -> Rollout:
    """`rollout_of` inside `forward.generation_weights`; the texts do not depend on the ranks.

    Prompts are balanced by length over the ranks, or over the groups of ranks that hold slices of
    the same weights.

    Returns:
        the rollout of all prompts, in their order, on every rank.
    """
    shards, sampling = shards_of(model), settings.sampling
    world = shards.world
    numbers = list(range(len(prompts))) if numbers is None else numbers

    def answers(chosen: Sequence[int], sampling: SamplingConfig = sampling) -> Rollout:
        return generate(
            model,
            [prompts[i] for i in chosen],
            sampling,
            stops,
            seed=settings.seed,
            step=step,
            prompt_numbers=[numbers[i] for i in chosen],
            batch_size=settings.generation_batch_size,
            chunk_tokens=settings.generation_prefill_tokens or None,
            by_hugging_face=not settings.hybrid_engine,
            # A group's ranks must schedule alike.
            agreed_blocks=int if group is None else group.lowest,
            following=following,
            conversing=conversing,
            keeper=keeper if world.size == 1 else None,
        )

    if world.size == 1:
        return answers(range(len(prompts)))
    together = group.size if group is not None else 1
    batches = world if group is None else group.batches
    costs = [len(prompt) + sampling.max_new_tokens for prompt in prompts]
    shares = [sorted(share) for share in balanced(costs, batches.size)]
    mine = shares[batches.rank]
    # One rank of a group sends what all of them have made.
    sent = [shares[rank // together] if rank % together == 0 else [] for rank in range(world.size)]
    start = time.perf_counter()
    own = answers(mine) if mine else None
    if group is None and shards.plan.stage > 0 and not (settings.hybrid_engine and decodes(model)):
        # In Hugging Face's `generate` the ranks of a sharded model wait for each other in every
        # step, so all must call it equally often: once for a single answer.
        calls = [-(-len(s) * sampling.samples_per_prompt // settings.generation_batch_size)
                 for s in shares]  # fmt: skip
        for _ in range(max(calls) - calls[batches.rank]):
            answers([0], replace(sampling, samples_per_prompt=1))
    seconds = tuple(world.all_gather_object(time.perf_counter() - start))
    own = own if sent[world.rank] else None
    rollout = _exchanged(own, prompts, sent, sampling.samples_per_prompt, stops, world)
    return replace(rollout, rank_seconds=seconds)


def _exchanged(
    own: Rollout | None,
    prompts: Sequence[PromptRow],
    sent: Sequence[Sequence[int]],
    samples: int,
    stops: Stops,
    world: World,
) -> Rollout:
    """All ranks' answers in the order of the prompts; `sent` has the prompts of each rank."""
    rows = [len(share) * samples for share in sent]
    none = torch.zeros(0, dtype=torch.long)
    lengths = world.gather_flat(own.batch.lengths() if own else none, rows)
    per_rank = [int(part.sum()) for part in lengths.split(rows)]
    order = torch.tensor([i * samples + s for share in sent for i in share for s in range(samples)])
    places = order.to(lengths.device)
    width = int(lengths.max())
    mask = torch.arange(width, device=lengths.device) < lengths[:, None]  # in the order of ranks

    def ordered(ranked: Tensor) -> Tensor:
        """From the order of the ranks to that of the prompts."""
        result = torch.empty_like(ranked)
        result[places] = ranked
        return result

    def gathered(values: Tensor | None, dtype: torch.dtype, fill: float = 0) -> Tensor:
        """A tensor of one value per token, (B, T)."""
        mine = none if own is None or values is None else values[own.batch.attention_mask]
        flat = world.gather_flat(mine.to(dtype), per_rank)
        ranked = torch.full(mask.shape, fill, dtype=flat.dtype, device=flat.device)
        ranked[mask] = flat
        return ordered(ranked)

    batch = TokenBatch(
        gathered(own.batch.token_ids if own else None, torch.long, stops.pad_token_id),
        ordered(mask),
        gathered(own.batch.response_mask if own else None, torch.uint8).bool(),
    )
    owners = [prompt for prompt in prompts for _ in range(samples)]
    said = [] if own is None else list(zip(own.responses, map(_grown, own.prompts), strict=True))
    responses = {}
    texts = chain.from_iterable(world.all_gather_object(said))
    for place, (text, grown) in zip(order.tolist(), texts, strict=True):
        responses[place] = text
        if grown is not None:
            token_ids, messages, *more = grown
            base = owners[place]
            owners[place] = ConversationRow(
                token_ids, messages, base.columns, base.source, base.tools, *more
            )
    ended = world.gather_flat((own.finished if own else none).to(torch.uint8), rows)
    per_token: dict[str, Any] = {
        name: gathered(getattr(own, name) if own else None, torch.float32)
        for name in Rollout.PER_TOKEN
    }
    return Rollout(
        batch=batch,
        finished=ordered(ended).bool(),
        prompts=tuple(owners),
        responses=tuple(responses[place] for place in range(len(order))),
        group=torch.arange(len(order), device=ended.device) // samples,
        **per_token,
    )


def _grown(row: PromptRow) -> tuple[Any, ...] | None:
    """What a conversation's row has that its prompt's does not tell; None for a plain prompt."""
    if not isinstance(row, ConversationRow):
        return None
    return row.token_ids, row.messages, row.given, row.end, row.calls, row.failed_calls
