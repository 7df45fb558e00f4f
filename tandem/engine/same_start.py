"""The policy and its reference must be one model before the first update, or KL is noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.engine.forward import response_logprobs
from tandem.engine.placement import onload
from tandem.errors import NumericsError
from tandem.models.blocks import decoder_blocks
from tandem.models.lora import adapters_off
from tandem.models.modes import evaluating
from tandem.models.twin import supports_packing, twin_of
from tandem.parallel.shard import shards_of
from tandem.types import TokenBatch

TOLERANCE = {"cpu": 0.0}
"""Largest difference of log-probs in nats, by kind of device: on a CPU none."""
_ELSEWHERE = 1e-3
_LENGTHS = (13, 6)


@torch.no_grad()
def check_same_start(actor: PreTrainedModel, reference: PreTrainedModel | None) -> float:
    """Compare the two on random tokens before anything is trained; all ranks together.

    Args:
        reference: None where it is the actor with its adapters off.
    Returns:
        the largest difference of log-probs, in nats.
    Raises:
        NumericsError: it is above what this device allows; the first layer that differs is named.
    """
    batch = _random_tokens(actor)
    own, layers = _traced(actor, batch)
    if reference is None:
        with adapters_off(actor):
            other, others = _traced(actor, batch)
    else:
        with onload(reference):
            other, others = _traced(reference, batch)
    gap = float((own - other).abs().max())
    device = batch.token_ids.device
    tolerance = TOLERANCE.get(device.type, _ELSEWHERE)
    if gap <= tolerance:
        return gap
    differing = (i for i, pair in enumerate(zip(layers, others, strict=True)) if _differ(*pair))
    first = next(differing, None)
    where = "the vocabulary head" if first is None else f"the output of layer {first}"
    raise NumericsError(
        "the policy and its reference must give the same log-probs before the first update (at "
        f"most {tolerance:g} nats apart); got {gap:.3g}, and {where} differs first. Every KL would "
        "be wrong by as much: use other --dtype, --offload or ZeRO stages, and report this."
    )


def _differ(left: Tensor, right: Tensor) -> bool:
    return not torch.equal(left, right)


def _random_tokens(model: PreTrainedModel) -> TokenBatch:
    """Two rows of unequal length; all tokens but the first of each are answers."""
    device = shards_of(model).world.device
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (2, max(_LENGTHS)), generator=generator)
    places = torch.arange(max(_LENGTHS)).expand(2, -1)
    mask = places < torch.tensor(_LENGTHS)[:, None]
    return TokenBatch(ids, mask, mask & (places > 0)).to(device)


def _traced(model: PreTrainedModel, batch: TokenBatch) -> tuple[Tensor, list[Tensor]]:
    """Log-probs, and what each block gave out on the way."""
    # As a forward, for which weights in pieces are gathered.
    packs = shards_of(model).forward(lambda: supports_packing(model))
    computing = twin_of(model) if packs else model
    outputs: list[Tensor] = []
    try:
        with evaluating(model), _recorded(decoder_blocks(computing), outputs):
            logprobs, _ = response_logprobs(model, batch)
    finally:
        shards_of(model).reshard()
    return logprobs, outputs


@contextmanager
def _recorded(blocks: Any, outputs: list[Tensor]) -> Iterator[None]:
    def keep(into: list[Tensor], module: nn.Module, given: Any, output: Any) -> None:
        into.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    handles = [block.register_forward_hook(partial(keep, outputs)) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
