"""The rules between knobs: values that exclude each other, and knobs that nothing would read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tandem.config.conversations import conversation_problems
from tandem.config.critic_free_rules import critic_free_problems
from tandem.config.dataset import DataConfig
from tandem.config.lora import adapter_problems, frozen_base_problems
from tandem.config.moving_reference import moving_reference_problems
from tandem.config.optimizer import OptimizerConfig, SupervisedConfig
from tandem.config.parallel import offload_problems
from tandem.config.preferences import preference_problems
from tandem.config.schema import (
    GRPOConfig,
    PPOConfig,
    RLConfig,
    RunConfig,
    rl_section,
)
from tandem.config.scoring import ensemble_problems, weighted_models
from tandem.config.stages import Stage, are_apart, in_order, of_family, rl_stage, stage_names, ways
from tandem.errors import ConfigError


def rule_problems(config: RunConfig) -> Iterator[str]:
    """Rules between knobs. A knob that would be ignored is an error."""
    ppo, stages = config.ppo, config.stages
    if not _is_path(config.output_dir):
        shown = ascii(config.output_dir[:80])
        yield (
            "output_dir must be a printable path with names of at most 200 bytes; got "
            f"{shown}. Choose another"
        )
    elif Path(config.output_dir).parts[:1] and Path(config.output_dir).parts[0].startswith("~"):
        yield (
            "output_dir must begin with an existing home folder if it begins with ~; got "
            f"{config.output_dir[:80]!a}. Write the whole path"
        )
    if not stages:
        yield "stages must name at least one stage; got none. Use e.g. --stages sft reward ppo"
    if len(set(stages)) != len(stages):
        yield f"stages must name each stage once; got {' '.join(stages)}"
    yield from _order_problems(stages)
    rl = of_family(stages, "rl")
    if rl and (config.dropout > 0 or config.lora.dropout > 0):
        yield (
            f"dropout and lora.dropout must be 0 if {rl[0].name} is among the stages (two "
            f"forwards of one policy must agree); got {config.dropout:g} and "
            f"{config.lora.dropout:g}"
        )
    named = in_order(name for name in stages if name in stage_names())
    if config.reference_model and not any(has_reference(config, stage) for stage in named):
        yield (
            "reference_model must be empty where no stage compares the policy with a reference; "
            f"got {config.reference_model}. Remove it"
        )
    if config.critic_model and not any(stage.has_critic for stage in named):
        yield (
            "critic_model must be empty where no stage trains a critic beside the policy; got "
            f"{config.critic_model}. Remove it"
        )
    yield from moving_reference_problems(
        config.reference,
        lora_rank=config.lora.rank,
        reference_model=config.reference_model,
        has_one=any(stage.rewarded and has_reference(config, stage) for stage in named),
    )
    yield from _data_problems(config)
    if not all(0 <= beta < 1 for o in _optimizers(config) for beta in o.betas):
        yield "betas must be within [0, 1)"
    for stage in rl:
        yield from _rollout_problems(config, stage.section)
        yield from conversation_problems(config, stage.section)
        section = getattr(config, stage.section)
        if isinstance(section, GRPOConfig):
            yield from critic_free_problems(config, stage)
        elif stage.reads("ppo.critic_warmup_steps") and section.steps > 0:
            yield from filter(None, [warmup_problem(section, section.steps)])
    if ppo.kl_in == "loss" and ppo.kl_estimator == "k1":
        yield (
            "ppo.kl_estimator must be k2 or k3 when ppo.kl_in is loss; got k1, whose gradient "
            "there is zero on average"
        )
    yield from _parallel_problems(config)
    if config.sampling.min_new_tokens > config.sampling.max_new_tokens:
        yield (
            "sampling.min_new_tokens must be at most sampling.max_new_tokens "
            f"({config.sampling.max_new_tokens}); got {config.sampling.min_new_tokens}"
        )
    if config.sampling.json_schema and config.sampling.regex:
        yield (
            "sampling.regex must be empty where sampling.json_schema says the form of answers; got "
            f"{config.sampling.regex}. Remove one"
        )
    yield from _reward_problems(config)
    yield from preference_problems(config.dpo)
    yield from _selection_problems(config)
    yield from _answers_problems(config)
    yield from _unread_by_stages(config)


def _reward_problems(config: RunConfig) -> Iterator[str]:
    """Rules for what rewards, and for the stage that trains it."""
    if config.scoring.combine == "group" and config.sampling.samples_per_prompt < 2:
        yield (
            "sampling.samples_per_prompt must be above 1 where scoring.combine is group (rewards "
            "are normalized among the answers to one prompt); got 1"
        )
    if config.reward.grade_margin > 0 and config.reward.grades == "regression":
        yield (
            "reward.grade_margin must be 0 with reward.grades regression, which compares no graded "
            f"answers; got {config.reward.grade_margin:g}. Remove it, or set reward.grades pairs"
        )
    try:
        further = weighted_models(config.scoring.reward_models)
    except ConfigError as error:
        yield str(error).rstrip(".")
    else:
        if further and rl_section(config).reward_model_weight == 0:
            yield (
                f"scoring.reward_models must be empty where {rl_stage(config.stages).section}."
                f"reward_model_weight is 0: they count beside a reward model; got "
                f"{further[0].source}"
            )
        yield from ensemble_problems(config.scoring)


def has_reference(config: RunConfig, stage: Stage) -> bool:
    """Whether a stage loads a reference: its record says so, and its algorithm and the preference
    loss that it reads need one."""
    section = getattr(config, stage.section)
    if isinstance(section, RLConfig) and not section.has_reference:
        return False
    goes_without = stage.reads("dpo.loss") and not config.dpo.needs_reference
    return "reference" in stage.freezes and not goes_without


def selecting(section: SupervisedConfig | RLConfig) -> str:
    """The knob by which a stage compares its evaluations; empty: its result does not depend on
    them."""
    return "keep_best" if section.keep_best else "patience" if section.patience else ""


def _selection_problems(config: RunConfig) -> Iterator[str]:
    """What compares evaluations needs some."""
    for stage in in_order(config.stages):
        section = getattr(config, stage.section)
        asked = selecting(section)
        for knob in ("eval_every", "eval_prompts") if asked else ():
            if getattr(section, knob, 1) == 0:
                yield (
                    f"{stage.section}.{knob} must be > 0 where {stage.section}.{asked} compares "
                    f"evaluations; got 0. Give --{stage.section}.{knob.replace('_', '-')} 20, or "
                    f"remove {stage.section}.{asked}"
                )


def _data_problems(config: RunConfig) -> Iterator[str]:
    """Rules of what is read, and of what is trained or evaluated on."""
    split = config.dataset.split
    if split and (len(split) != 3 or any(share < 0 for share in split)):
        yield (
            "dataset.split must be three shares >= 0 (SFT, reward model, PPO); "
            f"got {','.join(f'{share:g}' for share in split)}. Use e.g. 2,4,4"
        )
    elif split and sum(split) <= 0:
        yield "dataset.split must have a share above 0; got 0,0,0. Use e.g. 2,4,4"
    try:
        config.dataset.lowest_imitated(scores=False)
    except ConfigError as error:
        yield str(error).rstrip(".")
    if config.dataset.chat_template == "none" and config.dataset.system_prompt:
        yield (
            "dataset.system_prompt must be empty with dataset.chat_template none, which has no "
            f"place for system turns; got {config.dataset.system_prompt[:40]!r}. Remove one of them"
        )
    share = config.dataset.heldout
    has_texts = bool(rl_section(config).ptx_data)  # of which a share is held out all the same
    if config.eval_data and not has_texts and share not in (0, DataConfig().heldout):
        yield (
            "dataset.heldout must be left alone where eval_data is given, which is evaluated on "
            f"in its place; got {share:g}. Remove one of them"
        )


def _rollout_problems(config: RunConfig, section: str) -> Iterator[str]:
    """Rules of the knobs that RL stages have in common."""
    rl: RLConfig = getattr(config, section)
    if rl.kl_coef_target > 0 and rl.kl_coef == 0:
        yield (
            f"{section}.kl_coef must be > 0 when {section}.kl_coef_target adapts it; got "
            f"{rl.kl_coef:g}"
        )
    size = rl.prompts_per_step * config.sampling.samples_per_prompt
    if rl.minibatch_size > size:
        yield (
            f"{section}.minibatch_size must be at most {section}.prompts_per_step * "
            f"sampling.samples_per_prompt ({size}); got {rl.minibatch_size}. "
            f"Give --{section}.minibatch-size {size} or less"
        )
    yield from _unread(rl, section)
    yield from _replaced(rl, section)
    if rl.reward_model_weight == 0 and not rl.reward_function:
        yield (
            f"{section}.reward_model_weight must be > 0 without a {section}.reward_function; got 0"
        )


def warmup_problem(ppo: PPOConfig, num_steps: int) -> str:
    """What to say where the critic's warm-up leaves the policy no rollout, of `num_steps`; else
    nothing."""
    if ppo.critic_warmup_steps < num_steps:
        return ""
    return (
        f"ppo.critic_warmup_steps must be less than the stage's {num_steps} rollouts, or the "
        f"policy is never trained; got {ppo.critic_warmup_steps}"
    )


def _order_problems(names: Sequence[str]) -> Iterator[str]:
    """Stages in the wrong order, or that cannot be in one run."""
    stages = in_order(names)
    apart = [(a, b) for a in stages for b in stages if a is not b and are_apart(a, b)]
    if not apart and list(dict.fromkeys(names)) == [stage.name for stage in stages]:
        return
    orders = ", or ".join(" ".join(way) for way in sorted(ways(), key=len, reverse=True))
    problem = f"stages must be in the order {orders}; got {' '.join(names)}"
    if apart:
        one, other = apart[0]
        both = " and ".join(name for name in one.after if name in other.after)
        problem += (
            f". {one.name} and {other.name}{f' both start from {both}' if both else ''}: "
            "run them in two folders"
        )
    yield problem


def _parallel_problems(config: RunConfig) -> Iterator[str]:
    yield from offload_problems(config.parallel)
    if config.recompute != "layers" and not config.gradient_checkpointing:
        yield (
            "recompute must be layers without gradient_checkpointing, which it divides; got "
            f"{config.recompute}. Add --gradient-checkpointing"
        )
    if config.recompute_roles != "all" and not config.gradient_checkpointing:
        yield (
            "recompute_roles must be all without gradient_checkpointing, which it limits; got "
            f"{config.recompute_roles}. Add --gradient-checkpointing"
        )
    yield from frozen_base_problems(config.parallel, config.lora)
    yield from adapter_problems(config.lora)
    if config.parallel.inference_tp_size > 1 and not config.hybrid_engine:
        yield (
            "parallel.inference_tp_size must be 1 if hybrid_engine is off (only Tandem's engine "
            f"slices models); got {config.parallel.inference_tp_size}"
        )


def _answers_problems(config: RunConfig) -> Iterator[str]:
    """A stage that compares the policy's own answers needs two or more per prompt."""
    samples = config.sampling.samples_per_prompt
    comparing = [s for s in of_family(config.stages, "rl") if s.compares_answers]
    if comparing and samples < 2:
        yield (
            f"sampling.samples_per_prompt must be at least 2 if {comparing[0].name} is among "
            f"the stages (it compares answers to one prompt); got {samples}. "
            "Give --sampling.samples-per-prompt 2"
        )


