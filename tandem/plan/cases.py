"""The cases of a sweep: the knobs that each sets, and which are skipped and why.

Like DeepSpeed-Chat's characterization sweep (ZeRO stage x hybrid engine x offload x LoRA, for each
stage of training), plus ZeRO stages 0 and 1 and variants of ZeRO++ (arXiv:2306.10209) and MixZ++.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tandem.config.engine import engine_settings
from tandem.config.schema import RunConfig
from tandem.config.stages import stage_of
from tandem.errors import ConfigError
from tandem.plan.knobs import Knobs, with_knobs


@dataclass(frozen=True, slots=True)
class Case:
    """One run of one stage. name: its folder below the stage's. knobs: what it sets."""

    stage: str
    name: str
    knobs: Knobs
    ranks: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A case that is not run, and why."""

    stage: str
    name: str
    reason: str


def skip_reasons(skipped: Sequence[Skipped]) -> list[str]:
    """One line per reason, with its cases."""
    by_reason: dict[str, list[str]] = {}
    for case in skipped:
        by_reason.setdefault(case.reason, []).append(f"{case.stage}/{case.name}")
    return [
        f"skipped ({len(names)}): {' '.join(names)}: {reason}"
        for reason, names in by_reason.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values to combine. stages: ZeRO stages of actor and critic. lora: ranks of adapters."""

    stages: tuple[int, ...] = (0, 1, 2, 3)
    lora: tuple[int, ...] = (0, 128)
    offload: tuple[bool, ...] = (False, True)
    hybrid: tuple[bool, ...] = (True, False)
    variants: bool = True


def _zero_stage(stage: int) -> dict[str, Any]:
    return {"parallel.actor_zero_stage": stage, "parallel.critic_zero_stage": stage}


_QUANTIZED_WEIGHTS = {"parallel.zero_quantized_weights": True}
_QUANTIZED_GRADIENTS = {"parallel.zero_quantized_gradients": True}
_HPZ = {"parallel.zero_hpz": True}
# Cases besides the combinations: name -> (knobs, whether it needs LoRA). All at ZeRO stage 3.
_VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "qwz": (_QUANTIZED_WEIGHTS, False),
    "hpz": (_HPZ, False),
    "qgz": (_QUANTIZED_GRADIENTS, False),
    "zero++": (_QUANTIZED_WEIGHTS | _HPZ | _QUANTIZED_GRADIENTS, False),
    "int8-base": ({"parallel.frozen_weights": "int8"}, True),
    "nf4-base": ({"parallel.frozen_weights": "nf4"}, True),
    "tp2": ({"parallel.inference_tp_size": 2}, False),
}
_GENERATING = ("tp2",)
"""Variants that only change generation."""


def sweep_cases(
    config: RunConfig, stages: Sequence[str], ranks: int, axes: Axes
) -> tuple[list[Case], list[Skipped]]:
    """All cases of some stages that this configuration can run, in order, and the skipped ones."""
    cases: list[Case] = []
    skipped: list[Skipped] = []
    for stage in stages:
        for name, knobs in _combinations(stage, axes):
            reason = _why_not(config, stage, knobs, ranks)
            if reason:
                skipped.append(Skipped(stage, name, reason))
            else:
                cases.append(Case(stage, name, knobs, ranks))
    return cases, skipped


def _combinations(stage: str, axes: Axes) -> Iterator[tuple[str, dict[str, Any]]]:
    generates = stage_of(stage).family == "rl"
    hybrid = axes.hybrid if generates else (True,)
    for zero, lora, offload, is_hybrid in product(axes.stages, axes.lora, axes.offload, hybrid):
        name, knobs = f"zero{zero}", _zero_stage(zero)
        knobs["lora.rank"] = lora
        if lora:
            name += f"-lora{lora}"
        if offload:
            name += "-offload"
            knobs["parallel.offload"] = ["optimizer"]
        if not is_hybrid:
            name += "-plain"
            knobs["hybrid_engine"] = False
        yield name, knobs
    for name, (variant, needs_lora) in _VARIANTS.items() if axes.variants else ():
        rank = max(axes.lora)
        if (name in _GENERATING and not generates) or (needs_lora and not rank):
            continue
        adapters = {"lora.rank": rank if needs_lora else 0}
        ending = f"-lora{rank}" if needs_lora else ""
        yield f"zero3-{name}{ending}", _zero_stage(3) | adapters | variant


def _why_not(config: RunConfig, stage: str, knobs: Knobs, ranks: int) -> str:
    """Why a case cannot run, or would repeat another one; empty if it can."""
    # These import torch, which help must not wait for.
    from tandem.engine.shard_plan import check_layout, zero_plus_plus
    from tandem.parallel.world import World

    tp = knobs.get("parallel.inference_tp_size", 1)
    if ranks % tp:
        return f"parallel.inference_tp_size {tp} must divide the ranks; got {ranks}"
    world = World(size=ranks, ranks_per_node=config.parallel.ranks_per_node or ranks)
    try:
        settings = engine_settings(with_knobs(config, {**knobs, "stages": [stage]}))
        check_layout(settings, world)
        switched_off = zero_plus_plus(settings, world)[1]
    except ConfigError as error:
        return str(error)
    return switched_off if any(".zero_" in name for name in knobs) else ""
