"""The report's head: what was run, the result in a few numbers, the answers side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.config.stages import in_order, stage_of
from tandem.metrics.cost import total_seconds
from tandem.metrics.folder import (
    RunFolder,
    declared,
    finite,
    list_or_empty,
    mapping_or_empty,
    number_or_none,
)
from tandem.metrics.metric import declared_by
from tandem.metrics.text import duration, short_number, trimmed, with_unit


@dataclass(frozen=True, slots=True)
class Card:
    """One number of the result: `value` now, `detail` beside it (where it came from)."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One metric of every model; `best` holds the columns of the best."""

    name: str
    unit: str
    meaning: str
    cells: tuple[str, ...]
    best: frozenset[int]


@dataclass(frozen=True, slots=True)
class ResultTable:
    """The evaluation at the end of the run, a column per model."""

    labels: tuple[str, ...]
    rows: tuple[ResultRow, ...]


@dataclass(frozen=True, slots=True)
class AnswerView:
    """One model's answer; `best` if no other answer to the prompt scores higher."""

    label: str
    text: str
    score: str
    best: bool


@dataclass(frozen=True, slots=True)
class PromptView:
    """A prompt with its answers side by side; `at` says when (empty: at the end of the run)."""

    prompt: str
    at: str
    answers: tuple[AnswerView, ...]


def result_cards(folder: RunFolder) -> list[Card]:
    """The result in a few numbers: each stage's model on held-out rows, and the time of all."""
    result = []
    for stage in folder.stages():
        model = f"{stage_of(stage).short} model"
        for metric, what in _RESULTS[declared_by(stage)]:
            points = finite(folder.series(stage, metric))
            if points:
                unit = declared(metric).unit
                (first, before), (last, now) = points[0], points[-1]
                detail = f"at step {last:.0f}"
                if len(points) > 1:
                    where = _start_of(folder, stage) if first == 0 else f"at step {first:.0f}"
                    detail = f"from {with_unit(before, unit)} ({where})"
                label = f"{model}: {what}"
                result.append(Card(label, with_unit(now, unit), detail))
    total = sum(total_seconds(folder, stage) for stage in folder.stages())
    if total:
        result.append(Card("Time of all steps", duration(total), ""))
    return result


def _start_of(folder: RunFolder, stage: str) -> str:
    """Which model a stage's step 0 measured."""
    record = stage_of(stage)
    if record.leaves == "reward model":
        return "untrained"
    before = in_order(record.after)
    if not before:
        return "base model"
    policies = [s for s in before if s.leaves == "policy" and s.name in folder.stages()]
    return f"{policies[0].short} model" if policies else "at the start"


_RESULTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "sft": (("heldout_perplexity", "perplexity, held-out"),),
    "reward": (("heldout_accuracy", "accuracy, held-out"),),
    "dpo": (("heldout_accuracy", "accuracy, held-out"),),
    "ppo": (
        ("heldout_reward", "reward, held-out, normalized"),
        ("heldout_kl", "KL to the reference, nats per answer"),
        ("heldout_eos_rate", "finished answers (EOS rate)"),
    ),
}


def result_table(folder: RunFolder) -> ResultTable:
    """The evaluation's numbers, models side by side."""
    models = mapping_or_empty(folder.evaluation.get("models"))
    names = dict.fromkeys(name for values in models.values() for name in mapping_or_empty(values))
    rows = []
    for name in names:
        metric = declared(str(name))
        numbers = [number_or_none(mapping_or_empty(v).get(name)) for v in models.values()]
        rows.append(
            ResultRow(
                name=str(name),
                unit="" if metric.unit in ("share", "ratio") else metric.unit,
                meaning=metric.meaning,
                cells=tuple("" if n is None else with_unit(n, metric.unit) for n in numbers),
                best=_best(numbers, metric.better),
            )
        )
    return ResultTable(tuple(str(label) for label in models), tuple(rows))


def _best(numbers: Sequence[float | None], better: str) -> frozenset[int]:
    """Where the best of several numbers is, ties included; nowhere if they are all alike."""
    known = [n for n in numbers if n is not None and math.isfinite(n)]
    if not better or not known or min(known) == max(known):
        return frozenset()
    best = max(known) if better == "higher" else min(known)
    return frozenset(i for i, number in enumerate(numbers) if number == best)


def final_answers(folder: RunFolder) -> list[PromptView]:
    """The evaluation's prompts with each model's answer."""
    entries = map(mapping_or_empty, list_or_empty(folder.evaluation.get("answers")))
    return [_prompt_view(entry, at="") for entry in entries if entry]


def training_answers(folder: RunFolder, count: int) -> list[PromptView]:
    """The newest samples that were drawn while training."""
    return [
        _prompt_view(entry, at=f"{entry.get('stage', '')} step {entry.get('step', '')}".strip())
        for entry in reversed(folder.samples[-count:])
    ]


def _prompt_view(entry: Mapping[str, Any], at: str) -> PromptView:
    answers = {
        str(label): mapping_or_empty(answer)
        for label, answer in mapping_or_empty(entry.get("answers")).items()
    }
    scores = {label: number_or_none(answer.get("score")) for label, answer in answers.items()}
    best = _best(list(scores.values()), "higher")
    views = tuple(
        AnswerView(
            label=label,
            text=str(answer.get("text", "")),
            score="" if scores[label] is None else trimmed(short_number(scores[label] or 0.0, 3)),
            best=number in best,
        )
        for number, (label, answer) in enumerate(answers.items())
    )
    return PromptView(str(entry.get("prompt", "")), at, views)


def when(folder: RunFolder) -> str:
    """The day and time (UTC) of the first record."""
    moments = [record.time for record in folder.records if 0 < record.time < 1e11]
    if not moments:
        return ""
    start = time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(min(moments)))
    return start.lstrip("0")


def steps_of_run(folder: RunFolder) -> list[tuple[str, str]]:
    """(stage, state) of the stages that the config asks for or that have records; the state is
    empty where a stage has not run."""
    planned = [str(stage) for stage in list_or_empty(folder.config.get("steps"))]
    stages = []
    for stage in dict.fromkeys([*planned, *folder.stages()]):
        steps = [record.step for record in folder.records if record.stage == stage]
        seconds = total_seconds(folder, stage)
        state = f"{max(steps):,} steps" if steps else ""
        stages.append((stage, f"{state} · {duration(seconds)}" if seconds else state))
    return stages
