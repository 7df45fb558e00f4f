"""Which knob a wrong name may mean: another trainer's name, a part of a dotted name, a typo.

Flags and YAML keys both ask here, so they give the same advice.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any, get_args

from tandem.config.spellings import (
    alias_knobs,
    conversion,
    conversion_advice,
    ending,
    exact_knobs,
    listed,
    plain,
    section_meant,
    spelled,
    within,
)
from tandem.config.stages import is_of_critic, stage_of
from tandem.text import class_name

_DATA_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_WITHOUT_SECTION = """
    dataset.columns dataset.on_bad_row dataset.max_tokens dataset.max_prompt_tokens
    dataset.chat_template dataset.heldout
    sampling.max_new_tokens
    ppo.kl_coef ppo.reward_function ppo.ema ppo.ptx_data ppo.ptx_coef
    grpo.algorithm
    parallel.actor_zero_stage parallel.critic_zero_stage parallel.replicas parallel.offload
    parallel.zero_hpz parallel.zero_quantized_weights parallel.zero_quantized_gradients
    parallel.zero_gradient_bits parallel.zero_forced parallel.inference_tp_size
    parallel.frozen_weights parallel.shared_base
    log.tensorboard
"""
SHORT_NAMES = {name: name.partition(".")[2].replace("_", "-") for name in _WITHOUT_SECTION.split()}
SHORT_NAMES |= {"dataset.split": "data-split", "lora.rank": "lora-rank", "ppo.steps": "ppo-steps"}
"""Dotted knob -> short flag; the dotted flag works too."""

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
"""Common guesses -> a knob, or the end of several knobs' names."""


def advice(
    wanted: str, known: Iterable[str], stages: Sequence[str], spell: Callable[[str], str]
) -> str:
    """What to write instead of an unknown name; empty if nothing is close.

    Args:
        wanted, known: as for `nearest_knobs`.
        stages: the command's; knobs in their sections are preferred.
        spell: a knob's name as the user writes it, as a key or as a flag.
    """
    names, sections = list(known), [section_meant(wanted, stage) for stage in stages]
    sentences = conversion_advice(wanted, names, sections, spell)
    if told := _of_no_critic(wanted, names, sections, stages, spell):
        return told
    if len(stages) == 1:  # its section may hold knobs of another stage alone
        own = stage_of(stages[0])
        names = [name for name in names if not within([own.section], [name]) or own.reads(name)]
    if not conversion(wanted, sections[0] if len(sections) == 1 else "") and (
        near := nearest_knobs(wanted, names, sections)
    ):
        sentences.insert(0, f"Did you mean {listed([spell(name) for name in near])}?")
    return " ".join(sentences)


def _of_no_critic(
    wanted: str,
    names: Sequence[str],
    sections: Sequence[str],
    stages: Sequence[str],
    spell: Callable[[str], str],
) -> str:
    """What to say of a name that means knobs of a critic where the RL stage has none; else ""."""
    running = [stage for name in stages if (stage := stage_of(name)).family == "rl"]
    if not running or any(stage.has_critic for stage in running):
        return ""
    found = conversion(wanted, sections[0] if len(sections) == 1 else "")
    meant = ending(found[0], names) if found else nearest_knobs(wanted, names, sections)
    if not meant or not all(is_of_critic(knob) for knob in meant):
        return ""
    knobs = listed([spell(name) for name in meant])
    return f"It means {knobs}, and {running[0].name} has no critic; remove it."


def empty_list(flag: str, hint: Any) -> str:
    """What is wrong with a flag that takes a list, of type `hint`, and got no value."""
    options = get_args(get_args(hint)[0])
    values = f"some of {listed(options, 'and')}" if options else "its values"
    return f"{flag} must have values; got none. Write {values} behind it, or {flag} '' for none"


def got(name: str, value: Any) -> str:
    """A knob's wrong value in a message; of an object in memory its class, and where it goes."""
    objects = value if isinstance(value, list | tuple) else [value]
    objects = [each for each in objects if callable(each)]
    if not objects:
        return repr(value)
    if name in ("actor_model", "reward_model"):
        return f"{class_name(objects[0])}. Pass a model in memory as train(config, {name}=...)"
    return f"{class_name(objects[0])}. Name a function as file.py:name"


def nearest_knobs(wanted: str, known: Iterable[str], sections: Sequence[str] = ()) -> list[str]:
    """The knobs that `wanted` may stand for, best first; empty if none is close.

    Args:
        wanted: what was written: dotted or not, with dashes or underscores.
        known: every knob's dotted name.
        sections: knobs in these are preferred.
    """
    names = list(known)
    if exact := exact_knobs(wanted.lower(), names):
        return within(sections, exact) or exact
    wanted = plain(spelled(wanted).lower())
    section, _, last = wanted.rpartition(".")
    sections = [section] if section else sections
    short = {spelled(text): name for name, text in SHORT_NAMES.items()}
    if wanted in short:
        return [short[wanted]]
    if ends := alias_knobs(last, names) or ending(_LOOSELY.get(last, last), names):
        return within(sections, ends) or ends
    if near := difflib.get_close_matches(wanted, [*names, *short], n=1, cutoff=0.7):
        return [short.get(near[0], near[0])]
    parts = dict.fromkeys(name.rpartition(".")[2] for name in names)
    for end in difflib.get_close_matches(last, parts, n=1, cutoff=0.75):
        ends = ending(end, names)
        return within(sections, ends) or ends
    return []


def file_hint(word: str) -> str:
    """What to write for a file's name that stands without a flag; "" for another word."""
    ending = PurePath(word.lower().removesuffix(".gz")).suffix
    if ending in (".yaml", ".yml"):
        return f"Write --config {shlex.quote(word)}"
    return f"Write --data {shlex.quote(word)}" if ending in _DATA_FILES else ""
