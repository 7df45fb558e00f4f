"""Forwards over batches: log-probs, values and scores, in micro-batches over the ranks.

Every rank knows the whole batch. `rank_micro_batches` gives each its rows; the results are summed,
so that every rank has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.engine.allocator import give_back_if_scarce
from tandem.engine.placement import onload
from tandem.engine.units import balanced_units, filled
from tandem.models import scalar
from tandem.models.beginnings import PromptGroup, prompt_groups
from tandem.models.lm_head import vocabulary_head
from tandem.models.load import require_embeddings
from tandem.models.packed import drops_now, predictor_states, response_tokens
from tandem.models.replayed import KeptStates
from tandem.models.slice_plans import slice_plan
from tandem.models.tensor_parallel import sliced_twin
from tandem.models.twin import compares_once, decodes, standing_in, without_hooks
from tandem.objectives.logprobs import scatter_to_tokens, token_logprobs
from tandem.ops import gpu
from tandem.parallel.dtensor import whole
from tandem.parallel.shard import shards_of
from tandem.parallel.tensor import TensorGroup
from tandem.parallel.world import World
from tandem.types import TokenBatch


@contextmanager
def whole_weights(model: PreTrainedModel) -> Iterator[None]:
    """Within: weights are whole on this rank, and no forward waits for another rank."""
    with shards_of(model).gathered(), without_hooks(model):
        yield


@contextmanager
def generation_weights(model: PreTrainedModel, group: TensorGroup | None) -> Iterator[None]:
    """Within: the model's twin can generate, whole on this rank or in slices over its group, whose
    ranks must then make the same calls.

    Where memory is scarce, freed memory that was kept is given back to the system before and after.
    """
    ranks = shards_of(model).world.ranks_per_node
    give_back_if_scarce(ranks)
    try:
        if group is None:
            with whole_weights(model):
                yield
        else:
            with _sliced_weights(model, group):
                yield
    finally:
        give_back_if_scarce(ranks)


@contextmanager
def _sliced_weights(model: PreTrainedModel, group: TensorGroup) -> Iterator[None]:
    shards = shards_of(model)
    shards.reshard()
    twin = sliced_twin(model, group, whole=whole, dtype=shards.plan.gather_dtype)
    try:
        with standing_in(model, twin, by_generate=slice_plan(model.config).by_generate):
            yield
    finally:
        shards.reshard()


def response_logprobs(
    model: PreTrainedModel,
    batch: TokenBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    kept: KeptStates | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each response token and the entropy it was chosen with, with gradient.

    Only response tokens go through the vocabulary head, in chunks.

    Args:
        kept: as of `predictor_states`.
    Returns:
        logprobs and entropy, (B, T) float32 nats, 0 off the response.
    """

    @compares_once
    def forward(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
        selected = predictor_states(model, batch, kept)
        logprobs, entropy = head_logprobs(
            model, batch, selected, temperature=temperature, with_entropy=with_entropy
        )
        mask = batch.response_mask
        return scatter_to_tokens(logprobs, mask), scatter_to_tokens(entropy, mask)

    return shards_of(model).forward(lambda: forward(model))


def head_logprobs(
    model: PreTrainedModel,
    batch: TokenBatch,
    states: Tensor,
    *,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of each response token by the vocabulary head, (R,) float32 nats, with
    gradient; to be called where weights are whole.

    Args:
        states: (R, D), as `predictor_states` makes them of the batch.
    """
    head = vocabulary_head(model)
    return token_logprobs(
        head,
        states,
        response_tokens(batch, len(states)),
        vocabulary=model.config.get_text_config().vocab_size,
        weights=head.weights,
        temperature=temperature,
        with_entropy=with_entropy,
        product=head.product() if gpu.fuses(states) else None,
    )


def token_values(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """`models.scalar.token_values` of a model that may be split."""
    return shards_of(model).forward(lambda: scalar.token_values(model, batch))


def sequence_scores(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """`models.scalar.sequence_scores` of a model that may be split."""
    return shards_of(model).forward(lambda: scalar.sequence_scores(model, batch))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a batch that go through a model together.

    rows: their numbers. weight: 1, or 0 for a filler that keeps this rank in step with the others.
    is_last: the last on every rank. idle: a filler's share of all ranks' micro-batches.
    """

    rows: list[int]
    weight: float
    is_last: bool
    idle: float = 0.0


class Rows(list[int]):
    """A micro-batch's rows, by number, as tensors too."""

    def __init__(self, numbers: Sequence[int], together: _Together, begin: int) -> None:
        super().__init__(numbers)
        self._together, self._span = together, slice(begin, begin + len(numbers))

    @property
    def host(self) -> Tensor:
        """(M,) int64 on the host."""
        return self._together.host[self._span]

    def on(self, device: torch.device) -> Tensor:
        """(M,) int64 on a device, where all micro-batches' rows are sent when one is asked for."""
        return self._together.on(device)[self._span]


class _Together:
    """The rows of several micro-batches, one behind the other."""

    def __init__(self, numbers: list[int]) -> None:
        self.host = torch.tensor(numbers, dtype=torch.long, device="cpu")
        self._there: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self.host
        if self._there is None:
            (self._there,) = gpu.sent_together([self.host], device)
        return self._there


def rows_together(parts: Sequence[Sequence[int]]) -> list[Rows]:
    """The rows of several micro-batches, which go to a device in one transfer."""
    together = _Together([row for part in parts for row in part])
    begins = accumulate((len(part) for part in parts), initial=0)
    return [Rows(part, together, begin) for part, begin in zip(parts, begins, strict=False)]


def rank_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    world: World,
    groups: Sequence[PromptGroup] = (),
) -> list[MicroBatch]:
    """This rank's micro-batches of a batch that every rank knows; all ranks get equally many.

    Rows are `balanced` over the ranks; a rank's rows are grouped by length, at most
    `max_tokens` together. Rows of a prompt group stay together as far as those tokens and the
    balance allow it, and their prompt counts once, as does what prompts begin with alike.

    Args:
        lengths: tokens of each row.
        groups: all rows by prompt, where rows share their prompts; empty where none do.
    """
    if not lengths:
        return []
    parts_of = [
        [[row for unit in part for row in unit.rows] for part in filled(units, max_tokens)]
        for units in balanced_units(lengths, max_tokens, world.size, groups)
    ]
    count = max(map(len, parts_of))
    mine = parts_of[world.rank]
    filler = [min(range(len(lengths)), key=lambda row: lengths[row])]
    wasted = 1 / (count * world.size)
    parts = [MicroBatch(rows, 1.0, is_last=False) for rows in mine]
    parts += [MicroBatch(filler, 0.0, is_last=False, idle=wasted)] * (count - len(mine))
    return [*parts[:-1], replace(parts[-1], is_last=True)]


_continued: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def groups_of(batch: TokenBatch, models: Sequence[PreTrainedModel]) -> list[PromptGroup]:
    """The rows of a batch by prompt if all these models run once what rows share, else none.

    Every rank must call it as often as every other.
    """
    return prompt_groups(batch) if all(map(_shares_prompts, models)) else []


def _shares_prompts(model: PreTrainedModel) -> bool:
    """`models.packed.shares_prompts`, wherever the weights lie."""
    if model not in _continued:
        shards = shards_of(model)
        with torch.no_grad():
            _continued[model] = shards.forward(lambda: decodes(model))
        shards.reshard()
    return _continued[model] and not drops_now(model)


def rank_micro_batches_of(
    batch: TokenBatch, max_tokens: int, world: World, models: Sequence[PreTrainedModel] = ()
) -> list[tuple[Tensor, MicroBatch]]:
    """As `rank_micro_batches`, with the rows' numbers as a tensor on the host.

    Args:
        models: those that will run them; without any, rows count as if none shared a prompt.
    """
    return [(rows.host, part) for rows, part in _dealt(batch, max_tokens, world, models)]


def _dealt(
    batch: TokenBatch, max_tokens: int, world: World, models: Sequence[PreTrainedModel]
) -> list[tuple[Rows, MicroBatch]]:
    groups = groups_of(batch, models) if models else []
    lengths = batch.on_host().lengths().tolist()
    parts = rank_micro_batches(lengths, max_tokens, world, groups)
    return list(zip(rows_together([part.rows for part in parts]), parts, strict=True))


@torch.no_grad()
def scored(
    batch: TokenBatch,
    max_tokens: int,
    forward: Callable[[TokenBatch], tuple[Tensor, ...]],
    models: Sequence[PreTrainedModel],
) -> tuple[Tensor, ...]:
    """Run `forward` in micro-batches without gradient and join the results.

    Args:
        forward: a batch (b, t) to tensors of shape (b, t) or (b,).
        models: those that it runs, placed on the same ranks.
    Returns:
        those tensors for the whole batch, (B, T) or (B,), float32, 0 where nothing was written; the
        same on every rank.
    Raises:
        ModelError: one of them has no embedding for some token.
    """
    world = shards_of(models[0]).world
    for model in models:
        require_embeddings(model, batch.on_host().token_ids)
    results: list[Tensor] = []
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(onload(model))
        for rows, part in _dealt(batch, max_tokens, world, models):
            there = rows.on(batch.token_ids.device)
            for i, output in enumerate(forward(batch.select(rows.host, there))):
                if i == len(results):
                    shape = batch.token_ids.shape[: output.dim()]
                    results.append(torch.zeros(shape, device=output.device))
                if part.weight:
                    where = rows.on(output.device)
                    width = slice(output.shape[1]) if output.dim() == 2 else ...
                    results[i][where, width] = output.float()
    for model in models:
        shards_of(model).reshard()
    world.all_reduce_(*results)
    return tuple(results)
