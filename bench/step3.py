"""One step of PPO, Tandem beside a plain Hugging Face loop: the same work, alternating in one run.

    python bench/step3.py --shape a --mode ragged --rounds 7 --json step3.json

bench/README.md says what is the same on both sides and how to read the table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import Rounds, compare, in_child, measure, once, peak_bytes, ready
from bench.limits import gemm_rate
from bench.models import SHAPES, tiny
from bench.ppo_sides import (
    PlainSide,
    TandemSide,
    Work,
    agreement,
    held_lengths,
    require_same_work,
    start,
)
from bench.report import Report, count, parser, sides_table
from tandem.engine.allocator import keep_freed_memory

PHASES = ("generate", "score", "train", "total")

MICRO_BATCH_TOKENS = {
    "a": 1536,
    "llama-2.2m": 1536,
    "b": 768,
    "llama-22m": 768,
    "smollm2": 768,
}
"""Padded tokens per forward: what the plain loop is fastest with, 16 and 8 rows."""

SIZES: dict[str, dict[str, Any]] = {
    "smollm2": {"num_prompts": 8, "prompt_tokens": (64,), "max_new_tokens": 32}
}
"""Where a shape's step has other sizes than `Work`."""

SAMPLES = {"smollm2": 4}
"""Answers to each prompt; 1 for other shapes."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Check, measure, show; returns what --json writes."""
    options = _options(arguments)
    report = Report(options)
    work = work_of(options)
    distances: dict[str, float] = {}
    if options.check:
        report.print_line("checking that both sides compute the same ...")
        distances = agreement(work)
        report.print_line(f"they do: at most {max(distances.values()):.1e} apart")
    lengths, costs = alternating(work, options.rounds)
    answer_tokens = [min(n, work.max_new_tokens) for n in lengths]
    found = summary(work, answer_tokens, costs)
    peak = gemm_rate(work.dtype) if work.device == "cpu" else None
    if peak:
        add_shares(found, costs, peak)
    slower = {} if options.tiny else slower_phases(found)
    report.result |= {
        "work": {**asdict(work), "name": options.shape, "answer_tokens": answer_tokens},
        "apart": distances,
        "rounds": costs,
        "summary": found,
        "flops_per_cpu_second": peak,
        "slower_than_plain": slower,
        "memory_bytes": {},
    }
    report.console.print(
        sides_table(
            f"one {work.algorithm.upper()} step: Llama {options.shape}, {work.mode}, {work.dtype}, "
            f"{work.num_answers} answers of {statistics.mean(answer_tokens):.1f} tokens",
            f"{options.rounds} round(s)",
            found,
            "phase",
            {
                "samples/s": lambda of: f"{of['samples_per_second']:.1f}",
                "of peak": lambda of: f"{of['peak_share']:.0%}" if "peak_share" in of else "",
            },
        )
    )
    if peak:
        report.print_line(
            f"of peak: real tokens' operations over {peak / 1e9:.0f} GFLOP per CPU second, this "
            "machine's best product"
        )
    for phase, ratio in slower.items():
        report.print_line(f"FAILED: {phase} is slower than the plain loop ({ratio:.2f}x)")
    for side in ("tandem", "plain") if options.memory else ():
        memory = in_child(
            peak_memory, side, work, lengths, options.threads, options.keep_freed_memory
        )
        report.result["memory_bytes"][side] = memory
        report.print_line(
            f"peak memory, {side}: {memory['peak'] / 2**20:.0f} MB "
            f"({memory['before'] / 2**20:.0f} MB before the first step)"
        )
    return report.end()


def work_of(options: argparse.Namespace) -> Work:
    """The step that the flags ask for."""
    name, tokens = options.shape, options.micro_batch_tokens
    work = Work(
        algorithm=options.algorithm,
        shape=SHAPES[name],
        mode=options.mode,
        epochs=options.epochs,
        minibatch_size=options.minibatch_size,
        micro_batch_tokens=tokens or MICRO_BATCH_TOKENS[name],
        samples_per_prompt=options.samples_per_prompt
        or SAMPLES.get(name, 4 if options.algorithm == "grpo" else 1),
        dtype=options.dtype,
        device=options.device,
        **SIZES.get(name, {}),
    )
    if options.tiny:
        small: dict[str, Any] = {"num_prompts": 8, "prompt_tokens": (8, 4), "max_new_tokens": 8}
        work = replace(work, shape=tiny(work.shape), minibatch_size=8, **small)
    return work


