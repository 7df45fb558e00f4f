"""Models loaded to where they lie: whole on this rank, or straight into its pieces."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.config.schema import RunConfig
from tandem.engine.devices import resolve_dtype
from tandem.engine.forward import autocast, generation_weights
from tandem.engine.spread import keep_on_host, plan_for, spread
from tandem.models.head import check_head
from tandem.models.load import load_causal_lm
from tandem.models.lora import add_lora, lora_layers, start_adapters
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.scalar import load_scalar_model, start_new_head
from tandem.models.selfcheck import Agreement, check_twin
from tandem.models.stream import EmptyModel, empty_causal_lm, empty_scalar_model
from tandem.models.twin import plain_copy, supports_packing
from tandem.parallel.pieces import fill, own_rows
from tandem.parallel.shard import ShardPlan, shards_of
from tandem.parallel.tensor import TensorGroup
from tandem.parallel.world import World

Model = PreTrainedModel | str


def on_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The model itself, moved to `device`."""
    nn.Module.to(model, device)
    return model


def prepare_for_training(model: PreTrainedModel, config: RunConfig, seed: int) -> None:
    """Adapters and gradient checkpointing as configured; in place."""
    if config.lora.rank > 0:
        add_lora(model, config.lora, seed)
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model)


def place_policy(
    source: Model,
    config: RunConfig,
    world: World,
    *,
    trained: bool,
    seed: int = 0,
    on_host: bool = False,
) -> PreTrainedModel:
    """A language model, loaded or as given, ready for its role and laid over the ranks.

    Args:
        source: a folder or hub name, or a module, which is changed in place.
        trained: it gets adapters and gradient checkpointing as configured; else it is frozen.
        seed: of the adapters.
        on_host: frozen weights rest in host memory; the model then only scores.
    Raises:
        ModelError: it cannot be used.
    """
    plan = plan_for(config.parallel.actor_zero_stage, config, world, trained, on_host)
    if isinstance(source, str) and plan.stage > 0:
        empty = empty_causal_lm(
            source, dropout=config.dropout, trust_remote_code=config.trust_remote_code
        )
        if empty is not None:
            return _filled(empty, plan, config, world, trained=trained, seed=seed)
    if isinstance(source, str):
        source = load_causal_lm(
            source, dropout=config.dropout, trust_remote_code=config.trust_remote_code
        )
    return _placed(source, plan, config, world, trained=trained, seed=seed, on_host=on_host)


def place_scalar(
    source: Model,
    config: RunConfig,
    world: World,
    *,
    trained: bool,
    seed: int,
    needs_head: bool = False,
    on_host: bool = False,
) -> PreTrainedModel:
    """A model with a scalar head, loaded or as given, ready for its role and laid over the ranks.

    Args:
        source, trained, seed, on_host: as `place_policy`; a new head starts from `config.seed`.
        needs_head: refuse a language model, whose head would be random.
    Raises:
        ModelError: it cannot be used.
    """
    plan = plan_for(config.parallel.critic_zero_stage, config, world, trained, on_host)
    if isinstance(source, str) and plan.stage > 0:
        empty = empty_scalar_model(
            source, dropout=config.dropout, trust_remote_code=config.trust_remote_code
        )
        if empty is not None and not (needs_head and empty.missing):
            return _filled(empty, plan, config, world, trained=trained, seed=seed)
    if isinstance(source, str):
        source = load_scalar_model(
            source,
            seed=config.seed,
            from_causal_lm=False if needs_head else None,
            dropout=config.dropout,
            trust_remote_code=config.trust_remote_code,
        )
    return _placed(source, plan, config, world, trained=trained, seed=seed, on_host=on_host)


def check_policy(
    model: PreTrainedModel, config: RunConfig, group: TensorGroup | None
) -> Agreement | None:
    """Check a placed language model's head and twin against its own forward; all ranks together.

    Returns:
        how decoding compares with the training forward; None without a twin.
    Raises:
        ModelError: the model is not supported, or a plan of slices is wrong for it.
    """
    dtype = resolve_dtype(config.dtype, model.device)
    with torch.no_grad(), generation_weights(model, group):
        # Slices stand in for the twin; the model's own forward gathers for itself.
        is_whole_here = group is None and shards_of(model).is_split
        own = plain_copy(model) if is_whole_here else model
        check_head(model, own)
        if not supports_packing(model):
            return None
        with autocast(model.device, dtype):
            return check_twin(model, own, trains_elsewhere=group is not None)


def _placed(
    model: PreTrainedModel,
    plan: ShardPlan,
    config: RunConfig,
    world: World,
    *,
    trained: bool,
    seed: int,
    on_host: bool,
) -> PreTrainedModel:
    if not on_host:
        on_device(model, world.device)
    if trained:
        prepare_for_training(model, config, seed)
    else:
        model.requires_grad_(False).eval()
    spread(model, plan, world)
    if on_host and plan.stage == 0:
        keep_on_host(model, world.device)
    return model


def _filled(
    empty: EmptyModel,
    plan: ShardPlan,
    config: RunConfig,
    world: World,
    *,
    trained: bool,
    seed: int,
) -> PreTrainedModel:
    """Split first, read afterwards: each rank its own rows."""
    model = empty.model
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(world.device)
    if trained:
        prepare_for_training(model, config, seed)
    else:
        model.requires_grad_(False)
    spread(model, plan, world)
    empty.fill(own_rows)
    if lora_layers(model):
        start_adapters(model, seed, fill)
    if empty.missing:
        start_new_head(model, config.seed, fill)
    return model
