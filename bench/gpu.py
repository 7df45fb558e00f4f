"""What a GPU is to show, in six parts of at most 9 minutes, offline and resumable.

    python bench/gpu.py --json bench-gpu.json --parts ABC     # again: goes on with what is missing
    python bench/gpu_tables.py bench-gpu.json                 # the rows of docs/benchmarks.md
    python bench/gpu.py --tiny --device cpu --json tried.json # the same code without a GPU

    A first look: tests/gpu, attention's bandwidth, row invariance, rollouts in a row
    B decoding as a share of the memory's bandwidth: 7B and 1.3B at 16, 64 and 128 rows
    C a PPO step of 1.3B + 350M beside the plain loop, and how far the two agree
    D beside Hugging Face: dynamic, static and compiled caches, equal and ragged lengths
    E the largest models: 13B full PPO with an offloaded optimizer, 34B LoRA on NF4
    F where the time goes: one decode step, one PPO update, as tables

Every measurement is a process of its own, so that none finds memory taken; one that fails is named,
and the others go on. A measurement begins only within its part's minutes; what is left out, or has
failed, is measured by the next call with the same --json, which begins with what was never begun.
docs/gpu.md says in which order to lend 45 minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import gpu_parts
from bench.generation import GPU_ROWS, measure_row
from bench.generation_sides import GenerationWork
from bench.gpu_tables import tables
from bench.harness import in_child, measure, now, peak_bytes, ready
from bench.models import SHAPES, tiny
from bench.ppo_sides import PlainSide, TandemSide, Work, agreement, require_same_work, start
from bench.report import Report, count, parser
from tandem.engine.hybrid import RLHFEngine
from tandem.generation.blocks import blocks_for
from tandem.generation.make_runner import make_runner
from tandem.generation.runner import new_memory
from tandem.ops.attention_context import BLOCK_TOKENS

BATCHES = (16, 64, 128)
PEERS = ("hf", "hf-static", "hf-compile")
"""Who is measured beside Tandem in one process."""
_LATE = "not begun within"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure part by part, show each; returns what --json writes."""
    options = _options(arguments)
    report = Report(options)
    parts = report.result["parts"] = _measured_before(options)
    for letter in options.parts:
        rows = parts.setdefault(letter, {})
        end = now() + 60 * options.minutes
        # What failed before, or was stopped in the middle, comes last.
        for name, function, arguments_of in sorted(
            PARTS[letter](options), key=lambda one: _was_begun(rows.get(one[0], {}))
        ):
            if name in rows and "failed" not in rows[name]:
                continue
            if now() > end:
                rows.setdefault(name, {"failed": f"{_LATE} {options.minutes:g} minutes"})
                continue
            report.print_line(f"{letter}: {name} ...")
            rows[name] = {"failed": "the bench was stopped in it"}
            report.keep()
            rows[name] = _tried(function, *arguments_of)
            report.keep()
        for shown in tables({letter: json.loads(json.dumps(rows, default=_as_text))}):
            report.console.print(shown, highlight=False, markup=False)
        report.keep()
    return report.end()


def _was_begun(row: Any) -> bool:
    return "failed" in row and not row["failed"].startswith(_LATE)


Measurement = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A row's name, what measures it, and its arguments."""


def first_look(options: argparse.Namespace) -> Iterator[Measurement]:
    """Part A."""
    work = _generation("llama-7b", options, 4 if options.tiny else 64)
    few = replace(work, max_new_tokens=min(64, work.max_new_tokens))
    yield "tests", gpu_parts.gpu_tests, (options.device, 6.0)
    yield "attention, TB/s", gpu_parts.attention_rates, (options.device,)
    yield "numbers that other rows change", gpu_parts.row_invariance, (options.device,)
    yield "rollouts in a row", gpu_parts.rollouts, (few, 3 if options.tiny else 8)


def decoding(options: argparse.Namespace) -> Iterator[Measurement]:
    """Part B."""
    for name in reversed(list(GPU_ROWS)):
        for batch in options.batch:
            work = _generation(name, options, batch)
            arguments = (work, ("tandem",), options.rounds, options.bandwidth)
            yield f"{name}, batch {batch}", measure_row, arguments


