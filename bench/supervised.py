"""SFT and reward model, Tandem beside a plain Hugging Face loop: real tokens per second.

    python bench/supervised.py --stages sft --shapes llama-22m --rounds 7 --json supervised.json

bench/README.md says what is the same on all sides and how to read the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import Ready, compare, fastest, measure, ready, require_close
from bench.models import SHAPES, apart, tiny
from bench.plain_hf_supervised import Step, pair_chunks, row_chunks
from bench.report import Report, count, parser, sides_table
from bench.supervised_sides import (
    SIDES,
    TrainingSide,
    TrainingStart,
    TrainingWork,
    training_start,
)

AGREEMENT = {"fp32": 1e-4, "bf16": 3e-2}
"""How far losses, gradient norms and final weights may be apart, relative to the plain loop's."""

MICRO_BATCH_TOKENS = (768, 1536, 3072, 6144)
"""Padded tokens per forward that the plain loop is tried with; it gets its fastest."""

LLAMAS = ("llama-2.2m", "llama-22m")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Check, measure, show; returns what --json writes."""
    options = _options(arguments)
    report = Report(options)
    rows = report.result["rows"] = {}
    for shape in options.shapes:
        for stage in options.stages:
            work = TrainingWork(
                stage=stage,
                shape=SHAPES[shape],
                dtype=options.dtype,
                device=options.device,
                num_steps=options.steps,
                batch_size=options.batch_size,
            )
            row = measure_row(tried(work, options), options, SIDES)
            rows[f"{shape}-{stage}"] = row
            title = f"{shape} {stage}: {work.num_steps} steps of {work.batch_size}, {work.dtype}"
            show(report, title, row)
    return report.end()


def tried(work: TrainingWork, options: argparse.Namespace) -> TrainingWork:
    """The work, or with --tiny less of the same kind."""
    small: dict[str, Any] = {"batch_size": 6, "prompt_tokens": (2, 6), "max_answer_tokens": 12}
    return replace(work, shape=tiny(work.shape), **small) if options.tiny else work


def measure_row(
    work: TrainingWork,
    options: argparse.Namespace,
    kinds: Mapping[str, type[TrainingSide]],
    tensors: Callable[[PreTrainedModel], Iterable[Tensor]] = lambda model: model.parameters(),
    limit: float | None = None,
) -> dict[str, Any]:
    """Check that the sides compute the same, then time them; every round from the start.

    Args:
        tensors, limit: as of `agreement`.
    """
    start = training_start(work)
    first = replace(start, batches=start.batches[:1])
    tokens = options.micro_batch_tokens or fastest(
        lambda n: kinds["hf"](replace(work, micro_batch_tokens=n), first), MICRO_BATCH_TOKENS
    )
    work = replace(work, micro_batch_tokens=tokens)
    makers = {name: partial(kind, work, start) for name, kind in kinds.items()}
    found = ready(makers, required=("tandem", "hf"))
    distances = agreement(work, found, tensors, limit)
    _, costs = measure(
        found.sides,
        options.rounds,
        lambda name, steps: require_same_work(work, name, steps, found.done[name]),
    )
    return {
        "work": work,
        "padding": padded_tokens(work, start) / start.num_tokens,
        "apart": distances,
        "absent": found.absent,
        "tokens": start.num_tokens,
        "rounds": costs,
        "summary": compare(costs, start.num_tokens),
    }


def agreement(
    work: TrainingWork,
    found: Ready,
    tensors: Callable[[PreTrainedModel], Iterable[Tensor]] = lambda model: model.parameters(),
    limit: float | None = None,
) -> dict[str, float]:
    """How far from the plain loop's every side's reports and tensors are after a first round.

    Args:
        tensors: of a model, to be compared; its weights by default.
        limit: instead of AGREEMENT.
    Raises:
        RuntimeError: further than the limit.
    """
    plain: Any = found.sides["hf"]
    distances = {}
    for name, side in found.sides.items():
        if side is plain:
            continue
        steps = found.done[name]
        require_same_work(work, name, steps, steps)
        for what in ("loss", "grad_norm"):
            distances[f"{name}/{what}"] = max(
                abs(getattr(ours, what) - getattr(theirs, what)) / abs(getattr(theirs, what))
                for ours, theirs in zip(steps, found.done["hf"], strict=True)
            )
        distances[f"{name}/tensors"] = apart(tensors(side.model), tensors(plain.model))  # type: ignore[attr-defined]
    require_close(distances, limit or AGREEMENT[work.dtype])
    return distances


def require_same_work(
    work: TrainingWork, name: str, steps: Sequence[Step], first: Sequence[Step]
) -> None:
    """A round took all optimizer steps and repeated the first round's losses.

    Raises:
        RuntimeError: it did not.
    """
    if len(steps) != work.num_steps:
        raise RuntimeError(f"{name} must take {work.num_steps} optimizer steps; got {len(steps)}.")
    for this, before in zip(steps, first, strict=True):
        if abs(this.loss - before.loss) > AGREEMENT[work.dtype] * abs(before.loss):
            raise RuntimeError(
                f"every round of {name} must have the same losses; got {this.loss} after "
                f"{before.loss}."
            )


def padded_tokens(work: TrainingWork, start: TrainingStart) -> int:
    """Tokens that the plain loop's forwards read, padding included."""
    per_row, chunks = (1, row_chunks) if work.stage == "sft" else (2, pair_chunks)
    return sum(
        per_row * len(rows) * max(map(len, rows))
        for batch in start.batches
        for rows in chunks(batch, work.micro_batch_tokens)
    )


def show(report: Report, title: str, row: Mapping[str, Any]) -> None:
    """A row's table, and under it the sides that could not be had."""
    report.console.print(
        sides_table(
            title,
            f"{row['tokens']} real tokens, micro-batches of {row['work'].micro_batch_tokens}, "
            f"padding {row['padding']:.2f}x; at most {max(row['apart'].values()):.1e} apart; "
            f"{len(row['rounds']['tandem'])} round(s)",
            {"": row["summary"]},
            "",
        )
    )
    for side, reason in row["absent"].items():
        report.print_line(f"{side} is unavailable: {reason}")
    report.keep()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    flags = parser(__doc__, "rounds threads dtype device micro-batch-tokens default-allocator")
    add = flags.add_argument
    add("--stages", nargs="+", choices=("sft", "reward"), default=["sft", "reward"])
    add("--shapes", nargs="+", choices=LLAMAS, default=["llama-2.2m"])
    add("--steps", type=count, default=4, help="optimizer steps per round")
    add("--batch-size", type=count, default=32, help="rows or pairs per optimizer step")
    return flags.parse_args(arguments)


if __name__ == "__main__":
    main()
