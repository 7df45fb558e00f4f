"""How models are split over the ranks: ZeRO stages, replicas, ZeRO++, and the rules for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.config.engine import EngineSettings
from tandem.config.lora import frozen_base_problems
from tandem.config.spellings import listed
from tandem.devices import resolve_dtype
from tandem.errors import ConfigError
from tandem.parallel.shard import ShardPlan
from tandem.parallel.world import World

_NEEDED_STAGE = {"zero_hpz": 3, "zero_quantized_weights": 1, "zero_quantized_gradients": 1}
"""The parts of ZeRO++, and the lowest ZeRO stage at which each has anything to do."""


def check_layout(settings: EngineSettings, world: World) -> None:
    """Check everything about shared and quantized bases, replicas and ZeRO++ that is known before
    a model is loaded.

    Raises:
        ConfigError: knobs that contradict each other, or that these ranks cannot satisfy.
    """
    parallel = settings.parallel
    problems = list(frozen_base_problems(parallel, settings.lora))
    stages = (parallel.actor_zero_stage, parallel.critic_zero_stage)
    if parallel.shared_base and world.size > 1 and any(stages):
        problems.append(
            "parallel.shared_base must go with ZeRO stage 0 over several ranks: each holds the "
            f"one base whole, and splitting would give every model pieces of its own; got stages "
            f"{stages[0]} and {stages[1]}. Use --actor-zero-stage 0 --critic-zero-stage 0, or "
            "leave --shared-base off"
        )
    if problems:
        raise ConfigError("; ".join(problems) + ".")
    if parallel.replicas > 1:
        _check_replicas(settings, world)
    if parallel.zero_gradient_bits != 8 and not parallel.zero_quantized_gradients:
        raise ConfigError(
            "parallel.zero_gradient_bits must go with parallel.zero_quantized_gradients; got "
            f"{parallel.zero_gradient_bits} without. Add --zero-quantized-gradients."
        )
    if parallel.zero_quantized_weights and parallel.inference_tp_size > 1:
        raise ConfigError(
            "parallel.zero_quantized_weights must go without tensor-parallel generation, which "
            "slices the exact weights, and training does not compute with those; got "
            f"parallel.inference_tp_size {parallel.inference_tp_size}. Use one of the two."
        )


def _check_replicas(settings: EngineSettings, world: World) -> None:
    parallel, replicas = settings.parallel, settings.parallel.replicas
    node = world.ranks_per_node
    if world.size % replicas or world.size == replicas:
        copies = [n for n in range(1, world.size) if world.size % n == 0]
        fit = [n for n in copies if not (node % (world.size // n) and world.size // n % node)]
        raise ConfigError(
            f"parallel.replicas must divide the ranks into groups of several; got {replicas} for "
            f"{world.size}. Use {listed([str(n) for n in fit or [1]])}."
        )
    pieces = world.size // replicas
    if node % pieces and pieces % node:
        raise ConfigError(
            "parallel.replicas must give each copy whole nodes, or each node whole copies; got "
            f"copies over {pieces} ranks where a node has {node}. Use the number "
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
    if _highest_stage(settings) == 0:
        raise ConfigError(
            "parallel.replicas must go with ZeRO stages above 0, for at 0 every rank has all; got "
            f"{replicas}. Set --actor-zero-stage, or leave it 1."
        )


def shard_plan(
    stage: int, settings: EngineSettings, world: World, *, trained: bool, on_host: bool = False
) -> ShardPlan:
    """How one model is split over the ranks; stage 0 where it stays whole.

    A frozen model is split from stage 3 on: the lower stages split optimizer states and gradients,
    which it does not have. Offloaded trained weights are split even on one rank, because they are
    fetched block by block. Weights are gathered in the compute type.

    Args:
        stage: the ZeRO stage of the model's role.
        on_host: a frozen model's weights are kept in host memory.
    """
    offloads = trained and "params" in settings.parallel.offload
    splits = world.size > 1 and (stage > 0 if trained else stage == 3)
    used = 3 if offloads else stage if splits else 0
    dtype = resolve_dtype(settings.dtype, world.device)
    extras, _ = zero_plus_plus(settings, world)
    return ShardPlan(
        stage=used,
        gather_dtype=None if dtype == torch.float32 else dtype,
        hpz=extras.hpz,
        offload_params=offloads or (on_host and used > 0),
        quantized_weights=extras.quantized_weights and stage > 0,
        gradient_bits=extras.gradient_bits,
        replicas=settings.parallel.replicas,
    )


@dataclass(frozen=True, slots=True)
class ZeroPlusPlus:
    """The parts of ZeRO++ that a run uses: hpZ, qwZ, and qgZ's bits between nodes (0: off)."""

    hpz: bool = False
    quantized_weights: bool = False
    gradient_bits: int = 0


def zero_plus_plus(settings: EngineSettings, world: World) -> tuple[ZeroPlusPlus, str]:
    """The requested parts of ZeRO++ that are useful on these ranks, and one line on the others
    (empty where there are none)."""
    parallel = settings.parallel
    asked = [name for name in _NEEDED_STAGE if getattr(parallel, name)]
    reasons = {name: _why_off(name, settings, world) for name in asked}
    used = {name for name in asked if not reasons[name]}
    lines = [
        f"{', '.join(f'parallel.{name}' for name in asked if reasons[name] == reason)} switched "
        f"off: {reason}"
        for reason in dict.fromkeys(filter(None, reasons.values()))
    ]
    extras = ZeroPlusPlus(
        hpz="zero_hpz" in used,
        quantized_weights="zero_quantized_weights" in used,
        gradient_bits=parallel.zero_gradient_bits if "zero_quantized_gradients" in used else 0,
    )
    return extras, "; ".join(lines)


def _why_off(name: str, settings: EngineSettings, world: World) -> str:
    """Why a part of ZeRO++ would do nothing useful; empty where it is useful."""
    stage, needed = _highest_stage(settings), _NEEDED_STAGE[name]
    if world.size == 1:
        return "one rank sends nothing"
    if stage < needed:
        return f"it takes ZeRO stage {needed}, and the stages are at most {stage}"
    if name == "zero_hpz" and world.ranks_per_node == 1:
        return "a node of one rank has no other rank to share a second copy with"
    if world.num_nodes > 1 or (name != "zero_hpz" and settings.parallel.zero_forced):
        return ""
    reason = f"all {world.size} ranks share one node (parallel.ranks_per_node) and its fast network"
    return reason if name == "zero_hpz" else f"{reason}; --zero-forced keeps it on"


def _highest_stage(settings: EngineSettings) -> int:
    """The highest ZeRO stage of the models that the run trains."""
    parallel = settings.parallel
    if "params" in parallel.offload:
        return 3
    stages = {"actor": parallel.actor_zero_stage, "critic": parallel.critic_zero_stage}
    return max((stages[role] for role in settings.trained_roles), default=0)