_READ_WITH = {
    "ptx_coef": "ptx_data",
    "ptx_batch_size": "ptx_data",
    "ema_decay": "ema",
    "kl_horizon": "kl_coef_target",
    "reward_function_weight": "reward_function",
    "max_turns": "environment tools",
    "max_conversation_tokens": "environment tools",
}
"""Knobs of an RL stage that are read only if another one is set, or one of several."""


def _unread(rl: RLConfig, section: str) -> Iterator[str]:
    """Knobs that are set although nothing reads them."""
    defaults = type(rl)()
    for name, needed in _READ_WITH.items():
        others = needed.split()
        if getattr(rl, name) != getattr(defaults, name) and not any(
            getattr(rl, other) for other in others
        ):
            known = " or ".join(f"{section}.{other}" for other in others)
            yield (
                f"{section}.{name} must go with {known}, without which nothing reads it; got "
                f"{getattr(rl, name):g}. Set {known}, or remove {section}.{name}"
            )


_REPLACED_BY = {
    "loss_function": "clip_ratio loss clip_low clip_high dual_clip cispo_max_ratio".split(),
    "advantage_function": "gamma lam whiten_advantages baseline advantage_scale".split(),
}
"""Knobs of an RL stage that are not read once a function of the user's is in their place."""


def _replaced(rl: RLConfig, section: str) -> Iterator[str]:
    """Knobs that are set although a function does what they describe."""
    defaults = GRPOConfig(algorithm=rl.algorithm) if isinstance(rl, GRPOConfig) else type(rl)()
    for function, names in _REPLACED_BY.items():
        known = [name for name in names if hasattr(rl, name)]
        changed = [name for name in known if getattr(rl, name) != getattr(defaults, name)]
        if getattr(rl, function) and changed:
            yield (
                f"{section}.{changed[0]} must not be set where {section}.{function} is in its "
                f"place; got {getattr(rl, changed[0])}. Remove it, or make it an option of the "
                f"function ({section}.{function} FILE.py:NAME?{changed[0]}=...)"
            )


