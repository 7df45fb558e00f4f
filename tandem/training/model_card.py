"""The README.md beside every saved model: where it comes from, what it learned, what it is for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.checkpoint.folder import CARD, write_folder
from tandem.config.load import config_knobs, knob_value
from tandem.config.lora import TrainedRole
from tandem.config.schema import RunConfig
from tandem.config.stages import Stage, stage_of
from tandem.config.updates import minibatch_size
from tandem.data.ledger import USES
from tandem.metrics.names import metric_or_unknown, title_of
from tandem.metrics.text import with_unit
from tandem.models.hub_name import base_of, with_revision
from tandem.models.save import ADAPTER_FOLDER
from tandem.models.source import ADAPTER_CONFIG
from tandem.text import visible
from tandem.training.lineage import FACT, Step
from tandem.training.provenance import origin
from tandem.training.selection import FACTS, described
from tandem.training.step_metrics import finite
from tandem.version import own_version

if TYPE_CHECKING:
    from tandem.training.run_folder import Run

_NOT_SHOWN = (
    "output_dir",
    "data",
    "sft_data",
    "eval_data",
    "actor_model",
    "reward_model",
    "stages",
)
_ALWAYS = (
    *("batch_size", "epochs", "steps", "prompts_per_step", "minibatch_size"),
    *("kl_coef", "beta", "loss", "algorithm"),
)
"""Knobs of a stage that its card shows even where they have their defaults."""
_TITLES = {
    "steps": "Steps",
    "normalize_mean": "Mean of the raw scores of a policy's answers (`score_mean`)",
    "normalize_std": "Their standard deviation (`score_std`)",
}
AVERAGE = "average"
_ROLE = {
    "policy": "A policy",
    AVERAGE: "The moving average (EMA) of a policy",
    "critic": "A critic",
    "reward model": "A reward model",
}
_ANSWERS = (
    "Research on training language models with feedback, and applications whose answers a "
    "person or a program checks. Its answers have been checked neither for truth nor for harm, "
    "beyond the figures above."
)
_USE = {
    "policy": _ANSWERS,
    AVERAGE: _ANSWERS,
    "critic": (
        "Continuing its training: it predicts the reward of an unfinished answer, and is no judge "
        "of answers."
    ),
    "reward model": (
        "Comparing answers to one prompt, as the preferences that it learned from would. A score "
        "says nothing by itself, and less about answers unlike those in its data."
    ),
}


def write_models(
    run: Run,
    stage: str,
    folder: Path,
    fill: Callable[[Path], None],
    facts: Mapping[str, float],
    lineage: Sequence[Step],
    further: Mapping[str, Any] | None = None,
) -> None:
    """Write a stage's models into a folder, all or nothing, with their cards and a manifest.

    Args:
        fill: writes models into the folder that it is given; every rank calls it.
        facts: the stage's last figures, by metric.
        lineage: the stages that led to its model; it is the last.
        further: what else the manifest says.
    Raises:
        CheckpointError: as `checkpoint.folder.write_folder`.
    """
    figures = finite(facts)

    def fill_with_cards(target: Path) -> None:
        fill(target)
        if run.world.is_first:
            _write_cards(run, stage, target, figures, lineage)

    said = {**figures, **origin(run.config, run.world), **(further or {}), FACT: lineage}
    write_folder(folder, fill_with_cards, said, world=run.world)


def _write_cards(
    run: Run, stage_name: str, folder: Path, facts: Mapping[str, float], lineage: Sequence[Step]
) -> None:
    """Write a card into every model's folder of a stage: the stage's own or those inside, and the
    adapter's."""
    stage = stage_of(stage_name)
    for place in (folder, *sorted(path for path in folder.rglob("*") if path.is_dir())):
        if (place / "config.json").is_file() or (place / ADAPTER_CONFIG).is_file():
            inside = place.relative_to(folder).as_posix().removeprefix(".")
            (place / CARD).write_text(_card(run, stage, inside, place, facts, lineage), "utf-8")


