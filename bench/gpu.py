"""What a GPU is to show, in one command: generation, a PPO step, the time to switch modes.

    python bench/gpu.py --json bench-gpu.json
    python bench/gpu.py --tiny --device cpu --json tried.json     # the same way without a GPU

OPT-1.3B's and Llama-7B's shapes with random weights in bf16: prompts of 256 tokens and 256 new
ones, beside Hugging Face's `generate` and transformers' continuous batching; then PPO's step with
an actor of 1.3B and a critic of 350M beside the plain loop. Every measurement is a process of its
own, so that none finds memory taken; one that fails is named, and the others go on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.generation import GPU_ROWS, measure_row
from bench.generation_sides import GenerationWork
from bench.harness import in_child, measure, now, peak_bytes, ready
from bench.models import SHAPES, tiny
from bench.ppo_sides import PlainSide, TandemSide, Work, agreement, require_same_work, start
from bench.report import Report, count, parser, table
from tandem.engine.hybrid import RLHFEngine
from tandem.generation.blocks import blocks_for
from tandem.generation.runner import new_memory
from tandem.generation.runners import make_runner
from tandem.ops.attention_context import BLOCK_TOKENS

BATCHES = (8, 16, 32, 64, 128, 256, 512)
RAGGED_BATCH = 64
PEERS = (("hf", "hf-static"), ("hf-cb",))
"""Who is measured beside Tandem in one process; continuous batching keeps its cache there."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure part by part, show each; returns what --json writes."""
    options = _options(arguments)
    report = Report(options)
    for part in options.parts:
        PARTS[part](options, report)
        report.keep()
    return report.end()


def generation(options: argparse.Namespace, report: Report) -> None:
    """Every row beside each group of peers; the table at the end."""
    result = report.result["generation"] = {}
    for name, work in generation_rows(options):
        for peers in PEERS:
            report.print_line(f"{name}, {', '.join(peers)} ...")
            arguments = (work, ("tandem", *peers), options.rounds, options.bandwidth)
            result.setdefault(name, {})[" ".join(peers)] = _tried(measure_row, *arguments)
            report.keep()
    lines: list[tuple[str, ...]] = []
    for name, groups in result.items():
        for peers, row in groups.items():
            if "failed" in row:
                lines.append((name, peers, row["failed"], "", ""))
                continue
            ends = row["work"].ends  # the limit is not meant for ragged answers
            for side, of in row["summary"].items():
                ratio = "" if side == "tandem" else f"{of['wall_ratio'].median:.2f}"
                share = "" if ends else f"{of['share_of_limit']:.0%}"
                lines.append((name, side, f"{of['tokens_per_wall_second']:.0f}", ratio, share))
            lines += [(name, side, reason, "", "") for side, reason in row["absent"].items()]
    report.console.print(
        table(
            "generation, decoded tokens per second",
            "ratio: Tandem's rate / the side's in each round, median; limit: share of the time "
            "that reading weights, keys and values takes at least",
            ("row", "side"),
            ("tokens/s", "ratio", "limit"),
            lines,
        )
    )


def generation_rows(options: argparse.Namespace) -> Iterator[tuple[str, GenerationWork]]:
    """Every model at every batch with answers of one length, and once with ragged ones."""
    for name, work in GPU_ROWS.items():
        row = replace(work, device=options.device)
        if options.tiny:
            row = replace(row, shape=tiny(row.shape), prompt_tokens=(8, 8), max_new_tokens=8)
        for batch in options.batch:
            yield f"{name}, batch {batch}", replace(row, num_prompts=batch)
        ragged = min(RAGGED_BATCH, max(options.batch))
        yield f"{name}, batch {ragged}, ragged", replace(row, num_prompts=ragged, ends=True)


def numbers(options: argparse.Namespace, report: Report) -> None:
    """That a PPO step of the plain loop has the same numbers, on this device."""
    work = Work(
        shape=SHAPES["a"],
        mode="ragged",
        num_prompts=8,
        max_new_tokens=16,
        micro_batch_tokens=1536,
        device=options.device,
    )
    report.result["agreement"] = _tried(agreement, work)
    report.print_line(f"a PPO step on both sides, apart: {report.result['agreement']}")


def step3(options: argparse.Namespace, report: Report) -> None:
    """Pairs per second of both sides' PPO steps, and what switching modes costs."""
    work = step3_work(options)
    result = report.result["step3"] = {"work": work}
    for side in ("tandem", "plain"):
        of = result[side] = _tried(measured, side, work, options.rounds)
        report.keep()
        if "failed" in of:
            report.print_line(f"PPO step, {side}: {of['failed']}")
            continue
        report.print_line(
            f"PPO step, {side}: {of['pairs_per_second']:.2f} pairs/s, "
            f"{of['step_seconds']:.2f} s a step"
        )
        if "switch" in of:
            report.print_line(
                f"switching to generation and back: {of['switch']['seconds'] * 1000:.1f} ms, "
                f"{of['switch']['share_of_step']:.2%} of a step"
            )


