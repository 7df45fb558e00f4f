"""Forwards over batches: log-probs, values and scores per token, in micro-batches, over ranks.

Every rank knows the whole batch. `rank_micro_batches` gives each its rows; what they compute is
added up, so that every rank has the whole result.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.data.loader import microbatches
from tandem.engine.allocator import give_back_memory
from tandem.engine.placement import visiting
from tandem.models import scalar
from tandem.models.lm_head import vocabulary_head
from tandem.models.packed import PromptGroup, drops_now, predictor_states, prompt_groups
from tandem.models.tensor_parallel import sliced_twin
from tandem.models.twin import decodes, standing_in, without_hooks
from tandem.objectives.logprobs import scatter_to_tokens, token_logprobs
from tandem.parallel.dtensor import whole
from tandem.parallel.shard import shards_of
from tandem.parallel.tensor import TensorGroup
from tandem.parallel.world import World
from tandem.types import TokenBatch


@contextmanager
def whole_weights(model: PreTrainedModel) -> Iterator[None]:
    """Within: the model's weights are whole on this rank, and no forward waits for another rank."""
    with shards_of(model).gathered(), without_hooks(model):
        yield


@contextmanager
def generation_weights(model: PreTrainedModel, group: TensorGroup | None) -> Iterator[None]:
    """Within: the model's twin can generate: whole on this rank, or in slices over its group.

    A group's ranks must then make the same calls. What training kept of freed memory is given back
    before, because KV memory takes a share of what is free, and what generation kept afterwards.
    """
    give_back_memory()
    try:
        if group is None:
            with whole_weights(model):
                yield
        else:
            with _sliced_weights(model, group):
                yield
    finally:
        give_back_memory()


@contextmanager
def _sliced_weights(model: PreTrainedModel, group: TensorGroup) -> Iterator[None]:
    shards = shards_of(model)
    shards.rest()
    twin = sliced_twin(
        model,
        group.size,
        slice_of=group.slice,
        whole=whole,
        add_up=group.add_up,
        dtype=shards.plan.gather_dtype,
    )
    try:
        with standing_in(model, twin):
            yield
    finally:
        shards.rest()


