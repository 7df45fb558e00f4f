"""Ways to place a run: which fit, how fast each is, and what the others fail by."""

from __future__ import annotations

import math
import shlex
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, get_args, get_type_hints

from tandem.config.load import plain_values
from tandem.config.parallel import ParallelConfig
from tandem.config.rules import rule_problems
from tandem.config.schema import RunConfig
from tandem.config.stages import Stage, in_order
from tandem.memory.model import FROZEN_BLOCKS
from tandem.memory.ways import size_text
from tandem.plan.knobs import Knobs
from tandem.predict.hardware import Hardware
from tandem.predict.memory import Models, answers_are_scored
from tandem.predict.rows import Rows
from tandem.predict.stage import StagePrediction, predict_stage

_SPARE = 0.9
"""Of what a rank may hold, as much as more answers at once than configured may fill."""
ModelsOf = Mapping[str, Models]
"""The models of each stage, by its name."""
_MOVABLE: tuple[Any, ...] = get_args(get_args(get_type_hints(ParallelConfig)["offload"])[0])
"""What `parallel.offload` can name: optimizer, params, and the frozen models."""


@dataclass(frozen=True)
class Laid:
    """A run with one layout's knobs: its stages' predictions; changes: the knobs that differ from
    the configuration. seconds: of all stages with their evaluations and the comparison at the
    end, where held-out rows are known; or of a step of each where their number is not known."""

    changes: Knobs
    config: RunConfig
    stages: tuple[StagePrediction, ...]

    @cached_property
    def peak(self) -> float:
        """The largest bytes of a rank, over the stages."""
        return max(stage.peak for stage in self.stages)

    @property
    def knows_steps(self) -> bool:
        """Whether every stage's number of steps is known."""
        return all(stage.total_seconds is not None for stage in self.stages)

    @cached_property
    def seconds(self) -> float:
        """Of all stages, or of one step of each."""
        if self.knows_steps:
            return sum(
                (stage.total_seconds or 0.0)
                + (stage.comparison.seconds if stage.comparison is not None else 0.0)
                for stage in self.stages
            )
        return sum(stage.step_seconds for stage in self.stages)

    @property
    def trains_alike(self) -> bool:
        """Whether the update is the same: no adapters or integers in place of full weights."""
        return not {"lora.rank", "parallel.frozen_weights", "parallel.shared_base"} & {
            *self.changes
        }

    @property
    def worst(self) -> StagePrediction:
        """The stage of the peak."""
        return max(self.stages, key=lambda stage: stage.peak)

    def fits(self, limit: float | None = None) -> bool:
        """Whether every rank stays within its device, or within `limit` bytes."""
        return all(s.peak <= (s.budget if limit is None else limit) for s in self.stages)

    def flags(self) -> str:
        """The changes as flags, as a shell takes them (`--frozen-weights ''`)."""
        return shlex.join(flags_of(self.changes)) or "as it is"


def predict_run(
    config: RunConfig, models: ModelsOf, rows: Mapping[str, Rows], hardware: Hardware, ranks: int
) -> tuple[StagePrediction, ...]:
    """Every stage of a run."""
    return tuple(
        predict_stage(config, stage, models[stage.name], rows[stage.name], hardware, ranks)
        for stage in in_order(config.stages)
    )


def layouts(
    config: RunConfig,
    models: ModelsOf,
    rows: Mapping[str, Rows],
    hardware: Hardware,
    ranks: int,
    *,
    trains_alike: bool = False,
    few: bool = False,
    limit: float | None = None,
) -> list[Laid]:
    """Every layout that the knobs allow, the fastest first.

    Each also has the most answers at once that fit. Where `generation_batch_size` is set, that is
    tried only if nothing fits with it.

    Args:
        trains_alike: only those that compute the same update: no adapters or integers in place of
            full weights.
        few: only ZeRO stage 3, offload, slices and micro-batches.
        limit: bytes of a rank; None: the device's.
    """
    first: list[Laid] = []
    for knobs in _candidates(config, hardware, ranks, trains_alike, few):
        changed = _changed(config, knobs)
        if next(rule_problems(changed), None):
            continue  # knobs that exclude each other
        if not can_slice(changed, models):
            continue
        stages = predict_run(changed, models, rows, hardware, ranks)
        first.append(Laid(_changes(config, knobs), changed, stages))
    sizes = _answer_batches(config, ranks)
    if sets_answer_batch(config) and any(laid.trains_alike and laid.fits(limit) for laid in first):
        sizes = []
    found: dict[tuple[object, ...], Laid] = {}
    for own in first:
        resized = partial(_resized, own, models, rows, hardware, ranks)
        for laid in (own, *_with_most_answers(own, sizes, resized, limit)):
            key = (round(laid.peak), f"{laid.seconds:.6g}")
            # Of those that come to the same, the one that changes least.
            if key not in found or len(laid.changes) < len(found[key].changes):
                found[key] = laid
    # Of those within a percent of each other, the one that changes least, then the smallest.
    return sorted(
        found.values(),
        key=lambda laid: (
            round(math.log(max(laid.seconds, 1e-9)), 2),
            len(laid.changes),
            laid.peak,
        ),
    )


