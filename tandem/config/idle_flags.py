"""Flags that change nothing in a run. They are noted and not refused: commands may share flags."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.config.nearest import SHORT_NAMES
from tandem.config.rules import has_reference
from tandem.config.schema import RunConfig, rl_section
from tandem.config.spellings import listed
from tandem.config.stages import Stage, in_order, sections, sources, stage_names

_READ_BY_ALL = ("sft.loss_on",)
"""A knob of a stage's section by which every stage's held-out texts are marked."""
_READ_WITHOUT_RL = ("eval_prompts", "tools", "reward_model_weight")
"""What the comparison of models reads of the default RL stage's section if no such stage runs."""
_TRAINED = {"actor": "a policy", "critic": "a critic or a reward model"}
_OF_FUNCTIONS = tuple(
    f"scoring.{name}"
    for name in ("deadline_seconds", "workers", "memory_gb", "on_failure", "self_test")
)
"""What is read where a reward function, an environment or a tool runs."""
_OF_ADAPTERS = ("lora.alpha", "lora.dropout", "lora.targets")
_OF_ROLLOUTS = ("log.print_samples_every", "log.record_answers", "kept_states")
_SAMPLE = ("sampling.", "hybrid_engine", "generation_")
"""What is read where answers are sampled: in RL stages, for a reward model's scale, and in the
comparison of models."""


def idle_lines(given: Mapping[str, Any], stages: Sequence[str], config: RunConfig) -> list[str]:
    """Lines on flags that have no effect, one for each reason.

    Args:
        given: the knobs that the user gave as flags, with their words.
        stages: those that run. config: what the flags made.
    """
    running = in_order(name for name in stages if name in stage_names())
    found: dict[str, list[str]] = {}
    for flag, reason in _idle(given, running, config) if running else ():
        found.setdefault(reason, []).append(flag)
    return [
        f"{listed(flags, 'and')} ha{'ve' if flags[1:] else 's'} no effect, as "
        f"{reason.format(it='them' if flags[1:] else 'it')}"
        for reason, flags in found.items()
    ]


def _idle(
    given: Mapping[str, Any], running: Sequence[Stage], config: RunConfig
) -> Iterator[tuple[str, str]]:
    """(flag, reason) of each that nothing reads."""
    named = listed([stage.name for stage in running], "and")
    do, have = ("do", "have") if running[1:] else ("does", "has")
    unread = f"{named} {do} not read {{it}}"
    has_scores = _has_reward_model(running, config)
    trained = {role for stage in running for role in stage.trains}
    for knob, words in given.items():
        if not _is_read(knob, running, config, has_scores):
            yield _flag(knob, words), unread
        elif reason := _without_its_feature(knob, config):
            yield _flag(knob, words), reason
        elif knob == "parallel.critic_zero_stage":
            if not has_scores and "critic" not in trained:
                yield _flag(knob), f"{named} {have} no critic and no reward model"
        elif knob == "lora.critic_rank":
            if "critic" not in trained:
                yield _flag(knob), f"{named} {do} not train {_TRAINED['critic']}"
        elif knob == "recompute_roles":
            untrained = next((role for role in _TRAINED if role not in trained), None)
            if untrained:  # the knob changes nothing, or takes the other from what is trained
                idle = "gradient_checkpointing" if config.recompute_roles == untrained else knob
                yield _flag(idle), f"{named} {do} not train {_TRAINED[untrained]}"
        elif knob == "parallel.offload":
            if "reward" in config.parallel.offload and not has_scores:
                yield f"{_flag(knob)} reward", f"{named} {have} no reward model"
            if "reference" not in config.parallel.offload:
                continue
            if not any(has_reference(config, stage) for stage in running):
                yield f"{_flag(knob)} reference", f"{named} {have} no reference"
            elif config.lora.rank and not config.reference_model:
                yield f"{_flag(knob)} reference", "the reference is the actor without its adapters"


def _without_its_feature(knob: str, config: RunConfig) -> str:
    """Why nothing reads a knob whose feature the run does not use; empty if it does."""
    rl, lora = rl_section(config), config.lora
    if knob in _OF_FUNCTIONS and not (rl.reward_function or rl.environment or rl.tools):
        return "the run has no reward function, environment or tool"
    if knob in _OF_ADAPTERS and lora.rank == 0 and lora.critic_rank < 1:
        return "lora.rank is 0"
    if knob == "generation_prefill_tokens" and not config.hybrid_engine:
        return "Hugging Face's generate does not read {it}"
    moved = {"optimizer", "params"} & set(config.parallel.offload)
    if knob == "parallel.offload_gradients" and not moved:
        return "parallel.offload has no optimizer"
    return ""


def _is_read(knob: str, running: Sequence[Stage], config: RunConfig, has_scores: bool) -> bool:
    section, _, name = knob.partition(".")
    has_rl = any(stage.family == "rl" for stage in running)
    if section in sections():
        if knob in _READ_BY_ALL or any(stage.reads(knob) for stage in running):
            return True
        return (
            not has_rl
            and getattr(config, section) is rl_section(config)
            and (name in _READ_WITHOUT_RL)
        )
    if has_rl and not (section == "scoring" and not any(stage.rewarded for stage in running)):
        return True
    if section == "scoring":
        return knob == "scoring.reward_models" and has_scores
    if knob in _OF_ROLLOUTS:
        return has_rl
    samples = any(stage.leaves == "reward model" for stage in running)
    if knob == "sampling.samples_per_prompt":
        return samples
    return samples or rl_section(config).eval_prompts > 0 or not knob.startswith(_SAMPLE)


def _has_reward_model(running: Sequence[Stage], config: RunConfig) -> bool:
    """Whether a reward model may score answers: a stage's, a given one, or one that is in the run's
    folder."""
    stages = sources("reward model")
    found = any(stage in running for stage in stages) or any(
        os.path.exists(os.path.join(config.output_dir, stage.model_folder)) for stage in stages
    )
    if not any(stage.family == "rl" and stage.rewarded for stage in running):
        return found
    rl = rl_section(config)
    return rl.reward_model_weight > 0 and bool(
        found or config.reward_model or not rl.reward_function
    )


def _flag(knob: str, words: Any = ()) -> str:
    """A knob as a flag; the short one, if it has one in every command."""
    negated = "no-" if words == "off" else ""
    short = "" if knob.partition(".")[0] in sections() else SHORT_NAMES.get(knob, "")
    return f"--{negated}{short or knob.replace('_', '-')}"
