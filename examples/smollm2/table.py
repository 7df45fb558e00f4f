"""Markdown tables for docs/real_runs.md from what the runs have written.

    python examples/smollm2/table.py --evaluations evaluations.jsonl [--mismatch mismatch.jsonl]
        [--collapse collapse.jsonl]

One row per task and label. Standard errors are over prompts, or over seeds where there are at least
two. "over SFT" is the gain prompt by prompt, whose error is smaller than that of the two means.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ORDER = ("base", "sft", "grpo", "grpo-3e-6", "grpo-3e-5", "rloo", "ppo", "trl-grpo", "trl-rloo")
COLUMNS = ("strict_pass1", "strict_passn", "lenient_pass1", "lenient_passn")


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def rows_of(cells: Iterable[Sequence[str]], head: Sequence[str]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])


def percent(pair: Sequence[float]) -> str:
    """`16.0 (2.2)`: a share and its standard error, in percent."""
    return f"{100 * pair[0]:.1f} ({100 * pair[1]:.1f})"


def pooled(pairs: Sequence[Sequence[float]]) -> list[float]:
    """Mean over seeds, and its standard error: over seeds, or over prompts with one seed."""
    if len(pairs) == 1:
        return list(pairs[0])
    means = [pair[0] for pair in pairs]
    return [fmean(means), stdev(means) / len(means) ** 0.5]


def gain(record: dict[str, Any], before: dict[str, Any] | None) -> list[float]:
    """Strict pass@1 less that of the SFT policy, prompt by prompt: its mean and standard error.
    Empty where one of them has no scores by prompt."""
    own = record.get("strict_by_prompt")
    other = (before or {}).get("strict_by_prompt")
    if not own or not other or len(own) != len(other):
        return []
    apart = [a - b for a, b in zip(own, other, strict=True)]
    return [fmean(apart), stdev(apart) / len(apart) ** 0.5]


def evaluations(records: Sequence[dict[str, Any]]) -> str:
    """One row per task and label."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["task"], record["label"]].append(record)

    def place(key: tuple[str, str]) -> tuple[str, int]:
        return key[0], ORDER.index(key[1]) if key[1] in ORDER else len(ORDER)

    cells = []
    started = {(r["task"], r["seed"]): r for r in records if r["label"] == "sft"}
    for task, label in sorted(groups, key=place):
        found = groups[task, label]
        arms = [record["arm"] for record in found if record["arm"]]
        steps = "/".join(str(arm["steps"]) for arm in arms) or "-"
        seconds = "/".join(f"{arm['cpu_seconds']:.0f}" for arm in arms) or "-"
        shares = [percent(pooled([record[name] for record in found])) for name in COLUMNS]
        tokens = f"{fmean(record['tokens'] for record in found):.1f}"
        seeds = ", ".join(str(record["seed"]) for record in found)
        gains = [gain(r, started.get((task, r["seed"]))) for r in found if label != "sft"]
        gained = percent(pooled(known)) if (known := [g for g in gains if g]) else "-"
        cells.append([task, label, steps, seconds, shares[0], gained, *shares[1:], tokens, seeds])
    head = ["task", "policy", "steps", "CPU seconds", "strict pass@1", "over SFT", "strict pass@4"]
    return rows_of(cells, [*head, "lenient pass@1", "lenient pass@4", "tokens", "seeds"])


def mismatch(records: Sequence[dict[str, Any]]) -> str:
    """One row per run, by what the runs differ in: differences over all steps, and the reward at
    both ends."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    kinds = ("dtype", "task", "seed", "learning_rate")
    told = [kind for kind in kinds if len({record.get(kind) for record in records}) > 1]
    for record in records:
        name = [record["run"], *(f"{kind} {record.get(kind)}" for kind in told)]
        runs[", ".join(name)].append(record)
    cells = []
    for name, steps in runs.items():
        part = max(1, len(steps) // 4)
        cells.append(
            [
                name,
                str(len(steps)),
                f"{fmean(step['mean_gap'] for step in steps):.2g}",
                f"{max(step['max_gap'] for step in steps):.2g}",
                f"{fmean(step['reward'] for step in steps[:part]):.3f}",
                f"{fmean(step['reward'] for step in steps[-part:]):.3f}",
            ]
        )
    head = ["run", "steps", "mean difference, nats", "largest", "reward, first quarter", "last"]
    return rows_of(cells, head)


def collapse(records: Sequence[dict[str, Any]]) -> str:
    """One row per arm: the first tenth of the steps and the last."""
    cells = []
    for record in records:
        points = record["points"]
        part = max(1, len(points) // 10)
        cell = [record["arm"], str(len(points))]
        for name, digits in (("reward", 3), ("kl", 2), ("entropy", 3), ("response_tokens", 1)):
            ends = [
                fmean(point[name] for point in some if name in point)
                for some in (points[:part], points[-part:])
                if any(name in point for point in some)
            ]
            cell.append(" to ".join(f"{end:.{digits}f}" for end in ends) or "-")
        cells.append(cell)
    head = ["arm", "steps", "reward", "KL, nats per answer", "entropy, nats per token", "tokens"]
    return rows_of(cells, head)


def setups(records: Sequence[dict[str, Any]]) -> str:
    """Processor, threads, torch and commits, in one line."""
    told = sorted({f"{r['processor']}, {r['threads']} thread, torch {r['torch']}" for r in records})
    commits = sorted({record["commit"] for record in records})
    return f"{'; '.join(told)}; commits {', '.join(commits)}"


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name in ("evaluations", "mismatch", "collapse"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    if not any(vars(options).values()):
        parser.error("one of --evaluations, --mismatch and --collapse must be given")
    for name, table in (
        ("evaluations", evaluations),
        ("mismatch", mismatch),
        ("collapse", collapse),
    ):
        file = getattr(options, name)
        if file is not None:
            if not file.is_file():
                parser.error(f"{file}: no such file")
            records = read(file)
            print(f"{table(records)}\n\n{setups(records)}\n")


if __name__ == "__main__":
    main()