def _candidates(
    config: RunConfig, hardware: Hardware, ranks: int, trains_alike: bool, few: bool
) -> Iterator[dict[str, Any]]:
    own, parallel = config.lora.rank, config.parallel
    zero = [(parallel.actor_zero_stage, parallel.critic_zero_stage)]
    if ranks > 1:
        zero = [*dict.fromkeys([*zero, (0, 0), (2, 2), (3, 3)])]
    adapters = [(own, parallel.frozen_weights, parallel.shared_base)]
    if not trains_alike:
        adapters += [(own or 16, "", False), (own or 16, "nf4", False)]
    offload: list[tuple[str, ...]] = [parallel.offload]
    if not hardware.on_cpu:
        offload += [(), ("optimizer",), (*_MOVABLE[:1], *_MOVABLE[2:]), _MOVABLE]
    micro = config.micro_batch_tokens
    budgets = [micro, *(size for size in (micro // 4, micro // 16) if size >= 64)][
        : 2 + hardware.on_cpu
    ]
    slices = [parallel.inference_tp_size]
    if ranks > 1 and not hardware.on_cpu:
        slices += [parts for parts in (2, 8) if ranks % parts == 0]
    again = [config.gradient_checkpointing, True]
    states = [config.kept_states, *[0.0] * hardware.on_cpu]
    if few:
        budgets, again, zero = budgets[:2], again[:1], zero[-1:]
    combinations = product(
        zero, dict.fromkeys(adapters), dict.fromkeys(offload), budgets,
        dict.fromkeys(slices), dict.fromkeys(again), dict.fromkeys(states),
    )  # fmt: skip
    for (actor, critic), (
        rank,
        frozen,
        shared,
    ), moved, tokens, parts, checkpointing, kept in combinations:
        if parts > 1 and actor != 3:
            continue
        yield {
            "parallel.actor_zero_stage": actor,
            "parallel.critic_zero_stage": critic,
            "lora.rank": rank,
            "parallel.frozen_weights": frozen,
            "parallel.shared_base": shared,
            "parallel.offload": list(moved),
            "micro_batch_tokens": tokens,
            "parallel.inference_tp_size": parts,
            "gradient_checkpointing": checkpointing,
            "kept_states": kept,
        }


def can_slice(config: RunConfig, models: ModelsOf) -> bool:
    """Whether generation can divide every stage's policy as configured."""
    parts, block = config.parallel.inference_tp_size, FROZEN_BLOCKS[config.parallel.frozen_weights]
    return all(each.policy.slices_into(parts, block) for each in models.values())


def sets_answer_batch(config: RunConfig) -> bool:
    """Whether `generation_batch_size` is another than its default."""
    return config.generation_batch_size != RunConfig.generation_batch_size


def _answer_batches(config: RunConfig, ranks: int) -> list[int]:
    """Powers of two for `generation_batch_size`, up to the answers that a rank has in a step, or to
    the size that is set; none where no stage generates."""
    running = [stage for stage in in_order(config.stages) if _generates(config, stage)]
    if not running:
        return []
    largest = config.generation_batch_size
    if not sets_answer_batch(config):
        most = [getattr(config, s.section).prompts_per_step for s in running if s.family == "rl"]
        answers = max([1, *most]) * config.sampling.samples_per_prompt
        largest = max(largest, 2 ** (-(-answers // ranks) - 1).bit_length())
    return [2**power for power in range(largest.bit_length())]


def _generates(config: RunConfig, stage: Stage) -> bool:
    """Whether answers are generated in a stage, to be trained on or to normalize scores."""
    scores = stage.leaves == "reward model" and answers_are_scored(config)
    return stage.family == "rl" or scores


def _with_most_answers(
    laid: Laid, sizes: Sequence[int], resized: Callable[[int], Laid], limit: float | None
) -> Iterator[Laid]:
    """The layout with the largest of these batches of answers that fits, where that is another than
    its own; where none fits, the largest at which generation is not what the layout fails by."""
    own = laid.config.generation_batch_size
    if laid.fits(limit):
        spare = _SPARE * (laid.worst.budget if limit is None else limit)
        larger = [size for size in sizes if size > own]
        if larger and not (most := resized(larger[-1])).fits(spare):
            number = bisect_right(larger, spare, hi=len(larger) - 1, key=lambda n: resized(n).peak)
            larger = larger[:number]
            most = resized(larger[-1]) if larger else laid
        if larger:
            yield most
        return
    if not (smaller := [size for size in sizes if size < own]):
        return
    least = resized(smaller[0])
    if least.peak < laid.peak:
        allowed = max(least.peak, laid.worst.budget if limit is None else limit)
        number = bisect_right(smaller, allowed, lo=1, key=lambda n: resized(n).peak)
        yield resized(smaller[number - 1])


def _resized(
    laid: Laid,
    models: ModelsOf,
    rows: Mapping[str, Rows],
    hardware: Hardware,
    ranks: int,
    size: int,
) -> Laid:
    """A layout with another `generation_batch_size`."""
    config = replace(laid.config, generation_batch_size=size)
    stages = tuple(
        predict_stage(config, stage, models[stage.name], rows[stage.name], hardware, ranks)
        if _generates(config, stage)
        else known
        for stage, known in zip(in_order(config.stages), laid.stages, strict=True)
    )
    return Laid({**laid.changes, "generation_batch_size": size}, config, stages)


def _changed(config: RunConfig, knobs: Knobs) -> RunConfig:
    """The configuration with a candidate's knobs, without the checks that `with_knobs` makes."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in knobs.items():
        section, _, knob = name.rpartition(".")
        sections.setdefault(section, {})[knob] = tuple(value) if isinstance(value, list) else value
    own = sections.pop("", {})
    return replace(
        config, **own, **{name: replace(getattr(config, name), **v) for name, v in sections.items()}
    )


def _changes(config: RunConfig, knobs: Knobs) -> dict[str, Any]:
    values = plain_values(config)
    changed: dict[str, Any] = {}
    for name, value in knobs.items():
        at: Any = values
        for part in name.split("."):
            at = at[part]
        if (list(at) if isinstance(at, list | tuple) else at) != value:
            changed[name] = value
    return changed


_SHORT = {"parallel.actor_zero_stage": "actor-zero-stage", "lora.rank": "lora-rank",
          "parallel.critic_zero_stage": "critic-zero-stage", "parallel.offload": "offload",
          "parallel.frozen_weights": "frozen-weights", "parallel.shared_base": "shared-base",
          "parallel.inference_tp_size": "inference-tp-size"}  # fmt: skip


def flags_of(changes: Knobs) -> list[str]:
    """Knobs as words of a command line."""
    words: list[str] = []
    for name, value in changes.items():
        text = _SHORT.get(name, name.replace("_", "-"))
        if isinstance(value, bool):
            words.append(f"--{text}" if value else f"--no-{text}")
        elif isinstance(value, list | tuple):
            words += [f"--{text}", *(map(str, value) if value else [""])]
        else:
            words += [f"--{text}", str(value)]
    return words


def failures(found: Sequence[Laid], limit: float | None, most: int = 3) -> list[tuple[Laid, str]]:
    """Layouts that do not fit, those with fewest changes first, and what each fails by."""
    wrong = sorted(
        (laid for laid in found if not laid.fits(limit)),
        key=lambda laid: (len(laid.changes), laid.peak),
    )
    told: list[Laid] = []
    for laid in wrong:  # more changes that do not help either say nothing new
        if not any(_is_within(other.changes, laid.changes) for other in told if other.changes):
            told.append(laid)
    return [(laid, why_not(laid, limit)) for laid in told[:most]]


def _is_within(some: Knobs, more: Knobs) -> bool:
    return all(name in more and more[name] == value for name, value in some.items())


def why_not(laid: Laid, limit: float | None) -> str:
    """The stage, phase and largest part by which a layout does not fit."""
    worst = laid.worst
    phase = worst.phases[worst.peak_phase]
    part = max(phase.live, key=lambda name: phase.live[name])
    allowed = worst.budget if limit is None else limit
    return (
        f"{worst.stage} needs {size_text(worst.peak)} of {size_text(allowed)} in "
        f"{worst.peak_phase}, most for {part} ({size_text(phase.live[part])})"
    )
