"""What the page shows of a run, as JSON: one function per view, over the run's files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tandem.config.stages import Family, stage_of
from tandem.metrics.answer_views import (
    Histogram,
    WinRate,
    followed_prompts,
    frontier,
    last_turn,
    model_win_rates,
    numbers,
    recorded_advantages,
    reward_at,
    win_rate_of_steps,
)
from tandem.metrics.answers import ANSWERS_FILE, FOLLOWED_FILE, ROWS_FILE
from tandem.metrics.charts import thinned
from tandem.metrics.folder import mapping_or_empty, number_or_none
from tandem.metrics.names import group_of, metric_or_unknown, title_of
from tandem.serve.run_files import Answer, RunFiles

View = dict[str, Any]

SORTS = ("order", "reward", "length", "kl", "step")
"""What answers can be sorted by; with a minus in front the highest comes first."""
_EXCERPT = 400


def summary(name: str, run: RunFiles) -> View:
    """A run's line in the list of runs."""
    folder = run.folder()
    times = [record.time for record in folder.records if math.isfinite(record.time)]
    return {
        "id": name,
        "model": str(folder.config.get("actor_model") or ""),
        "started": min(times, default=None),
        "updated": max(times, default=None),
        "alarms": len(folder.alarms),
        "stages": [
            {
                "name": stage.name,
                "title": stage.title,
                "family": stage.family,
                "steps": max(r.step for r in folder.records if r.stage == stage.name),
                "finished": (run.path / stage.name / "MANIFEST.json").is_file(),
            }
            for stage in folder.stages()
        ],
    }


def details(name: str, run: RunFiles) -> View:
    """A run with its commands, notices, and the final comparison of its models."""
    folder = run.folder()
    return {
        **summary(name, run),
        "commands": list(folder.commands),
        "notices": [*folder.notices, *run.damaged()],
        "environment": dict(folder.environment),
        "models": mapping_or_empty(folder.evaluation.get("models")),
        "win_rates": [
            {"model": ours, "against": theirs, **asdict(rate)}
            for ours, theirs, rate in model_win_rates(folder.evaluation)
        ],
    }


def metric_names(run: RunFiles, stage: str) -> View:
    """The metrics that a stage logged, with their last values."""
    last: dict[str, float] = {}
    family = _family(run, stage)
    for record in run.folder().records:
        if record.stage == stage:
            last |= record.values
    return {
        "stage": stage,
        "metrics": [
            {
                "name": name,
                "title": title_of(name, family),
                "unit": metric_or_unknown(name).unit,
                "meaning": metric_or_unknown(name).meaning,
                "healthy": metric_or_unknown(name).healthy,
                "group": _group(name),
                "last": value,
            }
            for name, value in last.items()
        ],
    }


def _family(run: RunFiles, stage: str) -> Family | None:
    """A stage's family; None where nothing of it was logged."""
    return next((s.family for s in run.folder().stages() if s.name == stage), None)


def _group(name: str) -> str:
    return group_of(name) if metric_or_unknown(name).unit else "other"


def series(run: RunFiles, stage: str, names: Sequence[str]) -> View:
    """The points of some metrics; long series keep each stretch's lowest and highest value."""
    found, family = {}, _family(run, stage)
    for name in names:
        points = run.folder().series(stage, name)
        kept = points if len(points) <= 2000 else thinned([p for p in points if p[1] == p[1]])
        found[name] = {
            "title": title_of(name, family),
            "unit": metric_or_unknown(name).unit,
            "meaning": metric_or_unknown(name).meaning,
            "steps": [int(step) for step, _ in kept],
            "values": [value for _, value in kept],
            "num_points": len(points),
        }
    return {"stage": stage, "series": found}


def alarms(run: RunFiles, stage: str | None) -> View:
    """Alarms in the order raised, of one stage or of all."""
    lines = run.folder().alarms
    return {"alarms": [dict(line) for line in lines if stage in (None, line.get("stage"))]}


