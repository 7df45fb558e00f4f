"""Which knob somebody meant: names from other trainers, last parts of dotted names, near spellings.

Flags and YAML keys ask here, so that both give the same advice.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

SHORT_NAMES = {
    "dataset.split": "data-split",
    "dataset.columns": "columns",
    "dataset.on_bad_row": "on-bad-row",
    "dataset.max_tokens": "max-tokens",
    "dataset.max_prompt_tokens": "max-prompt-tokens",
    "lora.rank": "lora-rank",
    "sampling.max_new_tokens": "max-new-tokens",
    "ppo.steps": "ppo-steps",
    "ppo.kl_coef": "kl-coef",
    "ppo.reward_function": "reward-function",
    "ppo.ema": "ema",
    "ppo.ptx_data": "ptx-data",
    "ppo.ptx_coef": "ptx-coef",
    "parallel.actor_zero_stage": "actor-zero-stage",
    "parallel.critic_zero_stage": "critic-zero-stage",
    "parallel.replicas": "replicas",
    "parallel.offload": "offload",
    "parallel.zero_hpz": "zero-hpz",
    "parallel.zero_quantized_weights": "zero-quantized-weights",
    "parallel.zero_quantized_gradients": "zero-quantized-gradients",
    "parallel.zero_gradient_bits": "zero-gradient-bits",
    "parallel.zero_forced": "zero-forced",
    "parallel.inference_tp_size": "inference-tp-size",
    "parallel.frozen_weights": "frozen-weights",
    "parallel.shared_base": "shared-base",
    "log.tensorboard": "tensorboard",
}
"""Dotted knob to the flag that people reach for; the dotted flag works too."""

_ELSEWHERE = {
    "auto_find_batch_size": "halve_micro_batches",
    "base_model": "actor_model",
    "bf16": "dtype",
    "checkpoint_every": "save_every",
    "cliprange": "ppo.clip_ratio",
    "cliprange_value": "ppo.value_clip",
    "dataset_name": "data",
    "dataset_path": "data",
    "epsilon": "ppo.clip_ratio",
    "eval_steps": "eval_every",
    "fp16": "dtype",
    "init_kl_coef": "ppo.kl_coef",
    "learning_rate": "learning_rate",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_r": "lora.rank",
    "lora_target_modules": "lora.targets",
    "lr": "learning_rate",
    "lr_scheduler_type": "schedule",
    "max_completion_length": "sampling.max_new_tokens",
    "max_length": "dataset.max_tokens",
    "max_prompt_length": "dataset.max_prompt_tokens",
    "max_seq_length": "dataset.max_tokens",
    "mini_batch_size": "ppo.minibatch_size",
    "model": "actor_model",
    "model_name_or_path": "actor_model",
    "model_path": "actor_model",
    "num_epochs": "epochs",
    "num_generations": "sampling.samples_per_prompt",
    "num_ppo_epochs": "ppo.epochs",
    "num_train_epochs": "epochs",
    "out": "output_dir",
    "output": "output_dir",
    "per_device_train_batch_size": "batch_size",
    "response_length": "sampling.max_new_tokens",
    "reward_model_path": "reward_model",
    "save_steps": "save_every",
    "train_file": "data",
    "warmup_ratio": "warmup",
    "zero_stage": "parallel.actor_zero_stage",
}
"""What Hugging Face, TRL, axolotl and OpenRLHF call a knob: its name here, or the name's end."""


def nearest_knobs(wanted: str, known: Iterable[str], sections: Sequence[str] = ()) -> list[str]:
    """The knobs that `wanted` may stand for, best first; empty if none is near.

    Args:
        wanted: what was written: dotted or not, with dashes or underscores.
        known: every knob's dotted name.
        sections: those that come first (and alone, where they have it).
    """
    names = list(known)
    wanted = wanted.replace("-", "_").lower()
    section, _, last = wanted.rpartition(".")
    short = {text.replace("-", "_"): name for name, text in SHORT_NAMES.items()}
    if wanted in short:
        return [short[wanted]]
    last = _ELSEWHERE.get(last, last)
    if ending := _ending(last, names):
        inside = _within([section] if section else sections, ending)
        return inside or ending
    if near := difflib.get_close_matches(wanted, [*names, *short], n=1, cutoff=0.7):
        return [short.get(near[0], near[0])]
    ends = dict.fromkeys(name.rpartition(".")[2] for name in names)
    for end in difflib.get_close_matches(last, ends, n=1, cutoff=0.75):
        ending = _ending(end, names)
        return _within([section] if section else sections, ending) or ending
    return []


def _ending(end: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if name == end or name.endswith(f".{end}")]


def _within(sections: Sequence[str], names: Sequence[str]) -> list[str]:
    return [name for name in names if any(name.startswith(f"{part}.") for part in sections)]


def listed(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