def _unread_by_stages(config: RunConfig) -> Iterator[str]:
    """Knobs that are set although the run's stages, which share their section, do not read them."""
    stages = in_order(config.stages)
    for stage in stages:
        section = getattr(config, stage.section)
        own = {name.partition(".")[2]: value for name, value in stage.defaults.items()
               if name.startswith(f"{stage.section}.")}  # fmt: skip
        defaults = beside = type(section)(**own)
        if isinstance(section, GRPOConfig):  # an unread algorithm is told of, not what it sets
            beside = GRPOConfig(**own, algorithm=section.algorithm)
        for name in stage.unread:
            read = any(s.reads(f"{stage.section}.{name}") for s in stages)
            if name != "algorithm" and getattr(section, name) == getattr(beside, name):
                continue
            if not read and getattr(section, name) != getattr(defaults, name):
                yield (
                    f"{stage.section}.{name} must keep its default in {stage.name}, which does not "
                    f"read it; got {_changed(getattr(section, name), getattr(defaults, name))}. "
                    f"Remove {stage.section}.{name}"
                )


def _changed(value: Any, default: Any) -> str:
    """A value for a message; of a group of knobs, those that are not the defaults."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    names = [f.name for f in dataclasses.fields(value)]
    changed = [name for name in names if getattr(value, name) != getattr(default, name)]
    return ", ".join(f"{name} {getattr(value, name)!r}" for name in changed)


def _is_path(text: str) -> bool:
    """Whether it can be a folder with a printable name."""
    if not text.strip() or not text.isprintable():
        return False
    encoded = text.encode()
    return len(encoded) < 2000 and max(map(len, encoded.split(b"/"))) <= 200


def _optimizers(section: Any) -> Iterator[OptimizerConfig]:
    """Every optimizer's section, at any depth."""
    if isinstance(section, OptimizerConfig):
        yield section
    elif dataclasses.is_dataclass(section):
        for f in dataclasses.fields(section):
            yield from _optimizers(getattr(section, f.name))