def ppo_step(options: argparse.Namespace) -> Iterator[Measurement]:
    """Part C."""
    yield "tandem", measured, ("tandem", step3_work(options), options.rounds)
    yield "plain", measured, ("plain", step3_work(options), options.rounds)
    checked = Work(
        shape=SHAPES["a"],
        mode="ragged",
        num_prompts=8,
        max_new_tokens=16,
        micro_batch_tokens=1536,
        device=options.device,
    )
    yield "agreement", agreement, (checked,)


def peers(options: argparse.Namespace) -> Iterator[Measurement]:
    """Part D; each side of its own, so that one that fails takes no other with it."""
    batch = min(64, max(options.batch))
    for name in reversed(list(GPU_ROWS)):
        for kind in ("equal", "ragged"):
            work = replace(_generation(name, options, batch), ends=kind == "ragged")
            for side in PEERS[: 1 if options.tiny else None]:
                sides = ("tandem", side)
                arguments = (work, sides, options.rounds, options.bandwidth)
                yield f"{name}, batch {batch}, {kind}, {side}", measure_row, arguments


def largest(options: argparse.Namespace) -> Iterator[Measurement]:
    """Part E."""
    for name in gpu_parts.LARGEST:
        work = gpu_parts.largest_work(name, is_tiny=options.tiny, device=options.device)
        yield name, gpu_parts.largest, (work,)


def profiles(options: argparse.Namespace) -> Iterator[Measurement]:
    """Part F."""
    work = _generation("llama-7b", options, 2 if options.tiny else 64)
    few = replace(work, max_new_tokens=min(32, work.max_new_tokens))
    yield "decode step, llama-7b, batch 64", gpu_parts.profile_decode, (few,)
    yield "PPO update, opt-1.3b + opt-350m", gpu_parts.profile_step, (step3_work(options),)


def _generation(name: str, options: argparse.Namespace, batch: int) -> GenerationWork:
    """256 tokens in, 256 out."""
    row = replace(GPU_ROWS[name], device=options.device, num_prompts=batch)
    if not options.tiny:
        return row
    return replace(row, shape=tiny(row.shape), prompt_tokens=(8, 8), max_new_tokens=8)


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


PARTS: Mapping[str, Callable[[argparse.Namespace], Iterator[Measurement]]] = {
    "A": first_look,
    "B": decoding,
    "C": ppo_step,
    "D": peers,
    "E": largest,
    "F": profiles,
}


def _measured_before(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The rows of an earlier call with the same --json and sizes."""
    if options.json is None or not options.json.is_file() or options.again:
        return {}
    before = json.loads(options.json.read_text("utf-8"))
    same = before.get("options", {}).get("tiny") == options.tiny
    parts: dict[str, dict[str, Any]] = before.get("parts", {}) if same else {}
    return parts


def _as_text(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def _tried(function: Any, *arguments: Any) -> Any:
    """What the function returns in a process of its own, or why it failed."""
    try:
        return in_child(_caught, function, arguments)
    except RuntimeError as error:  # the process died
        return {"failed": str(error)}


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
    add("--parts", type=str.upper, default="".join(PARTS), help="letters, as in ABC")
    add("--minutes", type=float, default=8.0, help="per part, in which measurements may begin")
    add("--again", action="store_true", help="measure what --json already has, too")
    add("--batch", nargs="+", type=count, help="prompts side by side in part B; 16 64 128")
    add("--pairs", type=count, help="prompts of the PPO step; 64 by default")
    add("--bandwidth", type=float, help="of the GPU's memory, TB/s; measured by default")
    options = flags.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        flags.error(f"--parts must be of {''.join(PARTS)}; got {''.join(sorted(unknown))}")
    if options.device == "cuda" and not torch.cuda.is_available():
        flags.error("--device must be available; got cuda, but no GPU was found. Use --device cpu")
    if options.device == "cpu" and not options.tiny:
        flags.error("--device cpu must come with --tiny; got it alone. The shapes are a GPU's")
    options.batch = options.batch or ([2, 4] if options.tiny else list(BATCHES))
    options.pairs = options.pairs or (4 if options.tiny else 64)
    return options


if __name__ == "__main__":
    main()
