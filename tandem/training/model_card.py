"""The README.md beside every saved model: where it comes from, what it learned, what it is for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.checkpoint.folder import CARD
from tandem.config.load import config_knobs
from tandem.config.schema import RunConfig
from tandem.config.stages import Stage, of_family, stage_of
from tandem.data.ledger import USES
from tandem.metrics.names import metric_or_unknown, title_of
from tandem.metrics.text import with_unit
from tandem.models.save import ADAPTER_FOLDER
from tandem.text import visible

if TYPE_CHECKING:
    from tandem.training.run_folder import Run

_NOT_SHOWN = ("output_dir", "data", "sft_data", "actor_model", "reward_model", "stages")
_USE = {
    "policy": (
        "Research on training language models with feedback, and applications whose answers a "
        "person or a program checks. Its answers have been checked neither for truth nor for harm, "
        "beyond the figures above."
    ),
    "critic": (
        "Continuing its training: it predicts the reward of an unfinished answer, and is no judge "
        "of answers."
    ),
    "reward model": (
        "Comparing answers to one prompt, as the preferences that it learned from would. A score "
        "says nothing by itself, and less about answers unlike those in its data."
    ),
}


def write_cards(run: Run, stage_name: str, folder: Path, facts: Mapping[str, float]) -> None:
    """Write a card into every model's folder of a stage: the stage's own or those inside, and the
    adapter's.

    Args:
        facts: the stage's last figures, by metric.
    """
    stage = stage_of(stage_name)
    for place in (folder, *sorted(path for path in folder.rglob("*") if path.is_dir())):
        if (place / "config.json").is_file() or (place / "adapter_config.json").is_file():
            text = _card(run, stage, place.relative_to(folder).as_posix(), place, facts)
            (place / CARD).write_text(text, encoding="utf-8")


def _card(run: Run, stage: Stage, inside: str, place: Path, facts: Mapping[str, float]) -> str:
    config = run.config
    is_adapter = not (place / "config.json").is_file()
    role = "policy" if stage.policies else "reward model"
    named = {policy.folder or "." for policy in stage.policies}
    if stage.policies and inside.removesuffix(ADAPTER_FOLDER).rstrip("/") not in {*named, ""}:
        role = "critic"
    base = visible(_base(run))
    path = f"{stage.name}/{inside}" if inside != "." else stage.name
    parts = [
        _front_matter(stage, base, role, is_adapter),
        f"# {stage.title}: {path}",
        f"A {role}, trained from `{base}` by [Tandem]: {stage.title.lower()}"
        + (" (a LoRA adapter on that base)." if is_adapter else "."),
        f"## Data\n\n{_data(run)}",
        (
            f"## Training\n\nStages of the run: {', '.join(config.stages)}. Knobs that this stage "
            f"reads and that differ from their defaults:\n\n{_knobs(config, stage)}"
        ),
        f"## Figures\n\n{_figures(facts)}",
        f"## Intended use\n\n{_USE[role]}",
        f"## Made by\n\n```\n{visible(run.command)}\n```",
    ]
    text = "\n\n".join(parts)
    return text.replace("[Tandem]", f"Tandem {_version()}") + "\n"


def _version() -> str:
    from importlib.metadata import version

    return version("tandem-rlhf")


def _base(run: Run) -> str:
    config = run.config
    return config.actor_model or config.reward_model or "a model that a program gave"


def _front_matter(stage: Stage, base: str, role: str, is_adapter: bool) -> str:
    lines = [
        "---",
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        f"pipeline_tag: {'text-generation' if role == 'policy' else 'text-classification'}",
        f"tags: [tandem, {stage.name}]",
    ]
    if base.count("/") <= 1 and not Path(base).exists() and " " not in base:
        lines.append(f"base_model: {json.dumps(base)}")  # the hub refuses what is no name of its
    return "\n".join([*lines, "---"])


def _data(run: Run) -> str:
    rows = []
    for account in run.rows.ledger.datasets.values() if run.rows else ():
        used = ", ".join(f"{use} {account.used[use]:,}" for use in USES if account.used[use])
        left = sum(account.unused.values())
        rows.append(
            f"| {_cell(account.name)} | {account.rows:,} | {used or '-'} | {left:,} "
            f"| {account.num_dropped:,} |"
        )
    if not rows:
        return "Given by the program that trained it."
    head = "| data set | rows | used for | unused | dropped |\n| --- | --- | --- | --- | --- |"
    return "\n".join([head, *rows])


def _knobs(config: RunConfig, stage: Stage) -> str:
    default = RunConfig()
    rows = []
    for name, _ in config_knobs():
        if not stage.reads(name) or name in _NOT_SHOWN or name.startswith(("log.", "parallel.")):
            continue
        now, before = _value(config, name), _value(default, name)
        if now != before:
            rows.append(f"| {name} | {_cell(str(now))} |")
    if of_family([stage.name], "rl"):
        rows += [
            f"| {name} | {_cell(str(value))} |"
            for name in ("seed", f"{stage.section}.steps", f"{stage.section}.kl_coef")
            if f"| {name} |" not in "\n".join(rows) and (value := _value(config, name)) is not None
        ]
    return "\n".join(["| knob | value |\n| --- | --- |", *rows]) if rows else "None."


def _value(config: RunConfig, dotted: str) -> object:
    value: object = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def _figures(facts: Mapping[str, float]) -> str:
    rows = [
        f"| {_cell(title_of(name))} | {with_unit(value, metric_or_unknown(name).unit)} |"
        for name, value in facts.items()
        if isinstance(value, int | float)
    ]
    if not rows:
        return "None was measured."
    return "\n".join(["At the end, on held-out rows where it says so.", "",
                      "| figure | value |\n| --- | --- |", *rows])  # fmt: skip


def _cell(text: str) -> str:
    return visible(text).replace("|", "\\|")
