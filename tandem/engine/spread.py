"""A model's weights laid over the ranks and between device and host, as configured for its role."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from tandem.config.schema import RunConfig
from tandem.engine.devices import resolve_dtype
from tandem.models.blocks import decoder_blocks
from tandem.models.twin import supports_packing, twin_of
from tandem.parallel.host_weights import HostWeights
from tandem.parallel.shard import ShardPlan, Shards, shard
from tandem.parallel.world import World

_HOST_WEIGHTS = "tandem_host_weights"


def plan_for(
    stage: int, config: RunConfig, world: World, trained: bool, on_host: bool = False
) -> ShardPlan:
    """How a model is to lie over the ranks; stage 0 where it stays whole.

    A model that is not trained is split from stage 3 on: the lower stages split what it does not
    have, optimizer states and gradients. Trained weights that are offloaded are split even at one
    rank, for they come up block by block. Weights travel in the type that the run computes in.

    Args:
        stage: ZeRO stage of the role.
        on_host: a frozen model's weights rest in host memory.
    """
    offload_trained = trained and "params" in config.parallel.offload
    splits = world.size > 1 and (stage > 0 if trained else stage == 3)
    if offload_trained:
        stage = 3
    elif not splits:
        stage = 0
    dtype = resolve_dtype(config.dtype, world.device)
    return ShardPlan(
        stage=stage,
        gather_dtype=None if dtype == torch.float32 else dtype,
        hpz=config.parallel.zero_hpz,
        offload_params=offload_trained or (on_host and stage > 0),
    )


def spread(model: PreTrainedModel, plan: ShardPlan, world: World) -> Shards:
    """Split `model` as planned, or only note who computes it; in place."""
    return shard(model, decoder_blocks(model) if plan.stage > 0 else (), plan, world)


def keep_on_host(model: PreTrainedModel, device: torch.device) -> None:
    """Let a frozen model's whole weights rest in host memory; `visiting` brings them."""
    model.__dict__[_HOST_WEIGHTS] = HostWeights(model, decoder_blocks(model), device)


@contextmanager
def visiting(model: PreTrainedModel) -> Iterator[None]:
    """Within: weights that rest in host memory come to the device as forwards need them."""
    host = model.__dict__.get(_HOST_WEIGHTS)
    if host is None:
        yield
        return
    runs = [decoder_blocks(model)]
    if supports_packing(model):
        runs.append(decoder_blocks(twin_of(model)))
    with host.visiting(*runs):
        yield