def step3_work(options: argparse.Namespace) -> Work:
    """The PPO step: an actor of 1.3B, critic and reward model of 350M."""
    work = Work(
        shape=SHAPES["opt-1.3b"],
        critic_shape=SHAPES["opt-350m"],
        num_prompts=options.pairs,
        prompt_tokens=(256,),
        max_new_tokens=256,
        minibatch_size=options.pairs,
        micro_batch_tokens=options.micro_batch_tokens,
        dtype="bf16",
        device=options.device,
    )
    if not options.tiny:
        return work
    shapes: dict[str, Any] = {"shape": tiny(work.shape), "critic_shape": tiny(SHAPES["opt-350m"])}
    return replace(work, **shapes, prompt_tokens=(8,), max_new_tokens=8)


def measured(name: str, work: Work, rounds: int) -> dict[str, Any]:
    """Costs of `rounds` forced steps of one side, after one unmeasured; Tandem's switches too.

    One side at a time, for two do not fit beside each other.

    Raises:
        RuntimeError: a step did other work than was asked for.
    """
    begin = start(work)
    never_ends = (work.max_new_tokens + 1,) * work.num_prompts
    make = {
        "tandem": lambda: TandemSide(work, begin),
        "plain": lambda: PlainSide(work, begin, never_ends),
    }[name]
    side = ready({name: make}, required=(name,)).sides[name]
    _, costs = measure({name: side}, rounds, lambda _, done: require_same_work(work, done, done))
    seconds = statistics.median(one["total"].wall for one in costs[name])
    result: dict[str, Any] = {
        "rounds": costs[name],
        "step_seconds": seconds,
        "pairs_per_second": work.num_prompts / seconds,
        "peak_bytes": peak_bytes(work.device),
    }
    if isinstance(side, TandemSide):
        switches = [switch(side.engine, work) for _ in range(4)][1:]
        found = {key: statistics.median(one[key] for one in switches) for key in switches[0]}
        result["switch"] = {**found, "share_of_step": found["seconds"] / seconds}
    return result


def switch(engine: RLHFEngine, work: Work) -> dict[str, float]:
    """Seconds that going over to generation and back takes, at one size of batch.

    That is: memory for all answers, weights in the compute type, what a first decode step takes
    longer than the next one (recording), and giving all back. A rollout whose answers end one by
    one records a few more, smaller batches.
    """
    width = blocks_for(max(work.prompt_tokens) + work.max_new_tokens)
    rows = work.num_prompts
    times = [now()]
    with engine.generating() as actor:
        memory = new_memory(actor, rows * width)
        runner = make_runner(actor, memory, width * BLOCK_TOKENS)
        token_ids = torch.zeros(rows, dtype=torch.long, device=actor.device)
        tables = torch.arange(rows * width, dtype=torch.int32, device=actor.device)
        for _ in range(2):
            runner.decode(token_ids, token_ids, tables.view(rows, width))
            times.append(now())
        runner.close()
        memory.layers.clear()
    times.append(now())
    first, second, back = (b - a for a, b in pairwise(times))
    return {"seconds": max(0.0, first - second) + back, "decode_step_seconds": second}


PARTS = {"generation": generation, "agreement": numbers, "step3": step3}


def _tried(function: Any, *arguments: Any) -> Mapping[str, Any]:
    """What the function returns in a process of its own, or why it failed."""
    try:
        answer: Mapping[str, Any] = in_child(_caught, function, arguments)
    except RuntimeError as error:  # the process died
        return {"failed": str(error)}
    return answer


def _caught(function: Any, arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        # One row may find too little memory, or its peer a defect: the others are still measured.
        return {"failed": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    flags = parser(__doc__, "rounds device micro-batch-tokens")
    flags.set_defaults(device="cuda", rounds=3, micro_batch_tokens=8192)
    add = flags.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--batch", nargs="+", type=count, help="prompts side by side; 8 to 512 by default")
    add("--pairs", type=count, help="prompts of the PPO step; 64 by default")
    add("--bandwidth", type=float, help="of the GPU's memory, TB/s; measured by default")
    options = flags.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        flags.error("--device must be available; got cuda, but no GPU was found. Use --device cpu")
    if options.device == "cpu" and not options.tiny:
        flags.error("--device cpu must come with --tiny; got it alone. The shapes are a GPU's")
    options.batch = options.batch or ([2, 4] if options.tiny else list(BATCHES))
    options.pairs = options.pairs or (4 if options.tiny else 64)
    return options


if __name__ == "__main__":
    main()
