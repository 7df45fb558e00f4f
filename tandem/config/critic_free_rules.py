"""The rules between the knobs of stages without a critic."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.schema import GRPOConfig, RunConfig
from tandem.config.spellings import listed
from tandem.config.stages import Stage

EXACT_KL = ("exact-in-loss", "forward-exact-in-loss", "jsd-in-loss")
"""Placements of the KL that are summed over the vocabulary."""

_GSPO_CLIP = 0.05
"""A whole answer's ratio never gets further from 1 than this in practice."""


def critic_free_problems(config: RunConfig, stage: Stage) -> Iterator[str]:
    """Rules of the section of a stage without a critic."""
    grpo, samples = getattr(config, stage.section), config.sampling.samples_per_prompt
    yield from _exact_kl_problems(config, stage, grpo)
    by_knobs = not grpo.advantage_function
    needs = {
        f"grpo.baseline is {grpo.baseline}": by_knobs and grpo.baseline != "none",
        "grpo.advantage_scale is group-std": by_knobs and grpo.advantage_scale == "group-std",
        f"grpo.sampling_rounds is {grpo.sampling_rounds}": grpo.sampling_rounds > 1,
    }
    if stage.rewarded and samples < 2 and any(needs.values()):
        why = next(reason for reason, holds in needs.items() if holds)
        yield (
            f"sampling.samples_per_prompt must be >= 2 where {why}: answers to one prompt are "
            f"compared with each other; got {samples}. Give --sampling.samples-per-prompt 8"
        )
    if grpo.kl == "none" and grpo.kl_coef > 0:
        yield (
            "grpo.kl must name where the penalty goes where grpo.kl_coef is above 0; got none. "
            "Give --grpo.kl k1-in-reward, or --grpo.kl-coef 0"
        )
    if grpo.kl != "none" and grpo.kl_coef == 0:
        yield (
            f"grpo.kl_coef must be > 0 where grpo.kl is {grpo.kl}; got 0. Give --grpo.kl none, "
            "which needs no reference"
        )
    if grpo.loss == "gspo" and max(grpo.clip_low, grpo.clip_high) > _GSPO_CLIP:
        yield (
            f"grpo.clip_low and grpo.clip_high must be at most {_GSPO_CLIP:g} where grpo.loss is "
            f"gspo, whose ratio is a whole answer's; got {grpo.clip_low:g} and "
            f"{grpo.clip_high:g}. Give --algorithm gspo, or e.g. 3e-4 and 4e-4"
        )
    if 0 < grpo.dual_clip <= 1:
        yield f"grpo.dual_clip must be 0 or above 1; got {grpo.dual_clip:g}. Use e.g. 3"
    read_with = {
        "clip_low": ("loss", grpo.loss != "cispo"),
        "clip_high": ("loss", grpo.loss != "cispo"),
        "dual_clip": ("loss", grpo.loss == "clip"),
        "cispo_max_ratio": ("loss", grpo.loss == "cispo"),
        "jsd_beta": ("kl", grpo.kl == "jsd-in-loss"),
        "overlong_buffer": ("overlong_penalty", grpo.overlong_penalty > 0),
    }
    defaults = GRPOConfig(algorithm=grpo.algorithm)
    for name, (other, is_read) in read_with.items():
        if not is_read and getattr(grpo, name) != getattr(defaults, name):
            yield (
                f"grpo.{name} must not be set where grpo.{other} is {getattr(grpo, other)}, which "
                f"does not read it; got {getattr(grpo, name):g}. Remove it, or change grpo.{other}"
            )


def _exact_kl_problems(config: RunConfig, stage: Stage, grpo: GRPOConfig) -> Iterator[str]:
    """Rules of a KL over the vocabulary, and of a stage that learns from it alone."""
    one_of = listed(EXACT_KL)
    if not stage.rewarded and grpo.kl not in EXACT_KL:
        yield (
            f"{stage.section}.kl must be {one_of} in stage {stage.name}, which "
            f"learns from it alone; got {grpo.kl}. Remove it"
        )
    if not stage.rewarded and not config.reference_model:
        yield (
            f"reference_model must name the teacher of stage {stage.name}, a model of the same "
            "tokenizer; got nothing. Give --reference-model"
        )
    if grpo.ptx_target == "reference" and not (grpo.kl in EXACT_KL and grpo.ptx_data):
        yield (
            f"{stage.section}.ptx_target must be tokens unless {stage.section}.kl is {one_of} and "
            f"{stage.section}.ptx_data has texts; got reference, with kl {grpo.kl}. Set both, or "
            "remove it"
        )
    if grpo.kl in EXACT_KL and config.dtype == "fp16":
        yield (
            f"dtype must be bf16 or fp32 where {stage.section}.kl is {grpo.kl}, whose gradient is "
            "made before the loss is scaled; got fp16. Give --dtype bf16"
        )
