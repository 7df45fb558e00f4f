"""Models loaded to where they lie: whole on this rank, straight into its pieces, or over another's
base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.config.schema import RunConfig
from tandem.engine.devices import resolve_dtype
from tandem.engine.forward import generation_weights
from tandem.engine.frozen_base import carries_adapters, carry_on, check_base
from tandem.engine.placement import keep_on_host, plan_for, spread
from tandem.errors import ModelError, NumericsError
from tandem.generation.runners import make_runner
from tandem.models.checkpoint_ref import CheckpointRef, same_base, checkpoint_ref_of
from tandem.models.frozen import freeze_quantized
from tandem.models.lm_head import check_head
from tandem.models.load import load_causal_lm
from tandem.models.lora import add_lora, is_adapted, keep_start
from tandem.models.meta_init import MetaModel, empty_causal_lm, empty_scalar_model
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.scalar import load_scalar_model, start_new_head, take_backbone
from tandem.models.selfcheck import Agreement, check_twin
from tandem.models.shared import share_base
from tandem.models.source import keep_saved_dtype
from tandem.models.twin import decodes, plain_copy
from tandem.parallel.dtensor import fill, own_rows
from tandem.parallel.masters import cast_weights
from tandem.parallel.shard import ShardPlan, give_memory, shards_of
from tandem.parallel.tensor import TensorGroup
from tandem.parallel.world import World

Model = PreTrainedModel | str


def prepare_for_training(
    model: PreTrainedModel, config: RunConfig, seed: int, *, keeps_start: bool = False
) -> None:
    """Adapters, quantized weights below them and gradient checkpointing as configured; in place.

    Args:
        seed: of new adapters; those that the model came with are trained on.
        keeps_start: keep these as they are too, for `adapters_off`.
    Raises:
        ModelError: its adapters are not those that are configured.
    """
    if is_adapted(model):
        carry_on(model, config.lora)
        if keeps_start:
            keep_start(model)
    elif config.lora.rank > 0:
        add_lora(model, config.lora, seed)
    if config.parallel.frozen_weights:
        freeze_quantized(model, config.parallel.frozen_weights)
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model)


@dataclass(frozen=True, slots=True)
class Base:
    """A placed model on whose frozen weights others are to stand, and what those were read from.

    source: None where the model was given as a module.
    """

    model: PreTrainedModel
    source: str | None


@dataclass(frozen=True, slots=True)
class _Role:
    """How a model is placed; see `place_policy`."""

    plan: ShardPlan
    config: RunConfig
    world: World
    trained: bool
    seed: int
    on_host: bool
    keeps_start: bool = False
    base: Base | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights rest."""
        return torch.device("cpu") if self.on_host else self.world.device

    @property
    def dtype(self) -> torch.dtype:
        """What the run computes in, and weights that compute rest in."""
        return resolve_dtype(self.config.dtype, self.world.device)

    @property
    def streams(self) -> bool:
        """Whether weights are best read where they belong: in pieces, as integers or not at all."""
        frozen = bool(self.config.parallel.frozen_weights)
        return self.plan.stage > 0 or frozen or self.base is not None

    @property
    def options(self) -> dict[str, Any]:
        """For whatever loads a model."""
        remote = self.config.trust_remote_code
        return {"dropout": self.config.dropout, "trust_remote_code": remote}


def place_policy(
    source: Model,
    config: RunConfig,
    world: World,
    *,
    trained: bool,
    seed: int = 0,
    on_host: bool = False,
    keeps_start: bool = False,
) -> PreTrainedModel:
    """A language model, loaded or as given, ready for its role and laid over the ranks.

    With `parallel.frozen_weights` what is not trained is quantized, as it is read if possible: no
    rank then holds more of a weight unquantized than it reads at once. With that or
    `parallel.shared_base`, adapters of an earlier step are carried on instead of merged weights.

    Args:
        source: a folder or hub name, or a module, which is changed in place.
        trained: it gets adapters and gradient checkpointing as configured; else it is frozen.
        seed: of new adapters.
        on_host: frozen weights rest in host memory; the model then only scores.
        keeps_start: adapters that are carried on are kept as they are too, for `adapters_off`.
    Raises:
        ModelError: it cannot be used.
        ConfigError: knobs that do not go together.
    """
    check_base(config, world)
    plan = plan_for(config.parallel.actor_zero_stage, config, world, trained, on_host)
    role = _Role(plan, config, world, trained, seed, on_host, keeps_start)
    if not isinstance(source, str):
        return _placed(source, role)
    start = checkpoint_ref_of(source, unmerged=carries_adapters(config))
    empty = empty_causal_lm(start.base, **role.options) if role.streams else None
    if empty is not None:
        return _filled(empty, start, role)
    return _placed(load_causal_lm(start.adapter or start.base, **role.options), role)


