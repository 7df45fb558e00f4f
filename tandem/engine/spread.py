"""A model's weights laid over the ranks, as the configuration says for its role."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tandem.config.schema import RunConfig
from tandem.models.blocks import decoder_blocks
from tandem.parallel.shard import ShardPlan, Shards, shard
from tandem.parallel.world import World


def is_split(stage: int, world: World, *, trained: bool) -> bool:
    """Whether a model's weights lie in pieces.

    A model that is not trained is split from stage 3 on: the lower stages split what it does not
    have, optimizer states and gradients.
    """
    return world.size > 1 and (stage > 0 if trained else stage == 3)


def spread(
    model: PreTrainedModel, stage: int, config: RunConfig, world: World, *, trained: bool = True
) -> Shards:
    """Split `model` by ZeRO stage, or only note who computes it; in place.

    Weights travel in the type that the run computes in.
    """
    splits = is_split(stage, world, trained=trained)
    plan = ShardPlan(
        stage=stage if splits else 0,
        gather_dtype=torch.bfloat16 if _computes_in_bf16(config, world) else None,
        hpz=config.parallel.zero_hpz,
    )
    return shard(model, decoder_blocks(model) if splits else (), plan, world)


def _computes_in_bf16(config: RunConfig, world: World) -> bool:
    return config.dtype == "bf16" or (config.dtype == "auto" and world.device.type == "cuda")
