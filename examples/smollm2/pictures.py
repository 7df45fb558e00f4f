"""The README's three pictures, from what the runs have written.

    pip install matplotlib
    python examples/smollm2/pictures.py --runs runs/smollm2 --into docs

accuracy.png: held-out pass@1 of every policy; training.png: the reward over CPU minutes of every
arm; mismatch.png: how far the sampler's log-probs are from the trainer's.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from table import pooled

LABELS = {
    "base": "base",
    "sft": "SFT",
    "grpo": "GRPO",
    "grpo-3e-6": "GRPO, 3e-6,\n6 minutes",
    "rloo": "RLOO",
    "ppo": "PPO",
    "trl-grpo": "GRPO, TRL",
}
COLOURS = {
    "base": "#9aa3ad",
    "sft": "#5b6b7d",
    "grpo": "#0b6e99",
    "grpo-3e-6": "#094f70",
    "rloo": "#2a9d8f",
    "ppo": "#8f5fbf",
    "trl-grpo": "#d97904",
}
MOST_POINTS = 200
"""Of a curve; longer ones are thinned out."""
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "figure.dpi": 110,
}


class MissingError(Exception):
    """There is nothing to draw."""


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def thinned(points: Sequence[Any]) -> list[Any]:
    """At most MOST_POINTS of them, evenly."""
    stride = max(1, -(-len(points) // MOST_POINTS))
    return list(points[::stride])


def smooth(values: Sequence[float], width: int) -> list[float]:
    """The mean of the last `width` values at each place, of fewer at the beginning."""
    found = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        found.append(sum(window) / len(window))
    return found


def accuracy(axes: Axes, records: Sequence[dict[str, Any]], task: str) -> None:
    """Held-out strict pass@1 and pass@n, means of all seeds, with standard errors."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if record["task"] == task:
            found.setdefault(record["label"], []).append(record)
    labels = [label for label in LABELS if label in found]
    if not labels:
        raise MissingError(f"no evaluation of {task}")
    for place, label in enumerate(labels):
        for offset, name, alpha in ((-0.2, "strict_pass1", 1.0), (0.2, "strict_passn", 0.45)):
            mean, error = pooled([record[name] for record in found[label]])
            axes.bar(place + offset, 100 * mean, 0.38, color=COLOURS[label], alpha=alpha)
            axes.errorbar(place + offset, 100 * mean, 100 * error, color="#222222", lw=1, capsize=2)
            axes.annotate(
                f"{100 * mean:.0f}",
                (place + offset, 100 * (mean + error)),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
            )
    axes.set_xticks(range(len(labels)), [LABELS[label] for label in labels], fontsize=9)
    axes.set_ylabel("right answers, %")
    first, seeds = found[labels[0]][0], max(map(len, found.values()))
    means = f"up to {seeds} seeds" if seeds > 1 else "one seed"
    axes.set_title(
        f"Held-out {task}: pass@1 (dark) and pass@{first['samples']} (light)\nSmolLM2-135M, "
        f"{first['prompts_found']} questions, {means}, standard errors",
        fontsize=10,
        loc="left",
    )


def curve(arm: Path) -> list[tuple[float, float]]:
    """(CPU minutes, reward) of every step. TRL's log has CPU seconds; Tandem's has the clock, at
    which the arm's cpu.jsonl says what was spent."""
    if (arm / "metrics.jsonl").exists():
        lines = [r["values"] for r in read(arm / "metrics.jsonl")]
        return [(v["cpu_seconds"] / 60, v["reward"]) for v in lines if "reward" in v]
    clock = [(r["time"], r["cpu_seconds"]) for r in read(arm / "cpu.jsonl")]
    found = []
    for record in read(arm / "run/metrics.jsonl"):
        if "reward" in record["values"]:
            spent = interpolated(clock, record["time"])
            found.append((spent / 60, record["values"]["reward"]))
    return found


def interpolated(points: Sequence[tuple[float, float]], place: float) -> float:
    """The height at `place` of the lines between the points, which are in order."""
    above = min(max(bisect(points, (place, 0.0)), 1), len(points) - 1)
    (left, low), (right, high) = points[above - 1], points[above]
    share = min(max((place - left) / (right - left), 0.0), 1.0)
    return low + share * (high - low)