def place_scalar(
    source: Model,
    config: RunConfig,
    world: World,
    *,
    trained: bool,
    seed: int,
    needs_head: bool = False,
    on_host: bool = False,
    base: Base | None = None,
) -> PreTrainedModel:
    """A model with a scalar head, loaded or as given, ready for its role and laid over the ranks.

    Args:
        source, trained, seed, on_host: as `place_policy`; a new head starts from `config.seed`.
        needs_head: refuse a language model, whose head would be random.
        base: whose frozen weights it is to hold instead of its own; they are not read again.
    Raises:
        ModelError: it cannot be used, or does not start from the weights of `base`.
        ConfigError: knobs that do not go together.
    """
    check_base(config, world)
    plan = plan_for(config.parallel.critic_zero_stage, config, world, trained, on_host)
    role = _Role(plan, config, world, trained, seed, on_host, base=base)
    if not isinstance(source, str):
        return _placed(source, role)
    start = checkpoint_ref_of(source, unmerged=carries_adapters(config))
    if base is not None and base.source is not None and not same_base(start.base, base.source):
        raise ModelError(
            "--shared-base must find one model under actor, critic and reward model; got "
            f"{start.base!r} under {source!r}, and {base.source!r} under the actor. Train them "
            "with LoRA from one model, or leave --shared-base off."
        )
    empty = empty_scalar_model(start.base, **role.options) if role.streams else None
    if empty is not None and (start.classifies or not (needs_head and empty.missing)):
        return _filled(empty, start, role)
    only_backbone = start.adapter is not None and not start.classifies
    model = load_scalar_model(
        start.base if only_backbone else start.adapter or start.base,
        seed=config.seed,
        from_causal_lm=False if needs_head and not start.classifies else None,
        **role.options,
    )
    if only_backbone:
        assert start.adapter is not None
        take_backbone(model, load_causal_lm(start.adapter, **role.options))
    return _placed(model, role)


def check_policy(
    model: PreTrainedModel, config: RunConfig, group: TensorGroup | None
) -> Agreement | None:
    """Check a placed language model's head and twin against its own forward; all ranks together.

    Returns:
        how decoding compares with the training forward; None without a twin.
    Raises:
        ModelError: the model is not supported, or a plan of slices is wrong for it.
    """
    with torch.no_grad(), generation_weights(model, group):
        # Slices stand in for the twin; the model's own forward gathers for itself.
        is_whole_here = group is None and shards_of(model).is_split
        own = plain_copy(model) if is_whole_here else model
        check_head(model, own)
        if not decodes(model):
            return None
        return check_twin(model, own, trains_elsewhere=group is not None, make_decoder=make_runner)


def _placed(model: PreTrainedModel, role: _Role) -> PreTrainedModel:
    """A whole model, prepared where it is and then laid where it belongs."""
    keep_saved_dtype(model, model.dtype)
    _prepare(model, role)
    # Before they are moved: masters may stay on the host, and so do floats that became integers.
    cast_weights(model, role.dtype, splits=role.plan.stage > 0)
    nn.Module.to(model, role.device)
    if role.base is not None:
        share_base(role.base.model, model)
    spread(model, role.plan, role.world)
    if role.on_host and role.plan.stage == 0:
        keep_on_host(model, role.world.device)
    return model


def _filled(empty: MetaModel, start: CheckpointRef, role: _Role) -> PreTrainedModel:
    """Prepare and split first, read afterwards: each rank its own rows."""
    model, base = empty.model, role.base
    if start.adapter is not None:
        empty.adapt(start)
    _prepare(model, role)
    cast_weights(model, role.dtype, splits=role.plan.stage > 0)
    is_known = base is not None and base.source is not None
    if base is not None and is_known:
        share_base(base.model, model)  # the same files: there is nothing to read
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            tensor.data = tensor.data.to(role.device)
    if role.plan.stage == 0:
        give_memory(model, role.device)
    spread(model, role.plan, role.world)
    if not is_known:
        _require_finite(empty.fill(own_rows), role.world)
    if empty.missing:
        start_new_head(model, role.config.seed, fill)
    cast_weights(model, role.dtype, splits=role.plan.stage > 0)  # what had no memory before
    if base is not None and not is_known:
        share_base(base.model, model)
    if role.on_host and role.plan.stage == 0:
        keep_on_host(model, role.world.device)
    return model


def _prepare(model: PreTrainedModel, role: _Role) -> None:
    """Adapters, what is trained, and integers, as the role has them; in place."""
    if role.trained:
        prepare_for_training(model, role.config, role.seed, keeps_start=role.keeps_start)
        return
    model.requires_grad_(False).eval()
    if role.config.parallel.frozen_weights:
        freeze_quantized(model, role.config.parallel.frozen_weights)


def _require_finite(unsound: str, world: World) -> None:
    """Every rank stops where one has read a weight that cannot be quantized."""
    found = torch.tensor(float(bool(unsound)), device=world.device)
    if world.size > 1:
        world.all_reduce_(found)
    if found:
        raise NumericsError(
            f"a weight to quantize must be finite; got {unsound or 'one on another rank'} with "
            "values that are not. Load an undamaged model."
        )
