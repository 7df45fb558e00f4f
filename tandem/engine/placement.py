"""A model's weights laid over the ranks and between device and host, as configured for its role."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tandem.config.schema import RunConfig
from tandem.config.stages import in_order
from tandem.engine.devices import resolve_dtype
from tandem.errors import ConfigError
from tandem.models.blocks import decoder_blocks
from tandem.models.twin import supports_packing, twin_of
from tandem.parallel.host_weights import HostWeights
from tandem.parallel.quantize import through_codes
from tandem.parallel.shard import ShardPlan, Shards, shard
from tandem.parallel.world import World

_HOST_WEIGHTS = "tandem_host_weights"

_HPZ, _WEIGHTS, _GRADIENTS = "zero_hpz", "zero_quantized_weights", "zero_quantized_gradients"
_NEEDED_STAGE = {_HPZ: 3, _WEIGHTS: 1, _GRADIENTS: 1}
"""The parts of ZeRO++, and the ZeRO stage from which on there is something for them to do."""


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
    Raises:
        ConfigError: knobs of ZeRO++ or replicas that do not go together.
    """
    check_replicas(config, world)
    configured = stage
    offload_trained = trained and "params" in config.parallel.offload
    splits = world.size > 1 and (stage > 0 if trained else stage == 3)
    if offload_trained:
        stage = 3
    elif not splits:
        stage = 0
    dtype = resolve_dtype(config.dtype, world.device)
    extras, _ = zero_plus_plus(config, world)
    return ShardPlan(
        stage=stage,
        gather_dtype=None if dtype == torch.float32 else dtype,
        hpz=extras.hpz,
        offload_params=offload_trained or (on_host and stage > 0),
        quantized_weights=extras.quantized_weights and configured > 0,
        gradient_bits=extras.gradient_bits,
        replicas=config.parallel.replicas,
    )


def check_replicas(config: RunConfig, world: World) -> None:
    """Refuse replicas that the ranks cannot form, or that do not go with other knobs.

    Raises:
        ConfigError: as it says.
    """
    parallel, replicas = config.parallel, config.parallel.replicas
    if replicas == 1:
        return
    if world.size % replicas or world.size == replicas:
        raise ConfigError(
            f"parallel.replicas must divide the ranks into groups of several; got {replicas} for "
            f"{world.size}. Use a smaller divisor, as the number of nodes ({world.num_nodes})."
        )
    pieces = world.size // replicas
    if world.ranks_per_node % pieces and pieces % world.ranks_per_node:
        raise ConfigError(
            "parallel.replicas must give each copy whole nodes, or each node whole copies; got "
            f"copies over {pieces} ranks where a node has {world.ranks_per_node}. Use the number "
            f"of nodes ({world.num_nodes})."
        )
    if pieces % parallel.inference_tp_size:
        raise ConfigError(
            "parallel.inference_tp_size must divide the ranks of a copy (parallel.replicas); got "
            f"{parallel.inference_tp_size} for {pieces}. Use a divisor."
        )
    if used := [f"parallel.{name}" for name in _NEEDED_STAGE if getattr(parallel, name)]:
        raise ConfigError(
            f"parallel.replicas must be 1 with {', '.join(used)}, whose collectives are of all "
            f"ranks; got {replicas}. Use one or the other: a copy in each node needs no ZeRO++."
        )
    if _highest_stage(config) == 0:
        raise ConfigError(
            "parallel.replicas must go with ZeRO stages above 0, for at 0 every rank has all; got "
            f"{replicas}. Set --actor-zero-stage, or leave it 1."
        )


@dataclass(frozen=True, slots=True)
class ZeroPlusPlus:
    """What of ZeRO++ a run uses: hpZ, qwZ, and the bits of qgZ between nodes (0 without it)."""

    hpz: bool = False
    quantized_weights: bool = False
    gradient_bits: int = 0


