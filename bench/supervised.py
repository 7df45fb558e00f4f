"""SFT and reward model, Tandem beside a plain Hugging Face loop: real tokens per second.

    python bench/supervised.py --stages sft --shapes llama-22m --rounds 7 --json supervised.json

bench/README.md says what is the same on all sides and how to read the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import Cost, alternate, facts
from bench.plain_hf_supervised import Step, pair_chunks, row_chunks
from bench.ragged import SHAPES, apart
from bench.supervised_sides import (
    PlainSide,
    Side,
    SupervisedStart,
    SupervisedWork,
    TandemSide,
    supervised_start,
)
from bench.training_table import show, summary
from tandem.engine.allocator import keep_freed_memory

AGREEMENT = {"fp32": 1e-4, "bf16": 3e-2}
"""How far losses, gradient norms and final weights may be apart, relative to the plain loop's."""

MICRO_BATCH_TOKENS = (768, 1536, 3072, 6144)
"""Padded tokens per forward that the plain loop is tried with; it gets its fastest."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Check, measure, show; returns what --json writes."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    kept = keep_freed_memory() if options.keep_freed_memory else False
    console = Console()
    result = {**facts(), "keeps_freed_memory": kept, "rows": {}}
    has_trl = importlib.util.find_spec("trl") is not None
    for shape in options.shapes:
        for stage in options.stages:
            work = SupervisedWork(
                stage=stage,
                shape=SHAPES[shape],
                dtype=options.dtype,
                device=options.device,
                num_steps=options.steps,
                batch_size=options.batch_size,
            )
            row = measure(work, options.rounds, options.micro_batch_tokens, with_trl=has_trl)
            result["rows"][f"{shape}-{stage}"] = row
            title = f"{shape} {stage}: {work.num_steps} steps of {work.batch_size}, {work.dtype}"
            show(console, title, row)
    if not has_trl:
        console.print("trl is not installed: its trainers were left out", style="dim")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def measure(
    work: SupervisedWork, rounds: int, micro_batch_tokens: int | None, *, with_trl: bool
) -> dict[str, Any]:
    """Check that the sides end at the same weights, then time them; every round from the start."""
    start = supervised_start(work)
    tokens = micro_batch_tokens or _fastest(work, start)
    work = replace(work, micro_batch_tokens=tokens)
    sides: dict[str, Side] = {"tandem": TandemSide(work, start), "hf": PlainSide(work, start)}
    if with_trl:
        from bench.supervised_trl import TRLSide

        sides["trl"] = TRLSide(work, start)
    distances = agreement(work, sides)
    first = {name: side.step()[0] for name, side in sides.items()}

    def steps_of(name: str) -> Callable[[], dict[str, Cost]]:
        def step() -> dict[str, Cost]:
            steps, costs = sides[name].step()
            require_same_work(work, name, steps, first[name])
            return costs

        return step

    costs = alternate({name: steps_of(name) for name in sides}, rounds)
    return {
        "work": asdict(work),
        "micro_batch_tokens": tokens,
        "padding": padded_tokens(work, start) / start.num_tokens,
        "apart": distances,
        "tokens": start.num_tokens,
        "rounds": {
            side: [asdict(one["total"]) for one in of_side] for side, of_side in costs.items()
        },
        "summary": summary(start.num_tokens, costs),
    }


def agreement(work: SupervisedWork, sides: dict[str, Side]) -> dict[str, float]:
    """Every side trains once; how far reports and weights are from the plain loop's.

    Raises:
        RuntimeError: further than AGREEMENT.
    """
    reported = {name: side.step()[0] for name, side in sides.items()}
    plain = sides["hf"]
    distances = {}
    for name, steps in reported.items():
        if name == "hf":
            continue
        require_same_work(work, name, steps, steps)
        for what in ("loss", "grad_norm"):
            distances[f"{name}/{what}"] = max(
                abs(getattr(ours, what) - getattr(theirs, what)) / abs(getattr(theirs, what))
                for ours, theirs in zip(steps, reported["hf"], strict=True)
            )
        distances[f"{name}/weights"] = apart(
            list(sides[name].model.parameters()), list(plain.model.parameters())
        )
    limit = AGREEMENT[work.dtype]
    for name, distance in distances.items():
        if not distance <= limit:
            raise RuntimeError(
                f"{name} must agree with the plain loop's to {limit:g}; got {distance:.3g} apart."
            )
    return distances


def require_same_work(
    work: SupervisedWork, name: str, steps: Sequence[Step], first: Sequence[Step]
) -> None:
    """A round took all optimizer steps and repeated the first round's losses.

    Raises:
        RuntimeError: it did not.
    """
    if len(steps) != work.num_steps:
        raise RuntimeError(f"{name} must take {work.num_steps} optimizer steps; got {len(steps)}.")
    for now, before in zip(steps, first, strict=True):
        if abs(now.loss - before.loss) > AGREEMENT[work.dtype] * abs(before.loss):
            raise RuntimeError(
                f"every round of {name} must have the same losses; got {now.loss} after "
                f"{before.loss}."
            )


def padded_tokens(work: SupervisedWork, start: SupervisedStart) -> int:
    """Tokens that the plain loop's forwards read, padding included."""
    total = 0
    for batch in start.batches:
        if work.stage == "sft":
            chunks = [list(map(len, rows)) for rows in row_chunks(batch, work.micro_batch_tokens)]
            total += sum(len(lengths) * max(lengths) for lengths in chunks)
        else:
            pairs = pair_chunks(batch, work.micro_batch_tokens)
            total += sum(2 * len(part) * max(map(len, part)) for part in pairs)
    return total


def _fastest(work: SupervisedWork, start: SupervisedStart) -> int:
    """The micro-batch with which the plain loop takes the least CPU time."""
    one_step = replace(start, batches=start.batches[:1])
    seconds = {}
    for tokens in MICRO_BATCH_TOKENS:
        side = PlainSide(replace(work, micro_batch_tokens=tokens), one_step)
        side.step()
        seconds[tokens] = statistics.median(side.step()[1]["total"].cpu for _ in range(3))
    return min(seconds, key=seconds.__getitem__)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--stages", nargs="+", choices=("sft", "reward"), default=["sft", "reward"])
    add("--shapes", nargs="+", choices=sorted(SHAPES), default=["llama-2.2m"])
    add("--steps", type=int, default=4, help="optimizer steps per round")
    add("--batch-size", type=int, default=32, help="rows or pairs per optimizer step")
    add("--rounds", type=int, default=5, help="trainings of each side that are measured")
    add("--threads", type=int, default=1, help="of torch, for all sides")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="compute type")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--micro-batch-tokens", type=int, help="padded tokens per forward, for all sides")
    add(
        "--default-allocator",
        dest="keep_freed_memory",
        action="store_false",
        help="leave the C library's allocator as it is, for all sides",
    )
    add("--json", type=Path, help="write everything there too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
