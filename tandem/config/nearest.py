"""Which knob somebody meant: names from other trainers, last parts of dotted names, near spellings.

Flags and YAML keys ask here, so that both give the same advice.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence

from tandem.config.spellings import (
    alias_knobs,
    conversion,
    conversion_advice,
    ending,
    listed,
    spelled,
    within,
)

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
    "grpo.algorithm": "algorithm",
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

_LOOSELY = {
    "base_model": "actor_model",
    "checkpoint_every": "save_every",
    "dataset_path": "data",
    "lr": "learning_rate",
    "model": "actor_model",
    "model_name": "actor_model",
    "model_path": "actor_model",
    "num_epochs": "epochs",
    "out": "output_dir",
    "output": "output_dir",
    "train_file": "data",
}
"""What people write for a knob, beside the names of other trainers: its name, or the name's end."""


def advice(
    wanted: str, known: Iterable[str], sections: Sequence[str], spell: Callable[[str], str]
) -> str:
    """What to write in place of a name that is no knob's; empty if nobody can tell.

    Args:
        wanted, known, sections: as for `nearest_knobs`.
        spell: a knob's name as the user writes it, as a key or as a flag.
    """
    names = list(known)
    sentences = conversion_advice(wanted, names, sections, spell)
    if not conversion(wanted, sections[0] if len(sections) == 1 else "") and (
        near := nearest_knobs(wanted, names, sections)
    ):
        sentences.insert(0, f"Did you mean {listed([spell(name) for name in near])}?")
    return " ".join(sentences)


def nearest_knobs(wanted: str, known: Iterable[str], sections: Sequence[str] = ()) -> list[str]:
    """The knobs that `wanted` may stand for, best first; empty if none is near.

    Args:
        wanted: what was written: dotted or not, with dashes or underscores.
        known: every knob's dotted name.
        sections: those that come first (and alone, where they have it).
    """
    names = list(known)
    wanted = spelled(wanted).lower()
    section, _, last = wanted.rpartition(".")
    short = {spelled(text): name for name, text in SHORT_NAMES.items()}
    if wanted in short:
        return [short[wanted]]
    if ends := alias_knobs(last, names) or ending(_LOOSELY.get(last, last), names):
        return within([section] if section else sections, ends) or ends
    if near := difflib.get_close_matches(wanted, [*names, *short], n=1, cutoff=0.7):
        return [short.get(near[0], near[0])]
    parts = dict.fromkeys(name.rpartition(".")[2] for name in names)
    for end in difflib.get_close_matches(last, parts, n=1, cutoff=0.75):
        ends = ending(end, names)
        return within([section] if section else sections, ends) or ends
    return []