def response_logprobs(
    model: PreTrainedModel,
    batch: TokenBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each response token and the entropy it was chosen with, with gradient.

    Only response tokens go through the vocabulary head, in chunks.

    Returns:
        logprobs and entropy, (B, T) float32 nats, 0 off the response.
    """

    def forward() -> tuple[Tensor, Tensor]:
        selected = predictor_states(model, batch)
        head = vocabulary_head(model)
        logprobs, entropy = token_logprobs(
            head,
            selected,
            batch.token_ids[batch.response_mask],
            vocabulary=model.config.get_text_config().vocab_size,
            weights=head.weights,
            temperature=temperature,
            with_entropy=with_entropy,
        )
        return (
            scatter_to_tokens(logprobs, batch.response_mask),
            scatter_to_tokens(entropy, batch.response_mask),
        )

    return shards_of(model).forward(forward)


def token_values(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """`models.scalar.token_values`, wherever the weights lie."""
    return shards_of(model).forward(lambda: scalar.token_values(model, batch))


def sequence_scores(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """`models.scalar.sequence_scores`, wherever the weights lie."""
    return shards_of(model).forward(lambda: scalar.sequence_scores(model, batch))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a batch that go through a model together.

    rows: their numbers. weight: 1, or 0 where the rows only keep this rank in step with the others
    and must count for nothing. is_last: the last of this rank's, and of every other's. idle: the
    share of all ranks' micro-batches that it wastes; summed over them and the ranks, theirs.
    """

    rows: list[int]
    weight: float
    is_last: bool
    idle: float = 0.0


def balanced(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The rows of each rank, the longest first; O(rows log ranks).

    Rows go to the rank with the fewest tokens so far, the first of several; the longest first.

    Args:
        lengths: tokens of each row.
    """
    rows_of: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]  # sorted, and so a heap
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        load, rank = loads[0]
        rows_of[rank].append(row)
        heapq.heapreplace(loads, (load + lengths[row], rank))
    return rows_of


def rank_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    world: World,
    groups: Sequence[PromptGroup] = (),
) -> list[MicroBatch]:
    """This rank's micro-batches of a batch that every rank knows; all ranks get as many.

    Rows are `balanced` over the ranks; a rank's own rows are then grouped by like lengths, at most
    `max_tokens` together. Rows of a prompt group stay together as far as those tokens and the
    balance allow it, and their prompt counts once.

    Args:
        lengths: tokens of each row.
        groups: all rows by prompt, where rows share their prompts; empty where none do.
    """
    if not lengths:
        return []
    units, dealt = _dealt_units(lengths, max_tokens, world.size, groups)
    parts_of = [
        [
            [row for i in part for row in units[mine[i]].rows]
            for part in microbatches([units[i].tokens for i in mine], max_tokens)
        ]
        for mine in dealt
    ]
    count = max(map(len, parts_of))
    mine = parts_of[world.rank]
    filler = [min(range(len(lengths)), key=lambda row: lengths[row])]
    wasted = 1 / (count * world.size)
    parts = [MicroBatch(rows, 1.0, is_last=False) for rows in mine]
    parts += [MicroBatch(filler, 0.0, is_last=False, idle=wasted)] * (count - len(mine))
    return [*parts[:-1], replace(parts[-1], is_last=True)]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rows that stay together, and the tokens that they cost: a shared prompt counts once."""

    rows: list[int]
    tokens: int


def _dealt_units(
    lengths: Sequence[int], max_tokens: int, num_ranks: int, groups: Sequence[PromptGroup]
) -> tuple[list[_Unit], list[list[int]]]:
    """What stays together, and which of it each rank gets.

    Large groups leave ranks with less work than others and small ones repeat prompts: of a few
    sizes, the one whose busiest rank has the fewest tokens.
    """
    alone = [_Unit([row], length) for row, length in enumerate(lengths)]
    choices = [alone]
    if any(len(group.rows) > 1 for group in groups):
        units = _units(lengths, groups, max_tokens)
        share = -(-sum(unit.tokens for unit in units) // num_ranks)
        choices = [units]
        if num_ranks > 1:
            choices += [_units(lengths, groups, min(max_tokens, share // n)) for n in (1, 2, 4)]
            choices.append(alone)
    best: tuple[int, list[_Unit], list[list[int]]] | None = None
    for units in choices:
        dealt = balanced([unit.tokens for unit in units], num_ranks)
        busiest = max(sum(units[i].tokens for i in mine) for mine in dealt)
        if best is None or busiest < best[0]:
            best = busiest, units, dealt
    assert best is not None
    return best[1], best[2]


def _units(lengths: Sequence[int], groups: Sequence[PromptGroup], max_tokens: int) -> list[_Unit]:
    """Groups cut so that each part has at most `max_tokens`, or one row."""
    units: list[_Unit] = []
    for group in groups:
        room, shared = 0, group.prompt_tokens
        for row in group.rows:
            own = lengths[row] - shared
            if row == group.rows[0] or own > room:
                units.append(_Unit([], shared))
                room = max_tokens - shared
            part = units[-1]
            units[-1] = _Unit([*part.rows, row], part.tokens + own)
            room -= own
    return units


_continued: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def groups_of(batch: TokenBatch, models: Sequence[PreTrainedModel]) -> list[PromptGroup]:
    """The rows of a batch by prompt if all these models run a shared prompt once, else none.

    Every rank must call it as often as every other.
    """
    return prompt_groups(batch) if all(map(_shares_prompts, models)) else []


def _shares_prompts(model: PreTrainedModel) -> bool:
    """`models.packed.shares_prompts`, wherever the weights lie."""
    if model not in _continued:
        shards = shards_of(model)
        with torch.no_grad():
            _continued[model] = shards.forward(lambda: decodes(model))
        shards.rest()
    return _continued[model] and not drops_now(model)


def rank_micro_batches_of(
    batch: TokenBatch, max_tokens: int, world: World, models: Sequence[PreTrainedModel] = ()
) -> list[tuple[Tensor, MicroBatch]]:
    """As `rank_micro_batches`, with the rows' numbers as a tensor on the batch's device.

    Args:
        models: those that will run them; without any, rows count as if none shared a prompt.
    """
    device = batch.token_ids.device
    groups = groups_of(batch, models) if models else []
    return [
        (torch.tensor(part.rows, device=device), part)
        for part in rank_micro_batches(batch.lengths().tolist(), max_tokens, world, groups)
    ]


@torch.no_grad()
def scored(
    batch: TokenBatch,
    max_tokens: int,
    forward: Callable[[TokenBatch], tuple[Tensor, ...]],
    models: Sequence[PreTrainedModel],
) -> tuple[Tensor, ...]:
    """Run `forward` micro-batch by micro-batch without gradient and put the parts together.

    Args:
        forward: a batch (b, t) to tensors of shape (b, t) or (b,).
        models: those it runs; they lie over the same ranks, and rest afterwards.
    Returns:
        the same tensors for the whole batch, (B, T) or (B,), float32, 0 where nothing was written;
        the same on every rank.
    """
    world = shards_of(models[0]).world
    results: list[Tensor] = []
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(visiting(model))
        for rows, part in rank_micro_batches_of(batch, max_tokens, world, models):
            _keep(results, forward(batch.select(rows)), rows, part, batch)
    for model in models:
        shards_of(model).rest()
    world.all_reduce_(*results)
    return tuple(results)


def _keep(
    results: list[Tensor],
    outputs: tuple[Tensor, ...],
    rows: Tensor,
    part: MicroBatch,
    batch: TokenBatch,
) -> None:
    """Put a micro-batch's outputs where they belong; the first makes room for all."""
    if not results:
        results += [
            torch.zeros(
                batch.token_ids.shape if output.dim() == 2 else (len(batch),),
                device=output.device,
            )
            for output in outputs
        ]
    for result, output in zip(results, outputs, strict=True):
        if part.weight == 0:
            continue
        where = rows.to(output.device)
        if output.dim() == 2:
            columns = torch.arange(output.shape[1], device=where.device)
            result[where[:, None], columns] = output.float()
        else:
            result[where] = output.float()
