"""Placing a model: from a folder, a hub name or a module to weights laid out over the ranks.

    reference -> checkpoint files -> module -> adapters, quantization -> compute type -> shards

A model is built without memory and filled afterwards, so that no rank reads weights that it does
not keep; one whose weights cannot be streamed is loaded whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.config.engine import EngineSettings
from tandem.config.lora import LoraConfig, TrainedRole
from tandem.devices import resolve_dtype
from tandem.engine.shard_plan import check_layout, shard_plan
from tandem.errors import ModelError
from tandem.models.blocks import decoder_blocks
from tandem.models.checkpoint_ref import CheckpointRef, checkpoint_ref_of, same_base
from tandem.models.classifiers import take_backbone
from tandem.models.frozen import freeze_quantized
from tandem.models.load import load_causal_lm
from tandem.models.lora import (
    add_lora,
    is_adapted,
    keep_start,
    lora_layers,
    match_targets,
    train_adapters,
)
from tandem.models.meta_init import MetaModel, empty_causal_lm, empty_scalar_model
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.scalar import load_scalar_model, start_new_head
from tandem.models.shared import share_base
from tandem.models.source import keep_saved_dtype
from tandem.models.token_layers import start_token_rows, trained_tokens
from tandem.models.twin import supports_packing, twin_of
from tandem.models.validate_checkpoint import not_finite
from tandem.parallel.dtensor import fill, own_rows, whole
from tandem.parallel.host_weights import HostWeights
from tandem.parallel.masters import cast_weights
from tandem.parallel.quantize import through_codes
from tandem.parallel.shard import ShardPlan, Shards, give_memory, shard
from tandem.parallel.world import World

Model = PreTrainedModel | str
"""A module, or a folder or hub name."""

_HOST_WEIGHTS = "tandem_host_weights"


@dataclass(frozen=True, slots=True)
class Base:
    """A placed model whose frozen weights other models share.

    source: what those were read from; None where the model was given as a module.
    """

    model: PreTrainedModel
    source: str | None

    @staticmethod
    def of(model: PreTrainedModel, given: Model) -> Base:
        """Of a placed model, which was given as this."""
        return Base(model, model.name_or_path if isinstance(given, str) else None)


@dataclass(frozen=True, slots=True)
class _Role:
    """What one model is for; see `Placement.policy` and `Placement.scalar`."""

    name: TrainedRole
    plan: ShardPlan
    trained: bool
    seed: int
    on_host: bool
    keeps_start: bool = False
    base: Base | None = None
    zero_head: bool = False
    tokens: tuple[int, ...] = ()


class Placement:
    """Places the models of a run.

    With `parallel.frozen_weights`, weights that are not trained are quantized, while they are read
    if possible. With that or `parallel.shared_base`, adapters of an earlier stage are trained on
    instead of merged weights.
    """

    def __init__(self, settings: EngineSettings, world: World) -> None:
        """
        Raises:
            ConfigError: knobs that contradict each other, or that these ranks cannot satisfy.
        """
        check_layout(settings, world)
        self.settings = settings
        self.world = world
        self.dtype = resolve_dtype(settings.dtype, world.device)

    def policy(
        self,
        source: Model,
        *,
        trained: bool,
        seed: int | None = None,
        on_host: bool = False,
        keeps_start: bool = False,
        tokens: tuple[int, ...] = (),
    ) -> PreTrainedModel:
        """A language model, ready for its role.

        Args:
            source: a folder or hub name, or a module, which is changed in place.
            trained: it gets adapters and gradient checkpointing as configured; else it is frozen.
            seed: of new adapters; None: the settings'.
            on_host: frozen weights are kept in host memory; the model then only scores.
            keeps_start: keep a copy of adapters that are trained on, for `adapters_off`; where the
                reference moves, of new ones too.
            tokens: of `lora.train_tokens`, if it is trained.
        Raises:
            ModelError: it cannot be used.
        """
        stage = self.settings.parallel.actor_zero_stage
        role = self._role(
            "actor", stage, trained, seed, on_host, keeps_start=keeps_start, tokens=tokens
        )
        if not isinstance(source, str):
            return self._placed(source, role)
        start = checkpoint_ref_of(source, unmerged=self.settings.carries_adapters)
        empty = empty_causal_lm(start.base, **self._options)
        if empty is not None:
            return self._filled(empty, start, role)
        return self._placed(load_causal_lm(start.adapter or start.base, **self._options), role)

    def scalar(
        self,
        source: Model,
        *,
        trained: bool,
        seed: int | None = None,
        needs_head: bool = False,
        on_host: bool = False,
        base: Base | None = None,
        zero_head: bool = False,
        tokens: tuple[int, ...] = (),
    ) -> PreTrainedModel:
        """A model with a scalar head, ready for its role. A new head is seeded by the settings.

        Args:
            source, trained, seed, on_host, tokens: as for `policy`.
            needs_head: refuse a language model, whose head would be random.
            base: use its frozen weights instead of the model's own, which are not read.
            zero_head: a new head is all zeros.
        Raises:
            ModelError: it cannot be used, or does not start from the weights of `base`.
        """
        stage = self.settings.parallel.critic_zero_stage
        role = self._role(
            "critic", stage, trained, seed, on_host, base=base, zero_head=zero_head, tokens=tokens
        )
        if not isinstance(source, str):
            return self._placed(source, role)
        unmerged = self.settings.takes_adapters("critic", trained=trained)
        start = checkpoint_ref_of(source, unmerged=unmerged)
        if base is not None and base.source is not None and not same_base(start.base, base.source):
            raise ModelError(
                "--shared-base must find one model under actor, critic and reward model; got "
                f"{start.base!r} under {source!r}, and {base.source!r} under the actor. Train them "
                "with LoRA from one model, or leave --shared-base off."
            )
        empty = empty_scalar_model(start.base, **self._options)
        if empty is not None and (start.classifies or not (needs_head and empty.missing)):
            return self._filled(empty, start, role)
        only_backbone = start.adapter is not None and not start.classifies
        model = load_scalar_model(
            start.base if only_backbone else start.adapter or start.base,
            seed=self.settings.seed,
            from_causal_lm=False if needs_head and not start.classifies else None,
            zero_head=zero_head,
            **self._options,
        )
        if only_backbone:
            assert start.adapter is not None
            take_backbone(model, load_causal_lm(start.adapter, **self._options))
        return self._placed(model, role)

    @property
    def _options(self) -> dict[str, Any]:
        """For every function that loads a model."""
        remote = self.settings.trust_remote_code
        return {"dropout": self.settings.dropout, "trust_remote_code": remote}

    def _role(
        self,
        name: TrainedRole,
        stage: int,
        trained: bool,
        seed: int | None,
        on_host: bool,
        **more: Any,
    ) -> _Role:
        plan = shard_plan(stage, self.settings, self.world, trained=trained, on_host=on_host)
        seed = self.settings.seed if seed is None else seed
        return _Role(name, plan, trained, seed, on_host, **more)

    def _placed(self, model: PreTrainedModel, role: _Role) -> PreTrainedModel:
        """Lay out a model that was loaded whole."""
        keep_saved_dtype(model, model.dtype)
        self._prepare(model, role)
        # Before they move: masters may stay on the host, and so do floats that became integers.
        cast_weights(model, self.dtype, splits=role.plan.stage > 0)
        nn.Module.to(model, self._device(role))
        if role.base is not None:
            share_base(role.base.model, model)
        shard_model(model, role.plan, self.world)
        _round_as_gathered(model, role.plan, self.world)
        return self._on_host(model, role)

    def _filled(self, empty: MetaModel, start: CheckpointRef, role: _Role) -> PreTrainedModel:
        """Lay out a model without memory; each rank then reads its own rows."""
        model, base = empty.model, role.base
        if start.adapter is not None:
            empty.adapt(start)
        self._prepare(model, role)
        cast_weights(model, self.dtype, splits=role.plan.stage > 0)
        reads = base is None or base.source is None  # else the base has read the same files
        if base is not None and not reads:
            share_base(base.model, model)
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.is_meta:
                tensor.data = tensor.data.to(self._device(role))
        if role.plan.stage == 0:
            give_memory(model, self._device(role))
        shard_model(model, role.plan, self.world)
        if reads:
            _require_finite(empty.fill(own_rows), model, self.world)
        else:
            empty.fill_buffers()
        if empty.missing:
            start_new_head(model, self.settings.seed, fill, zeros=role.zero_head)
        if start.adapter is None and role.trained:
            start_token_rows(model, whole, fill)
        cast_weights(model, self.dtype, splits=role.plan.stage > 0)  # what had no memory before
        if base is not None and reads:
            share_base(base.model, model)
        _round_as_gathered(model, role.plan, self.world)
        return self._on_host(model, role)

    def _device(self, role: _Role) -> torch.device:
        return torch.device("cpu") if role.on_host else self.world.device

    def _on_host(self, model: PreTrainedModel, role: _Role) -> PreTrainedModel:
        """The model; whole weights that are kept on the host then visit the device."""
        if role.on_host and role.plan.stage == 0:
            blocks = decoder_blocks(model)
            model.__dict__[_HOST_WEIGHTS] = HostWeights(model, blocks, self.world.device)
        return model

    def _prepare(self, model: PreTrainedModel, role: _Role) -> None:
        if role.trained:
            prepare_for_training(
                model,
                self.settings,
                role.seed,
                role=role.name,
                keeps_start=role.keeps_start,
                tokens=role.tokens,
            )
            return
        model.requires_grad_(False).eval()
        if self.settings.parallel.frozen_weights:
            freeze_quantized(model, self.settings.parallel.frozen_weights)


def prepare_for_training(
    model: PreTrainedModel,
    settings: EngineSettings,
    seed: int,
    *,
    role: TrainedRole = "actor",
    keeps_start: bool = False,
    tokens: tuple[int, ...] = (),
) -> None:
    """Adapters, quantized weights below them and gradient checkpointing as configured; in place.

    Args:
        role: whose adapters and checkpointing.
        seed: of new adapters; those that the model came with are trained on.
        keeps_start: as of `Placement.policy`.
        tokens: whose rows are trained; adapters that the model came with must have the same.
    Raises:
        ModelError: its adapters are not those that are configured.
    """
    lora, was_adapted = settings.lora.of(role), is_adapted(model)
    if was_adapted:
        is_free = role == "critic" and not settings.carries_adapters  # of the policy's rank
        flag = settings.lora.rank_flag(role)
        _continue_adapters(model, lora, tokens, flag, "--lora.critic-rank" if is_free else flag)
    elif lora.rank > 0:
        add_lora(model, lora, seed, tokens)
    if keeps_start and (was_adapted or settings.moving.update_every):
        keep_start(model)  # of a model without adapters there is nothing to keep
    if settings.parallel.frozen_weights and lora.rank > 0:
        freeze_quantized(model, settings.parallel.frozen_weights)
        if not was_adapted:
            start_token_rows(model)  # as the quantized matrix has them, which the reference uses
    if role in settings.checkpointed:
        enable_gradient_checkpointing(model, settings.recompute)


def _continue_adapters(
    model: PreTrainedModel,
    lora: LoraConfig,
    tokens: tuple[int, ...],
    rank_flag: str,
    advised: str,
) -> None:
    """Train the adapters that a model came with, as if they had just been added; in place.

    Args:
        rank_flag: has set their rank; advised: should set it.
    """
    layers = lora_layers(model)
    first = layers[0][1]
    if (first.rank, first.alpha) != (lora.rank, lora.alpha):
        raise ModelError(
            f"{rank_flag} and --lora.alpha must be those of the adapters that are trained on; got "
            f"rank {lora.rank}, alpha {lora.alpha:g} for rank {first.rank}, alpha "
            f"{first.alpha:g}. Use {advised} {first.rank} --lora.alpha "
            f"{first.alpha:g}, or start from a model without adapters."
        )
    differing = sorted(set(match_targets(model, lora.targets)) ^ {name for name, _ in layers})
    if differing:
        raise ModelError(
            "lora.targets must be the layers of the adapters that are trained on; got "
            f"{' '.join(lora.targets)}, which differs at {differing[0]}. Use the targets that "
            "they were made with."
        )
    if trained_tokens(model) != tokens:
        raise ModelError(
            "lora.train_tokens must be the tokens of the adapters that are trained on; got "
            f"{_named(tokens)} for {_named(trained_tokens(model))}. Use the tokens that they were "
            "made with."
        )
    for _, layer in layers:
        layer.lora_dropout.p = lora.dropout
    train_adapters(model)


def _named(tokens: tuple[int, ...]) -> str:
    return f"ids {' '.join(map(str, tokens))}" if tokens else "none"


def shard_model(model: PreTrainedModel, plan: ShardPlan, world: World) -> Shards:
    """Split a model as planned, or only record its ranks where it stays whole; in place."""
    return shard(model, decoder_blocks(model) if plan.stage > 0 else (), plan, world)


@contextmanager
def onload(model: PreTrainedModel) -> Iterator[None]:
    """Within: weights that are kept in host memory come to the device as forwards need them."""
    host = model.__dict__.get(_HOST_WEIGHTS)
    if host is None:
        yield
        return
    runs = [decoder_blocks(model)]
    if supports_packing(model):
        runs.append(decoder_blocks(twin_of(model)))
    with host.onload(*runs):
        yield


def _round_as_gathered(model: PreTrainedModel, plan: ShardPlan, world: World) -> None:
    """Round a whole model's weights as trained models' are on their way to a rank (qwZ), once they
    have been read; in place."""
    if plan.stage == 0 and plan.quantized_weights:
        through_codes(model, world.size)


def _require_finite(unsound: str, model: PreTrainedModel, world: World) -> None:
    """Stop every rank if one has read a weight that is not finite."""
    found = torch.tensor(float(bool(unsound)), device=world.device)
    world.all_reduce_(found)
    if found:
        raise not_finite(str(model.name_or_path), unsound or "a weight on another rank")