def reward_against_kl(run: RunFiles, stage: str) -> View:
    """The frontier of a stage: reward against KL, with its checkpoints marked."""
    points = frontier(run.folder().records, stage, run.checkpoints(stage))
    return {"stage": stage, "points": [asdict(point) for point in points]}


def histograms(run: RunFiles, stage: str, step: int | None) -> View:
    """The distributions of a step's answers; None is the last step. All steps of a stage share an
    axis, from the lowest to the highest value recorded."""
    lines = [line for line in run.lines(ANSWERS_FILE) if line.get("stage") == stage]
    steps = [int(line["step"]) for line in lines if isinstance(line.get("step"), int)]
    chosen = next((x for x in reversed(lines) if step is None or x.get("step") == step), None)
    found: View = {"stage": stage, "steps": steps, "step": None, "histograms": {}}
    if chosen is None:
        return found
    found["step"] = chosen.get("step")
    found["finished"] = numbers(chosen.get("finished"))
    for name in ("reward", "length", "kl"):
        span, is_count = run.span(stage, name), name == "length"
        made = Histogram.of(numbers(chosen.get(name)), span=span, whole=is_count)
        if made is not None:
            found["histograms"][name] = asdict(made)
    if (advantages := recorded_advantages(chosen)) is not None:
        low, high, counts = advantages
        found["histograms"]["advantage"] = {"low": low, "high": high, "counts": counts}
    return found


def rollouts(
    run: RunFiles,
    stage: str,
    *,
    step: int | None,
    text: str,
    sort: str,
    offset: int,
    limit: int,
) -> View:
    """A page of the recorded answers of a stage.

    Args:
        step: only this step's; None: all.
        text: only answers or prompts that contain it, in any case.
        sort: one of SORTS, with a minus in front for the highest first.
    """
    answers = [answer for answer in run.rollouts() if answer.line.get("stage") == stage]
    steps = sorted({int(x.line["step"]) for x in answers if isinstance(x.line.get("step"), int)})
    matched = [
        answer
        for answer in answers
        if step in (None, answer.line.get("step")) and _contains(answer, text.casefold())
    ]
    name = sort.removeprefix("-")
    if name != "order":
        matched.sort(key=lambda answer: _key(answer, name, sort.startswith("-")))
    elif sort.startswith("-"):
        matched.reverse()
    return {
        "stage": stage,
        "steps": steps,
        "total": len(answers),
        "matched": len(matched),
        "offset": offset,
        "rows": [_light(answer.line) for answer in matched[offset : offset + limit]],
    }


def _contains(answer: Answer, text: str) -> bool:
    if not text:
        return True
    said = f"{last_turn(answer.line.get('prompt'))}\n{answer.line.get('text', '')}"
    return text in said.casefold()


def _key(answer: Answer, name: str, descending: bool) -> tuple[bool, float]:
    """Rows without the number come last, whatever the direction."""
    value = number_or_none(answer.line.get(name))
    if value is None or not math.isfinite(value):
        return True, 0.0
    return False, -value if descending else value


def _light(line: Mapping[str, Any]) -> View:
    names = ("step", "row", "group", "prompt_id", "reward", "length", "kl", "finished")
    return {
        **{name: line.get(name) for name in names if name in line},
        "prompt": last_turn(line.get("prompt"))[:_EXCERPT],
        "text": str(line.get("text", ""))[:_EXCERPT],
    }


def rollout(run: RunFiles, stage: str, step: int, row: int) -> View | None:
    """One recorded answer with all its columns; None if there is none."""
    for answer in run.rollouts():
        line = answer.line
        if (line.get("stage"), line.get("step"), line.get("row")) == (stage, step, row):
            return dict(run.rollout(answer))
    return None