def _card(
    run: Run,
    stage: Stage,
    inside: str,
    place: Path,
    facts: Mapping[str, float],
    lineage: Sequence[Step],
) -> str:
    """The card of the model in `inside` (empty: the stage's folder itself)."""
    adapter_of = _base_of_adapter(place)
    within = inside.removesuffix(ADAPTER_FOLDER).rstrip("/") if adapter_of else inside
    role = _role(stage, within)
    last = lineage[-1]
    root, path = visible(last["root"]), f"{stage.name}/{inside}" if inside else stage.name
    made = f"trained from `{root}` by Tandem {own_version()}: {_in_words(last['titles'])}."
    if role == "critic":
        made = f"trained by Tandem {own_version()} beside the policy `{stage.model_folder}`."
    if adapter_of:
        made += f" This folder holds the LoRA adapter alone; its base is `{visible(adapter_of)}`."
        if frozen := run.config.parallel.frozen_weights:
            made += (
                f" It was trained on the base in {frozen} and is another model on full weights: "
                "load the folder above, which has the two merged, or quantize the base alike."
            )
    other = role not in ("policy", "reward model")
    whose = f" They are those of the policy, `{stage.model_folder}`" if other else ""
    whose += ", except where they say EMA." if role == AVERAGE else "." if whose else ""
    parts = [
        _front_matter(stage, adapter_of or last["root"], role, is_adapter=bool(adapter_of)),
        f"# {stage.title}: {path}",
        f"{_ROLE[role]}, {made}",
        f"## Stages\n\n{_stages(lineage)}",
        f"## Data\n\n{_data(run)}",
        (
            f"## Training\n\nKnobs of this stage that differ from their defaults, and those that "
            f"matter most:\n\n{_knobs(run.config, stage, facts)}"
        ),
        f"## Figures\n\n{_figures(facts, whose, stage)}",
        f"## Loading\n\n{_loading(role, place, is_adapter=bool(adapter_of))}",
        f"## Intended use\n\n{_USE[role]}",
        f"## Made by\n\n```\n{visible(run.command)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _role(stage: Stage, inside: str) -> str:
    if not stage.policies:
        return "reward model"
    folders = [policy.folder for policy in stage.policies]
    if inside not in folders:
        return "critic"
    return "policy" if inside == folders[0] else AVERAGE


def _base_of_adapter(place: Path) -> str:
    """The base that an adapter's folder names; empty for a whole model."""
    if (place / "config.json").is_file():
        return ""
    config = json.loads((place / ADAPTER_CONFIG).read_text("utf-8"))
    return base_of(config, place)


def _in_words(titles: Sequence[str]) -> str:
    """Stages' titles as they stand in a sentence."""
    return ", then ".join(
        " ".join(word.lower() if word[1:].islower() else word for word in title.split())
        for title in titles
    )


def _stages(lineage: Sequence[Step]) -> str:
    lines = ["| model | made by | from | its share of the data |", "| --- | --- | --- | --- |"]
    for step in lineage:
        rows = "; ".join(
            f"{data['name']}: {data['used']:,} of {data['rows']:,} rows" for data in step["data"]
        )
        rows = rows or "what its program gave"
        if step["rewards"]:
            rows += f"; rewarded by {', '.join(step['rewards'])}"
        if teacher := step.get("teacher"):
            rows += f"; taught by {teacher}"
        cells = (f"`{step['model']}`", step["title"], f"`{step['base']}`", rows)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def _front_matter(stage: Stage, base: str, role: str, *, is_adapter: bool) -> str:
    writes = role in ("policy", AVERAGE)
    lines = [
        "---",
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        f"pipeline_tag: {'text-generation' if writes else 'text-classification'}",
        f"tags: [tandem, {stage.name}]",
    ]
    name, _ = with_revision(base)
    if name.count("/") <= 1 and not Path(base).exists() and " " not in name:
        lines.append(f"base_model: {json.dumps(name)}")  # the hub refuses what is no name of its
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


def _rate(config: RunConfig, role: TrainedRole) -> str:
    """Which of its learning rates a role trains at."""
    return "lora_learning_rate" if config.lora.of(role).rank else "learning_rate"


def _knobs(config: RunConfig, stage: Stage, facts: Mapping[str, float]) -> str:
    default, used = RunConfig(), _used(config, stage, facts)
    rates = {role: _rate(config, role) for role in stage.trains}
    knobs = (*_ALWAYS, rates[stage.trains[0]], *(f"{role}.{rates[role]}" for role in rates))
    always = {"seed", *(f"{stage.section}.{knob}" for knob in knobs)}
    rows = []
    for name, _ in config_knobs():
        if not stage.reads(name) or name in _NOT_SHOWN or name.startswith(("log.", "parallel.")):
            continue
        now, before = knob_value(config, name), knob_value(default, name)
        if now != before or name in always or used.get(name, now) != now:
            rows.append(f"| {name} | {_cell(_knob_text(used.get(name, now)))} |")
    return "\n".join(["| knob | value |\n| --- | --- |", *rows])


def _used(config: RunConfig, stage: Stage, facts: Mapping[str, float]) -> dict[str, float]:
    """What a stage used for knobs whose 0 leaves the choice to it, by knob."""
    used = {
        "dpo.beta": config.dpo.effective_beta,
        "dpo.label_smoothing": config.dpo.effective_smoothing,
    }
    if stage.family == "rl":
        used[f"{stage.section}.minibatch_size"] = minibatch_size(config)
        if "steps" in facts:  # a loop of one's own may not say them
            used[f"{stage.section}.steps"] = facts["steps"]
    return used


def _knob_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_knob_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _figures(facts: Mapping[str, float], whose: str, stage: Stage) -> str:
    rows = [
        f"| {_cell(_TITLES.get(name) or title_of(name, stage.family))} "
        f"| {with_unit(value, metric_or_unknown(name).unit)} |"
        for name, value in facts.items()
        if isinstance(value, int | float) and name not in FACTS
    ]
    if not rows:
        return "None was measured."
    best = described(stage, facts)
    when = f"This model is the {best}. Its figures" if best else "At the end"
    return "\n".join([f"{when}, on held-out rows where it says so.{whose}", "",
                      "| figure | value |\n| --- | --- |", *rows])  # fmt: skip


_WITHOUT_PAD = """

There is no pad token but the end token, which is scored, so transformers takes one row at a time.
For batches add a pad token:

```
tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
model.resize_token_embeddings(len(tokenizer))
model.config.pad_token_id = tokenizer.pad_token_id
```"""


def _loading(role: str, place: Path, *, is_adapter: bool) -> str:
    scores = role in ("critic", "reward model")
    kind = "SequenceClassification" if scores else "CausalLM"
    how = f"`{'AutoPeftModel' if is_adapter else 'AutoModel'}For{kind}.from_pretrained(FOLDER"
    how += f"{', num_labels=1' if scores and is_adapter else ''})`"
    how += f" of {'PEFT' if is_adapter else 'transformers'}. Conversations become text by the "
    how += "tokenizer's `apply_chat_template`, as in training."
    if not scores or is_adapter:
        return how
    how += (
        " Where `config.json` has `score_mean` and `score_std`, Tandem takes "
        f"(logit - score_mean) / score_std as the {'score' if role == 'reward model' else 'value'}."
    )
    if role == "reward model":
        how += " Where it has `grade_scales`, mean + sd * logit is a grade of that data set."
    if json.loads((place / "config.json").read_text("utf-8")).get("pad_token_id") is None:
        how += _WITHOUT_PAD
    return how


def _cell(text: str) -> str:
    return visible(text).replace("|", "\\|")
