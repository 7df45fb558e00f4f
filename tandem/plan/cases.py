"""The cases of a sweep: which knobs each sets, and which are left out and why.

DeepSpeed-Chat's characterization sweep crosses ZeRO stage, hybrid engine, offload and LoRA in each
step; here stages 0 and 1 and the variants of ZeRO++ (arXiv:2306.10209) and MixZ++ join it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tandem.config.schema import RunConfig
from tandem.config.stages import stage_of
from tandem.errors import ConfigError
from tandem.plan.knobs import Knobs, with_knobs


@dataclass(frozen=True, slots=True)
class Case:
    """One run of one step. name: its folder under the step's. knobs: what it sets."""

    step: str
    name: str
    knobs: Knobs
    ranks: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A case that is not run."""

    step: str
    name: str
    reason: str


def why_left_out(left_out: Sequence[LeftOut]) -> list[str]:
    """One line per reason, with the cases that it concerns."""
    by_reason: dict[str, list[str]] = {}
    for case in left_out:
        by_reason.setdefault(case.reason, []).append(f"{case.step}/{case.name}")
    return [
        f"left out ({len(names)}): {' '.join(names)}: {reason}"
        for reason, names in by_reason.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What is crossed. stages: ZeRO's, of actor and critic alike. lora: ranks of adapters."""

    stages: tuple[int, ...] = (0, 1, 2, 3)
    lora: tuple[int, ...] = (0, 128)
    offload: tuple[bool, ...] = (False, True)
    hybrid: tuple[bool, ...] = (True, False)
    variants: bool = True


def _stage(stage: int) -> dict[str, Any]:
    return {"parallel.actor_zero_stage": stage, "parallel.critic_zero_stage": stage}


_QUANTIZED_WEIGHTS = {"parallel.zero_quantized_weights": True}
_QUANTIZED_GRADIENTS = {"parallel.zero_quantized_gradients": True}
_HPZ = {"parallel.zero_hpz": True}
# Beside the crossed ones: name -> (knobs, whether it needs LoRA). All at stage 3.
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
"""What is about generation alone."""


def sweep_cases(
    config: RunConfig, steps: Sequence[str], ranks: int, axes: Axes
) -> tuple[list[Case], list[LeftOut]]:
    """All cases of some steps that this configuration can run, in order, and the others.

    Args:
        config: what the cases have in common.
    """
    cases: list[Case] = []
    left_out: list[LeftOut] = []
    for step in steps:
        for name, knobs in _combinations(step, axes):
            reason = _why_not(config, step, knobs, ranks)
            if reason:
                left_out.append(LeftOut(step, name, reason))
            else:
                cases.append(Case(step, name, knobs, ranks))
    return cases, left_out


def _combinations(step: str, axes: Axes) -> Iterator[tuple[str, dict[str, Any]]]:
    generates = stage_of(step).family == "rl"
    hybrid = axes.hybrid if generates else (True,)
    for stage, lora, offload, is_hybrid in product(axes.stages, axes.lora, axes.offload, hybrid):
        name, knobs = f"zero{stage}", _stage(stage)
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
        yield f"zero3-{name}{ending}", _stage(3) | adapters | variant


def _why_not(config: RunConfig, step: str, knobs: Knobs, ranks: int) -> str:
    """Why a case cannot be run, or would be another case over again; empty if it is one."""
    # torch comes with these, and the help must not wait for it.
    from tandem.engine.frozen_base import check_base
    from tandem.engine.placement import zero_plus_plus
    from tandem.parallel.world import World

    tp = knobs.get("parallel.inference_tp_size", 1)
    if ranks % tp:
        return f"parallel.inference_tp_size {tp} must divide the ranks; got {ranks}"
    world = World(size=ranks, ranks_per_node=config.parallel.ranks_per_node or ranks)
    try:
        case = with_knobs(config, {**knobs, "stages": [step]})
        check_base(case, world)
        switched_off = zero_plus_plus(case, world)[1]
    except ConfigError as error:
        return str(error)
    return switched_off if any(".zero_" in name for name in knobs) else ""
