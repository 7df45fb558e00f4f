"""A model's weights laid over the ranks, as the configuration says for its role."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tandem.config.schema import RunConfig
from tandem.models.blocks import decoder_blocks
from tandem.parallel.shard import ShardPlan, Shards, shard
from tandem.parallel.world import World


def spread(
    model: PreTrainedModel, stage: int, config: RunConfig, dtype: torch.dtype, world: World
) -> Shards:
    """Split `model` by ZeRO stage, or only note who computes it; in place.

    A model without trained weights is split from stage 3 on: the lower stages split what it does
    not have, optimizer states and gradients.

    Args:
        dtype: what the run computes in; weights travel in it.
    """
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if not is_trained and stage < 3:
        stage = 0
    splits = world.size > 1 and stage > 0
    plan = ShardPlan(
        stage=stage,
        gather_dtype=None if dtype == torch.float32 else dtype,
        hpz=config.parallel.zero_hpz,
    )
    return shard(model, decoder_blocks(model) if splits else (), plan, world)
