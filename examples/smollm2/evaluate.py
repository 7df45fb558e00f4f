"""Score a policy on held-out questions of a task: strict and lenient, pass@1 and pass@n.

    python examples/smollm2/evaluate.py MODEL --label base --task sums --into evaluations.jsonl

Every prompt is answered --samples times at temperature 1. pass@1 is the mean over all answers,
pass@n the share of prompts with a right answer among them; standard errors are over
prompts. One line is appended to the file, unless the same one is there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from measure import append_line, command, cpu_seconds, now, setup
from tasks import TASKS, Task

from tandem import Renderer, Rollout, SamplingConfig, Stops, generate
from tandem.devices import DTYPES
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.parallel.masters import cast_weights

ASKED = ("label", "task", "seed", "prompts", "samples", "temperature", "max_new_tokens", "dtype")
SHOWN = 6
"""Prompts whose first answers are kept to show."""


def answers(model: str, rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> Rollout:
    """`options.samples` answers to each row."""
    renderer = Renderer(load_tokenizer(model))
    sampling = SamplingConfig(
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        samples_per_prompt=options.samples,
    )
    policy = load_causal_lm(model).requires_grad_(False)
    cast_weights(policy, DTYPES[options.dtype])
    with torch.no_grad():
        return generate(
            policy,
            [renderer.prompt(row["prompt"]) for row in rows],
            sampling,
            Stops.of(renderer),
            seed=options.seed,
        )


def with_error(values: Sequence[float]) -> list[float]:
    """Mean and standard error."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return [round(fmean(values), 4), round(error, 4)]


def scores(task: Task, rows: Sequence[dict[str, Any]], rollout: Rollout) -> dict[str, Any]:
    """pass@1 and pass@n by rule, each with its standard error over prompts."""
    numbers = rollout.group.tolist()
    texts: list[list[str]] = [[] for _ in rows]
    for number, text in zip(numbers, rollout.responses, strict=True):
        texts[number].append(text)
    rules = {
        "strict": lambda text, row: task.strict(text, row),
        "lenient": lambda text, row: task.lenient(text, str(row["answer"])),
    }
    found: dict[str, Any] = {}
    for name, rule in rules.items():
        right = [[rule(t, row) for t in own] for own, row in zip(texts, rows, strict=True)]
        found[f"{name}_pass1"] = with_error([fmean(each) for each in right])
        found[f"{name}_passn"] = with_error([max(each) for each in right])
        found[f"{name}_by_prompt"] = [fmean(each) for each in right]
    found["tokens"] = round(rollout.batch.response_mask.sum(-1).float().mean().item(), 2)
    found["finished"] = round(rollout.finished.float().mean().item(), 4)
    found["answers"] = [
        {"prompt": row["prompt"], "reference": str(row["answer"]), "answers": own}
        for row, own in list(zip(rows, texts, strict=True))[:SHOWN]
    ]
    return found


def main() -> None:
    """Read the command line, answer, score, append."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a model's folder")
    parser.add_argument("--label", required=True, help="base, sft, grpo, ...: the table's row")
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--seed", type=int, default=1, help="of the arm, and of the answers")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=0, help="default: the task's")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--into", type=Path, default=Path("runs/smollm2/evaluations.jsonl"))
    options = parser.parse_args()
    task, made_by = TASKS[options.task], setup()
    options.max_new_tokens = options.max_new_tokens or task.max_new_tokens
    asked = {name: getattr(options, name) for name in ASKED}
    before = options.into.read_text().splitlines() if options.into.exists() else []
    if any(asked.items() <= ({"dtype": "fp32"} | json.loads(line)).items() for line in before):
        print(f"{options.into} has this evaluation already")
        return
    rows = task.heldout(options.prompts)
    rollout = answers(options.model, rows, options)
    arm = Path(options.model).parent / "arm.json"
    trained = json.loads(arm.read_text()) if arm.exists() else {}
    record = {
        **asked,
        "prompts_found": len(rows),
        **scores(task, rows, rollout),
        "arm": {k: trained[k] for k in ("steps", "cpu_seconds", "commit") if k in trained},
        "cpu_seconds": round(cpu_seconds(), 1),
        "when": now(),
        **made_by,
    }
    append_line(options.into, record)
    print(json.dumps({k: v for k, v in record.items() if not isinstance(v, list) or len(v) == 2}))


if __name__ == "__main__":
    command(main)