def alternating(work: Work, rounds: int) -> tuple[tuple[int, ...], Rounds]:
    """Lengths that the plain loop was held to, and what `rounds` steps of each side cost.

    Every step is checked for the same work.
    """
    begin = start(work)
    tandem = TandemSide(work, begin)
    lengths = held_lengths(work, tandem.make())
    makers = {"tandem": lambda: tandem, "plain": lambda: PlainSide(work, begin, lengths)}
    found = ready(makers, required=makers)
    first = found.done["tandem"]
    check = lambda _, done: require_same_work(work, first, done)  # noqa: E731
    return lengths, measure(found.sides, rounds, check)[1]


def summary(work: Work, answer_tokens: Sequence[int], costs: Rounds) -> dict[str, dict[str, Any]]:
    """By phase and side: median seconds, rates, and its cost over Tandem's.

    tokens: those sampled (generate, total), or prompts and answers as often as they are read
    (score: once; train: once an epoch).
    """
    sampled = sum(answer_tokens)
    prompts = work.prompt_tokens
    read = sum(prompts[i % len(prompts)] for i in range(work.num_prompts))
    whole = sampled + read * work.samples_per_prompt
    tokens = {"generate": sampled, "score": whole, "train": whole * work.epochs, "total": sampled}
    table = {phase: compare(costs, tokens[phase], phase) for phase in PHASES}
    for row in table.values():
        for of in row.values():
            of["samples_per_second"] = work.num_answers / of["wall_seconds"]
    return table


def add_shares(
    found: Mapping[str, Mapping[str, dict[str, Any]]], costs: Rounds, rate: float
) -> None:
    """Add `peak_share` to every side of every phase: the operations that Tandem counts (real tokens
    alone), over what the best product would do in that side's CPU time."""
    for phase, sides in found.items():
        flops = statistics.median(one[phase].flops for one in costs["tandem"])
        for of in sides.values():
            of["peak_share"] = flops / (rate * of["cpu_seconds"])


def slower_phases(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, float]:
    """The phases in which the plain loop costs less than Tandem, with the median ratio."""
    ratios = {phase: sides["plain"]["cpu_ratio"].median for phase, sides in found.items()}
    return {phase: ratio for phase, ratio in ratios.items() if ratio < 1}


def peak_memory(
    side: str, work: Work, lengths: tuple[int, ...], threads: int, keeps: bool
) -> dict[str, int]:
    """Peak bytes of a process that does two steps of one side, and what it held before them.

    It holds no copy of the start's weights, which only a bench needs. On a GPU the figures are the
    GPU's.

    Args:
        keeps: with Tandem's allocator, for either side.
    """
    torch.set_num_threads(threads)
    if keeps:
        keep_freed_memory()
    begin = start(work)
    kind, held = (TandemSide, ()) if side == "tandem" else (PlainSide, (lengths,))
    built = kind(work, begin, *held, copies=work.device == "cuda")
    before = peak_bytes(work.device)
    for number in range(2):
        once(built, number)
    return {"before": before, "peak": peak_bytes(work.device)}


def work_parser(description: str | None, shared: str) -> argparse.ArgumentParser:
    """The flags that `work_of` reads, beside the `shared` ones."""
    flags = parser(
        description, f"{shared} rounds dtype device micro-batch-tokens default-allocator"
    )
    add = flags.add_argument
    add("--algorithm", choices=("ppo", "grpo"), default="ppo", help="grpo: no critic, no reference")
    add(
        "--shape",
        choices=tuple(MICRO_BATCH_TOKENS),
        default="a",
        help="0.94M, 2.2M, 15.2M, 22M, 135M weights",
    )
    add("--samples-per-prompt", type=count, help="answers to each prompt (1; smollm2: 4)")
    add("--mode", choices=("forced", "ragged"), default="forced", help="lengths of the answers")
    add("--epochs", type=count, default=1, help="passes over the rollout")
    add("--minibatch-size", type=count, default=64, help="answers per optimizer step")
    return flags


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    flags = work_parser(__doc__, "threads")
    add = flags.add_argument
    add("--no-check", dest="check", action="store_false", help="do not compare the sides' numbers")
    add("--no-memory", dest="memory", action="store_false", help="leave out the peak memory")
    return flags.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(bool(main()["slower_than_plain"]))