def training(axes: Axes, runs: Path, task: str) -> None:
    """Reward over CPU minutes: a line per seed, the first one's thicker and with its name."""
    drawn = 0
    for label in ("grpo", "rloo", "ppo", "trl-grpo"):
        arms = sorted(runs.glob(f"{task}-{label}-[0-9]"))
        curves = [curve(a) for a in arms if {"cpu.jsonl", "metrics.jsonl"} & set(names_in(a))]
        for number, points in enumerate(curves):
            minutes = [p[0] for p in points]
            means = smooth([100 * p[1] for p in points], max(4, len(points) // 15))
            style = {"lw": 2.0} if number == 0 else {"lw": 1.0, "alpha": 0.5}
            axes.plot(thinned(minutes), thinned(means), color=COLOURS[label], **style)
        if not curves:
            continue
        drawn += 1
        minutes = [p[0] for p in curves[0]]
        means = smooth([100 * p[1] for p in curves[0]], max(4, len(minutes) // 15))
        axes.annotate(
            f"{LABELS[label]}, {len(minutes)} steps",
            (minutes[-1], means[-1]),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=COLOURS[label],
        )
    if not drawn:
        raise MissingError(f"{runs} has no arm of {task}")
    apart(axes)
    axes.set_xlabel("CPU minutes")
    axes.set_ylabel("right answers in training, %")
    axes.set_xlim(left=0)
    axes.set_xlim(right=axes.get_xlim()[1] * 1.32)
    axes.set_title(
        "The same CPU minutes for each; a line per seed,\nmeans of at least 4 steps",
        fontsize=10,
        loc="left",
    )


def names_in(folder: Path) -> list[str]:
    """The files of a folder."""
    return [path.name for path in folder.iterdir()]


def apart(axes: Axes) -> None:
    """Move the labels at the curves' ends so that none covers another."""
    axes.figure.canvas.draw()
    labels = sorted(axes.texts, key=lambda text: text.xy[1])
    to_points = 72 / axes.figure.dpi
    for lower, upper in pairwise(labels):
        low = axes.transData.transform(lower.xy)[1] * to_points + lower.xyann[1]
        high = axes.transData.transform(upper.xy)[1] * to_points + upper.xyann[1]
        upper.xyann = (upper.xyann[0], upper.xyann[1] + max(0.0, 12 - (high - low)))


def mismatch(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    """Mean and largest difference by step; exact zeros are drawn at the bottom."""
    is_half = any(record.get("dtype") == "bf16" for record in records)
    noise = (
        "sampler's weights one unit off" if is_half else "weights rounded to bf16 in the sampler"
    )
    names = {"exact": "Tandem's sampler", "bf16-sampler": noise}
    floor = 1e-9
    for run, colour in (("exact", "#0b6e99"), ("bf16-sampler", "#d97904")):
        steps = thinned([record for record in records if record["run"] == run])
        if not steps:
            raise MissingError(f"no step of the run {run}")
        places = [record["step"] for record in steps]
        for key, line in (("mean_gap", "-"), ("max_gap", "--")):
            heights = [max(record[key], floor) for record in steps]
            axes.plot(places, heights, line, color=colour, lw=1.8)
        axes.annotate(
            names[run],
            (places[0], max(floor, *(step["max_gap"] for step in steps))),
            xytext=(0, 8),
            textcoords="offset points",
            fontsize=9,
            color=colour,
        )
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, 20)
    axes.set_yticks([1e-9, 1e-6, 1e-3, 1], ["0", "1e-6", "1e-3", "1"])
    axes.set_xlabel("step")
    axes.set_ylabel("|sampler - trainer|, nats")
    axes.set_title(
        "Log-probs of the sampled tokens\nmean (line), largest (dashed)", fontsize=10, loc="left"
    )


def main() -> None:
    """Draw what there are figures for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--into", type=Path, default=Path("docs"))
    parser.add_argument("--task", default="sums")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
        drawings = {
            "accuracy": lambda axes: accuracy(
                axes, read(options.runs / "evaluations.jsonl"), options.task
            ),
            "training": lambda axes: training(axes, options.runs, options.task),
            "mismatch": lambda axes: mismatch(axes, read(options.runs / "mismatch.jsonl")),
        }
        for name, draw in drawings.items():
            figure, axes = plt.subplots(figsize=(5.6, 3.4), layout="constrained")
            try:
                draw(axes)
            except (FileNotFoundError, MissingError) as missing:
                told = getattr(missing, "filename", None)
                print(f"{name}: not drawn, {f'{told} is missing' if told else missing}")
                plt.close(figure)
                continue
            figure.savefig(options.into / f"{name}.png")
            plt.close(figure)
            print(options.into / f"{name}.png")


if __name__ == "__main__":
    main()