def prompts(run: RunFiles, stage: str) -> View:
    """The prompts that can be followed over a stage: the held-out ones, with the reward first and
    last, and win rates of the last evaluation against the first."""
    followed = followed_prompts(run.lines(FOLLOWED_FILE), stage)
    shown = [
        {
            "id": name,
            "prompt": last_turn(lines[0].get("prompt"))[:_EXCERPT],
            "evaluations": len({line["step"] for line in lines}),
            "first": _or_none(reward_at(lines, lines[0]["step"])),
            "last": _or_none(reward_at(lines, lines[-1]["step"])),
        }
        for name, lines in followed.items()
    ]
    steps = sorted({int(x["step"]) for lines in followed.values() for x in lines})
    rates = []
    for step in steps[1:]:
        rate = win_rate_of_steps(followed.values(), step, steps[0])
        if rate.prompts:  # none without rewards
            rates.append({"step": step, "against": steps[0], **asdict(rate)})
    return {"stage": stage, "steps": steps, "prompts": shown, "win_rates": rates}


def prompt(run: RunFiles, stage: str, name: str) -> View | None:
    """Everything recorded of one prompt, in the order of steps; None if there is nothing."""
    lines = followed_prompts(run.lines(FOLLOWED_FILE), stage).get(name, [])
    trained = [
        dict(answer.line)
        for answer in run.rollouts()
        if answer.line.get("prompt_id") == name and answer.line.get("stage") == stage
    ]
    if not lines and not trained:
        return None
    first = (lines or trained)[0]
    return {"id": name, "prompt": first.get("prompt"), "followed": lines, "trained": trained}


def comparison(
    ours: tuple[RunFiles, str, int | None], theirs: tuple[RunFiles, str, int | None]
) -> View:
    """The same held-out prompts at two steps of a stage, or in two runs, with the win rate of the
    second against the first, None without rewards. A step of None is the last."""
    sides = [_evaluation(*side) for side in (ours, theirs)]
    (before_step, before), (after_step, after) = sides
    shared = [name for name in before if name in after]
    rows = [
        {
            "id": name,
            "prompt": last_turn(before[name].get("prompt")),
            "before": _shown(before[name]),
            "after": _shown(after[name]),
        }
        for name in shared
    ]
    rate = WinRate.of((_reward(after[name]), _reward(before[name])) for name in shared)
    return {
        "before": before_step,
        "after": after_step,
        "steps": [_steps(*ours[:2]), _steps(*theirs[:2])],
        "rows": rows,
        "win_rate": asdict(rate) if rate.prompts else None,  # none without rewards
        "only_before": len(before) - len(shared),
        "only_after": len(after) - len(shared),
    }


def _steps(run: RunFiles, stage: str) -> list[int]:
    lines = followed_prompts(run.lines(FOLLOWED_FILE), stage).values()
    return sorted({int(line["step"]) for answers in lines for line in answers})


def _evaluation(
    run: RunFiles, stage: str, step: int | None
) -> tuple[int | None, dict[str, Mapping[str, Any]]]:
    """A step's first answer to every prompt; of several answers with their number (`answers`) and,
    where answers have rewards, their mean."""
    steps = _steps(run, stage)
    if step is None:
        step = steps[-1] if steps else None
    found: dict[str, Any] = {}
    for name, lines in followed_prompts(run.lines(FOLLOWED_FILE), stage).items():
        answers = [line for line in lines if line["step"] == step]
        if len(answers) == 1:
            (found[name],) = answers
        elif step is not None and answers:
            found[name] = {**answers[0], "answers": len(answers)}
            if any("reward" in line for line in answers):
                found[name]["reward"] = _or_none(reward_at(answers, step))
    return step, found


def _reward(line: Mapping[str, Any]) -> float:
    value = number_or_none(line.get("reward"))
    return math.nan if value is None else value


def _or_none(reward: float) -> float | None:
    return None if math.isnan(reward) else reward


def _shown(line: Mapping[str, Any]) -> View:
    names = ("text", "answers", "reward", "kl", "length", "finished", "step")
    return {name: line[name] for name in names if name in line}


def data(run: RunFiles) -> View:
    """The ledger, and a few rows of each kind token by token."""
    folder = run.folder()
    return {"ledger": dict(folder.data), "rows": dict(run.json(ROWS_FILE))}


def stage_name(name: str) -> str:
    """The name of a stage.

    Raises:
        ConfigError: there is no such stage.
    """
    return stage_of(name).name
