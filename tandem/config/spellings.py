"""Other names for knobs: our own earlier ones, and those of Hugging Face, TRL and their kin.

A name with the very same meaning is an alias: flags and YAML take it, with a note. A name whose
meaning differs is answered with the right knob and how to convert the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tandem.config.stages import sections as stage_sections

RENAMED = {
    "ppo.kl_target": "ppo.kl_coef_target",
    "ppo.target_kl": "ppo.early_stop_kl",
}
"""Knobs under their earlier names, as runs have saved them."""

_LIMIT = "a longer row follows dataset.on_long_row"
ALIASES: dict[str, tuple[str, str]] = {
    "actor_learning_rate": ("ppo.actor.learning_rate", ""),
    "auto_find_batch_size": ("halve_micro_batches", "the optimizer's batch stays the same"),
    "beta": ("beta", ""),
    "center_rewards_coefficient": ("reward.center_coef", ""),
    "cliprange": ("ppo.clip_ratio", ""),
    "cliprange_value": ("ppo.value_clip", ""),
    "critic_learning_rate": ("ppo.critic.learning_rate", ""),
    "dataset_name": ("data", ""),
    "desirable_loss_weight": ("kto.desirable_weight", ""),
    "desirable_weight": ("kto.desirable_weight", ""),
    "eps_clip": ("ppo.clip_ratio", ""),
    "epsilon": ("ppo.clip_ratio", ""),
    "eval_steps": ("eval_every", ""),
    "gamma": ("ppo.gamma", ""),
    "generate_max_len": ("sampling.max_new_tokens", ""),
    "init_kl_coef": ("ppo.kl_coef", ""),
    "kl_coef": ("ppo.kl_coef", ""),
    "kl_estimator": ("ppo.kl_estimator", ""),
    "kl_target": ("ppo.kl_coef_target", ""),
    "kto_chosen_weight": ("kto.desirable_weight", ""),
    "kto_rejected_weight": ("kto.undesirable_weight", ""),
    "label_smoothing": ("dpo.label_smoothing", ""),
    "lam": ("ppo.lam", ""),
    "learning_rate": ("learning_rate", ""),
    "lora_alpha": ("lora.alpha", ""),
    "lora_dropout": ("lora.dropout", ""),
    "lora_r": ("lora.rank", ""),
    "lora_target_modules": ("lora.targets", ""),
    "loss": ("loss", ""),
    "lr_scheduler_type": ("schedule", "it ends at 10 % of the peak, not at 0"),
    "max_completion_length": ("sampling.max_new_tokens", ""),
    "max_grad_norm": ("max_grad_norm", ""),
    "max_length": ("dataset.max_tokens", _LIMIT),
    "max_new_tokens": ("sampling.max_new_tokens", ""),
    "max_prompt_length": ("dataset.max_prompt_tokens", f"PPO's prompts; {_LIMIT}"),
    "max_seq_length": ("dataset.max_tokens", _LIMIT),
    "max_steps": ("max_steps", ""),
    "min_p": ("sampling.min_p", ""),
    "missing_eos_penalty": ("ppo.missing_eos_penalty", ""),
    "model_name_or_path": ("actor_model", ""),
    "n_samples_per_prompt": ("sampling.samples_per_prompt", ""),
    "num_generations": ("sampling.samples_per_prompt", ""),
    "num_iterations": ("ppo.epochs", ""),
    "num_ppo_epochs": ("ppo.epochs", ""),
    "num_train_epochs": ("epochs", ""),
    "pref_beta": ("dpo.beta", ""),
    "prompt_max_len": ("dataset.max_prompt_tokens", f"PPO's prompts; {_LIMIT}"),
    "repetition_penalty": ("sampling.repetition_penalty", ""),
    "response_length": ("sampling.max_new_tokens", ""),
    "reward_model_path": ("reward_model", ""),
    "save_steps": ("save_every", ""),
    "save_total_limit": ("keep_checkpoints", ""),
    "sft_model_path": ("actor_model", ""),
    "simpo_gamma": ("dpo.simpo_gamma", ""),
    "target_kl": ("ppo.early_stop_kl", ""),
    "temperature": ("sampling.temperature", ""),
    "top_k": ("sampling.top_k", ""),
    "top_p": ("sampling.top_p", ""),
    "undesirable_loss_weight": ("kto.undesirable_weight", ""),
    "undesirable_weight": ("kto.undesirable_weight", ""),
    "warmup_ratio": ("warmup", ""),
    "weight_decay": ("weight_decay", ""),
}
"""Name elsewhere -> (our knob, or the end of several knobs' names; what else to know)."""

CONVERSIONS: dict[str, tuple[str, str]] = {
    "adam_beta1": ("betas", "both betas, as in 0.9,0.95"),
    "adam_beta2": ("betas", "both betas, as in 0.9,0.95"),
    "assistant_only_loss": ("sft.loss_on", "assistant (the default) or all"),
    "bf16": ("dtype", "write bf16"),
    "completion_only_loss": ("sft.loss_on", "assistant (the default) or all"),
    "deepspeed": (
        "parallel.actor_zero_stage parallel.critic_zero_stage",
        "a ZeRO stage, 0 to 3, with parallel.offload for host memory; no JSON file",
    ),
    "epsilon_high": ("ppo.clip_ratio", "one bound for both sides"),
    "eval_strategy": ("eval_every", "a number of steps; 0 evaluates at the end alone"),
    "fp16": ("dtype", "write fp16"),
    "fsdp": ("parallel.actor_zero_stage parallel.critic_zero_stage", "3 is full sharding"),
    "gradient_accumulation_steps": (
        "batch_size minibatch_size",
        "the whole batch; how often it accumulates follows from micro_batch_tokens",
    ),
    "ipo": ("dpo.loss", "write ipo, with dpo.ipo_logprobs sum for OpenRLHF's sums"),
    "load_in_4bit": ("parallel.frozen_weights", "write nf4; it needs lora.rank"),
    "load_in_8bit": ("parallel.frozen_weights", "write int8; it needs lora.rank"),
    "local_rollout_forward_batch_size": ("micro_batch_tokens", "tokens, not sequences"),
    "logging_steps": ("", "Every step is logged; remove it."),
    "loss_type": (
        "dpo.loss",
        "sigmoid, robust, ipo, simpo, orpo, and cdpo with label_smoothing; KTO is the stage kto",
    ),
    "mini_batch_size": (
        "ppo.minibatch_size",
        "answers over all ranks, so the size per process x processes x accumulation steps",
    ),
    "nproc_per_node": ("", "Use --num-gpus on the command line."),
    "num_mini_batches": (
        "ppo.minibatch_size",
        "answers in each, so ppo.prompts_per_step x sampling.samples_per_prompt / num_mini_batches",
    ),
    "num_processes": ("", "Use --num-gpus on the command line."),
    "num_sample_generations": ("ppo.eval_every", "steps between two looks at answers"),
    "optim": ("", "The optimizer is AdamW; remove it."),
    "packing": ("", "Batches are always packed, each row attending to itself alone; remove it."),
    "per_device_eval_batch_size": (
        "micro_batch_tokens",
        "tokens per forward, in training and evaluation; it changes memory, not results",
    ),
    "per_device_train_batch_size": (
        "batch_size minibatch_size",
        "the whole batch, so the size per device x devices x gradient_accumulation_steps",
    ),
    "pref_loss": ("dpo.loss", "the same names; kto_pair is the stage kto"),
    "reference_free": ("dpo.loss", "simpo and orpo need no reference"),
    "report_to": ("log.tensorboard log.wandb", "tensorboard is on or off, wandb a project's name"),
    "resume_from_checkpoint": ("", "The same command continues the run in output_dir; remove it."),
    "reward_funcs": ("ppo.reward_function", "one function, as file.py:name"),
    "rollout_batch_size": (
        "ppo.prompts_per_step",
        "prompts per rollout; each gets sampling.samples_per_prompt answers",
    ),
    "save_strategy": ("save_every", "a number of steps; 0 saves at the end of a stage alone"),
    "steps_per_generation": (
        "ppo.minibatch_size",
        "answers per optimizer step, so those of a rollout / steps_per_generation",
    ),
    "torch_dtype": ("dtype", "write bf16, fp16 or fp32"),
    "total_episodes": (
        "ppo.steps",
        "rollouts, so total_episodes / (ppo.prompts_per_step x sampling.samples_per_prompt)",
    ),
    "use_peft": ("lora.rank", "above 0 trains adapters"),
    "use_vllm": ("", "Tandem generates on the training weights by its own engine; remove it."),
    "vf_coef": ("ppo.critic.learning_rate", "the critic is a model of its own"),
    "warmup_steps": ("warmup", "a share of the steps, so warmup_steps / steps"),
    "whiten_rewards": ("ppo.whiten_advantages", "advantages are whitened, rewards are not"),
    "zero_stage": (
        "parallel.actor_zero_stage parallel.critic_zero_stage",
        "one for each, 0 to 3",
    ),
    "ppo.beta": ("ppo.kl_coef", "together with ppo.kl_in loss it is what GRPO's beta weights"),
    "ppo.max_steps": ("ppo.steps", "rollouts, each with several optimizer steps"),
    "ppo.num_train_epochs": ("ppo.steps", "rollouts; 0 makes one pass over the prompts"),
}
"""Name elsewhere -> (knobs to use, by the ends of their names; how to convert). A dotted name is
that name in one section, whatever it means in others."""


def spelled(name: str) -> str:
    """A flag's or a key's name with underscores."""
    return name.replace("-", "_")


def knob_meant(name: str, known: Iterable[str], section: str = "") -> str:
    """The knob that another name stands for beyond doubt; empty if there is none.

    Args:
        name: what was written; a dotted one must be in its knob's section.
        known: every knob's dotted name.
        section: the command's own, which a name without a dot may leave out; another command's
            section is not read, so its knobs are not meant.
    """
    name = spelled(name)
    if name in RENAMED:
        return RENAMED[name]
    inside, _, last = name.rpartition(".")
    section = inside or section
    if conversion(name, section) or (not section and _differs_somewhere(last)):
        return ""
    knobs = alias_knobs(last, known)
    if section:
        own = within([section], knobs)
        knobs = own if inside or own else [k for k in knobs if _section(k) not in stage_sections()]
    return knobs[0] if len(knobs) == 1 else ""


def alias_knobs(last: str, known: Iterable[str]) -> list[str]:
    """The knobs that a name without a section may stand for with the very same meaning."""
    if last not in ALIASES:
        return []
    knobs = ending(ALIASES[last][0], known)
    return [knob for knob in knobs if f"{_section(knob)}.{last}" not in CONVERSIONS]


def conversion(name: str, section: str = "") -> tuple[str, str] | None:
    """What `CONVERSIONS` has for a name in a section (its own, if it is dotted)."""
    inside, _, last = spelled(name).rpartition(".")
    return CONVERSIONS.get(f"{inside or section}.{last}") or CONVERSIONS.get(last)


def conversion_advice(
    name: str, known: Iterable[str], sections: Sequence[str], spell: Callable[[str], str]
) -> list[str]:
    """Sentences on how our knobs say what a name says elsewhere; one for each section in which
    that differs, none for any other name.

    Args:
        sections: the command's own, whose knobs are named alone; one decides the name's meaning.
        spell: a knob's name as the user writes it, as a key or as a flag.
    """
    inside, _, last = spelled(name).rpartition(".")
    sections = [inside] if inside else sections
    if found := conversion(name, sections[0] if len(sections) == 1 else ""):
        ends, advice = found
        knobs = ending(ends, known)
        names = listed([spell(knob) for knob in within(sections, knobs) or knobs])
        return [f"Use {names}: {advice}." if ends else advice]
    if len(sections) == 1:
        return []
    return [
        f"In {_section(dotted)} use {listed([spell(knob) for knob in ends.split()])}: {advice}."
        for dotted, (ends, advice) in CONVERSIONS.items()
        if dotted.endswith(f".{last}")
    ]


def note_of(name: str, written: str, ours: str) -> str:
    """What to tell of a name that was read as a knob.

    Args:
        written, ours: the name and the knob's, as they look to the user: as keys, or as flags.
    """
    name = spelled(name)
    if name in RENAMED:
        return f"{written} is now {ours}"
    remark = ALIASES[name.rpartition(".")[2]][1]
    return f"{written} is read as {ours}" + (f" ({remark})" if remark else "")


def ending(ends: str, known: Iterable[str]) -> list[str]:
    """The knobs that are one of `ends` (with spaces between them), or end in a dot and it."""
    ways = ends.split()
    return [name for name in known if any(f".{name}".endswith(f".{end}") for end in ways)]


def within(sections: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of the knobs that are in one of the sections."""
    return [name for name in names if any(name.startswith(f"{part}.") for part in sections)]


def listed(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


def _section(knob: str) -> str:
    return knob.partition(".")[0]


def _differs_somewhere(last: str) -> bool:
    return any(dotted.endswith(f".{last}") for dotted in CONVERSIONS)
