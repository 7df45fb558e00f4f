"""Checks of placed models before training: a policy against its own forward and its reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.engine.forward import generation_weights, response_logprobs
from tandem.engine.placement import onload
from tandem.errors import ModelError, NumericsError
from tandem.generation.hf_generate import check_generation
from tandem.generation.make_runner import make_runner
from tandem.models.blocks import decoder_blocks
from tandem.models.lm_head import check_head
from tandem.models.lora import adapters_off
from tandem.models.modes import evaluating
from tandem.models.selfcheck import Agreement, check_slices, check_twin
from tandem.models.slice_plans import slice_plan
from tandem.models.twin import decodes, supports_packing, twin_of, why_unpacked
from tandem.parallel.shard import shards_of
from tandem.parallel.tensor import TensorGroup
from tandem.types import TokenBatch

TOLERANCE = {"cpu": 0.0}
"""Largest difference of log-probs allowed, in nats, by kind of device."""
_ELSEWHERE = 1e-3
_LENGTHS = (13, 6)


@torch.no_grad()
def check_policy(model: PreTrainedModel, group: TensorGroup | None = None) -> Agreement:
    """Check a placed language model's head and what generates against its own forward; all ranks
    together.

    Args:
        group: the ranks that hold slices of it while it generates.
    Returns:
        how decoding compares with the training forward, on the rank where it compares worst, so
        that all ranks decide alike; with Hugging Face's, only the largest gap.
    Raises:
        ModelError: the model is not supported, Hugging Face's `generate` draws from other
            distributions than its forward gives, or its slices do not decode, or not as it does.
    """
    with generation_weights(model, group):
        found = _checked(model, group)
    numbers = float(not found.bitwise), found.gap, found.largest_gap, found.to_model
    inexact, *gaps = shards_of(model).world.all_reduce_max(numbers)
    return Agreement(not inexact, *gaps)


def _checked(model: PreTrainedModel, group: TensorGroup | None) -> Agreement:
    """`check_policy` on this rank."""
    check_head(model)
    generates = not decodes(model)
    if group is not None and generates and not slice_plan(model.config).by_generate:
        raise ModelError(
            "tensor-parallel generation must decode from slices, not through Hugging Face's "
            "generate, which takes whole weights; got a model that does not: "
            f"{why_unpacked(model)}. Use --inference-tp-size 1."
        )
    if generates:
        with evaluating(model):
            to_model = 0.0 if group is None else check_slices(model)
            return Agreement(False, math.inf, check_generation(model), to_model)
    # Slices stand in for the twin; the model's own forward gathers for itself.
    return check_twin(model, trains_elsewhere=group is not None, make_decoder=make_runner)


@torch.no_grad()
def check_same_start(actor: PreTrainedModel, reference: PreTrainedModel | None) -> float:
    """Compare policy and reference on random tokens, before training; all ranks together. If they
    are not the same model before the first update, the KL divergence is noise.

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
    pairs = enumerate(zip(layers, others, strict=True))
    first = next((i for i, (left, right) in pairs if not torch.equal(left, right)), None)
    where = "the vocabulary head" if first is None else f"the output of layer {first}"
    raise NumericsError(
        "the policy and its reference must give the same log-probs before the first update (at "
        f"most {tolerance:g} nats apart); got {gap:.3g}, and {where} differs first. Every KL would "
        "be wrong by as much: use other --dtype, --offload or ZeRO stages, and report this."
    )


def _random_tokens(model: PreTrainedModel) -> TokenBatch:
    """Two rows of different lengths; all tokens but the first of each are response tokens."""
    device = shards_of(model).world.device
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (2, max(_LENGTHS)), generator=generator)
    places = torch.arange(max(_LENGTHS)).expand(2, -1)
    mask = places < torch.tensor(_LENGTHS)[:, None]
    return TokenBatch(ids, mask, mask & (places > 0)).to(device)


def _traced(model: PreTrainedModel, batch: TokenBatch) -> tuple[Tensor, list[Tensor]]:
    """Log-probs, and each block's output."""
    # As a forward, for which split weights are gathered.
    packs = shards_of(model).forward(lambda: supports_packing(model))
    computing = twin_of(model) if packs else model
    outputs: list[Tensor] = []
    try:
        with evaluating(model), _recorded(_blocks_of(computing), outputs):
            logprobs, _ = response_logprobs(model, batch)
    finally:
        shards_of(model).reshard()
    return logprobs, outputs


def _blocks_of(model: PreTrainedModel) -> Any:
    """A model's blocks; none where they are not in one list, as HRM's, which run several times."""
    try:
        return decoder_blocks(model)
    except ModelError:
        return []


def _states(output: Any) -> Tensor:
    """What a block gives: a tensor, the first of several, or the sum of two addends, as a GPU's
    blocks have it (`models.gpu_blocks`)."""
    first, *others = output if isinstance(output, tuple | list) else (output,)
    added = others and isinstance(others[0], Tensor) and others[0].shape == first.shape
    states: Tensor = first + others[0] if added else first
    return states


@contextmanager
def _recorded(blocks: Any, outputs: list[Tensor]) -> Iterator[None]:
    def keep(module: nn.Module, given: Any, output: Any) -> None:
        outputs.append(_states(output).detach().clone())

    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