def zero_plus_plus(config: RunConfig, world: World) -> tuple[ZeroPlusPlus, str]:
    """What of ZeRO++ is of use where the run is, and one line on what is switched off.

    Returns:
        the settings, for models that lie in pieces; the line, empty where nothing is switched off.
    Raises:
        ConfigError: knobs that do not go together.
    """
    parallel = config.parallel
    _check_zero_plus_plus(config)
    asked = [name for name in _NEEDED_STAGE if getattr(parallel, name)]
    reasons = {name: _why_off(name, config, world) for name in asked}
    used = [name for name in asked if not reasons[name]]
    by_reason: dict[str, list[str]] = {}
    for name in asked:
        if name not in used:
            by_reason.setdefault(reasons[name], []).append(f"parallel.{name}")
    settings = ZeroPlusPlus(
        hpz=_HPZ in used,
        quantized_weights=_WEIGHTS in used,
        gradient_bits=parallel.zero_gradient_bits if _GRADIENTS in used else 0,
    )
    line = "; ".join(
        f"{', '.join(names)} switched off: {reason}" for reason, names in by_reason.items()
    )
    return settings, line


def _check_zero_plus_plus(config: RunConfig) -> None:
    parallel = config.parallel
    if parallel.zero_gradient_bits != 8 and not parallel.zero_quantized_gradients:
        raise ConfigError(
            "parallel.zero_gradient_bits must go with parallel.zero_quantized_gradients; got "
            f"{parallel.zero_gradient_bits} without. Add --zero-quantized-gradients."
        )
    if parallel.zero_quantized_weights and parallel.inference_tp_size > 1:
        raise ConfigError(
            "parallel.zero_quantized_weights must go without tensor-parallel generation, whose "
            "slices are made of the exact weights, which training does not see; got "
            f"parallel.inference_tp_size {parallel.inference_tp_size}. Use one of the two."
        )


def _why_off(name: str, config: RunConfig, world: World) -> str:
    """Why a part of ZeRO++ would do nothing, or nothing useful; empty where it is of use."""
    stage, needed = _highest_stage(config), _NEEDED_STAGE[name]
    if world.size == 1:
        return "one rank sends nothing"
    if stage < needed:
        return f"it takes ZeRO stage {needed}, and the stages are at most {stage}"
    if name == _HPZ and world.ranks_per_node == 1:
        return "a node of one rank has nobody to share a second copy with"
    if world.num_nodes > 1 or (name != _HPZ and config.parallel.zero_forced):
        return ""
    reason = f"all {world.size} ranks share one node (parallel.ranks_per_node) and its fast network"
    return reason if name == _HPZ else f"{reason}; --zero-forced keeps it on"


def _highest_stage(config: RunConfig) -> int:
    """Of the models that the run's steps train."""
    if "params" in config.parallel.offload:
        return 3
    stages = {
        "actor": config.parallel.actor_zero_stage,
        "critic": config.parallel.critic_zero_stage,
    }
    trained = {role for stage in in_order(config.stages) for role in stage.trains}
    return max((stages[role] for role in trained), default=0)


def spread(model: PreTrainedModel, plan: ShardPlan, world: World) -> Shards:
    """Split `model` as planned, or only note who computes it; in place."""
    if plan.stage == 0 and plan.quantized_weights:
        # The trained ones compute with weights that came through the codes, and so must these.
        through_codes(model, world.size)
    return shard(model, decoder_blocks(model) if plan.stage > 0 else (), plan, world)


def keep_on_host(model: PreTrainedModel, device: torch.device) -> None:
    """Let a frozen model's whole weights rest in host memory; `visiting` brings them."""
    model.__dict__[_HOST_WEIGHTS] = HostWeights(model, decoder_blocks(model), device)


@contextmanager
def onload(model: PreTrainedModel) -> Iterator[None]:
    """Within: weights that rest in host memory come to the device as forwards need them."""
    host = model.__dict__.get(_HOST_WEIGHTS)
    if host is None:
        yield
        return
    runs = [decoder_blocks(model)]
    if supports_packing(model):
        runs.append(decoder_blocks(twin_of(model)))
    with host.onload(*runs):
        yield
