"""Models loaded to where they lie: whole on this rank, or straight into its pieces."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.config.schema import RunConfig
from tandem.engine.forward import autocast, generation_weights
from tandem.engine.spread import is_split, spread
from tandem.errors import ModelError
from tandem.models.head import check_head
from tandem.models.load import load_causal_lm
from tandem.models.lora import add_lora, lora_layers, start_adapters
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.scalar import load_scalar_model, start_new_head
from tandem.models.selfcheck import Agreement, check_twin
from tandem.models.stream import EmptyModel, empty_causal_lm, empty_scalar_model
from tandem.models.twin import plain_copy, supports_packing
from tandem.parallel.pieces import fill, own_rows
from tandem.parallel.shard import shards_of
from tandem.parallel.tensor import TensorGroup
from tandem.parallel.world import World

Model = PreTrainedModel | str


def resolve_device(name: str) -> torch.device:
    """The device a knob names; auto takes a GPU if there is one.

    Raises:
        ModelError: cuda was asked for and is not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device must be one that is here; got cuda, and no GPU. Use --device cpu.")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The compute type a knob names; auto is bf16 on a GPU and fp32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


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
    source: Model, config: RunConfig, world: World, *, trained: bool, seed: int = 0
) -> PreTrainedModel:
    """A language model, loaded or as given, ready for its role and laid over the ranks.

    Args:
        source: a folder or hub name, or a module, which is changed in place.
        trained: it gets adapters and gradient checkpointing as configured; else it is frozen.
        seed: of the adapters.
    Raises:
        ModelError: it cannot be used.
    """
    stage = config.parallel.actor_zero_stage
    if isinstance(source, str) and is_split(stage, world, trained=trained):
        empty = empty_causal_lm(
            source, dropout=config.dropout, trust_remote_code=config.trust_remote_code
        )
        if empty is not None:
            return _filled(empty, stage, config, world, trained=trained, seed=seed)
    if isinstance(source, str):
        source = load_causal_lm(
            source, dropout=config.dropout, trust_remote_code=config.trust_remote_code
        )
    return _placed(source, stage, config, world, trained=trained, seed=seed)


def place_scalar(
    source: Model,
    config: RunConfig,
    world: World,
    *,
    trained: bool,
    seed: int,
    needs_head: bool = False,
) -> PreTrainedModel:
    """A model with a scalar head, loaded or as given, ready for its role and laid over the ranks.

    Args:
        source, trained, seed: as `place_policy`; a new head starts from `config.seed`.
        needs_head: refuse a language model, whose head would be random.
    Raises:
        ModelError: it cannot be used.
    """
    stage = config.parallel.critic_zero_stage
    if isinstance(source, str) and is_split(stage, world, trained=trained):
        empty = empty_scalar_model(
            source, dropout=config.dropout, trust_remote_code=config.trust_remote_code
        )
        if empty is not None and not (needs_head and empty.missing):
            return _filled(empty, stage, config, world, trained=trained, seed=seed)
    if isinstance(source, str):
        source = load_scalar_model(
            source,
            seed=config.seed,
            from_causal_lm=False if needs_head else None,
            dropout=config.dropout,
            trust_remote_code=config.trust_remote_code,
        )
    return _placed(source, stage, config, world, trained=trained, seed=seed)


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
    stage: int,
    config: RunConfig,
    world: World,
    *,
    trained: bool,
    seed: int,
) -> PreTrainedModel:
    on_device(model, world.device)
    if trained:
        prepare_for_training(model, config, seed)
    else:
        model.requires_grad_(False).eval()
    spread(model, stage, config, world, trained=trained)
    return model


def _filled(
    empty: EmptyModel,
    stage: int,
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
    spread(model, stage, config, world, trained=trained)
    empty.fill(own_rows)
    if lora_layers(model):
        start_adapters(model, seed, fill)
    if empty.missing:
        start_new_head(model, config.seed, fill)
    return model
