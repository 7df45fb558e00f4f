"""Generation, Tandem beside Hugging Face: useful tokens per second, alternating in one run.

    python bench/generation.py --rows llama-2.2m-fp32 llama-22m-fp32 --rounds 7 --json made.json

bench/README.md says what is the same for all sides and how to read the tables.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.generation_limits import copy_bandwidth, decode_bytes, gemm_rate
from bench.generation_same import agreement, require_same_lengths, require_whole
from bench.generation_sides import SIDES, Answers, Side, make_side
from bench.generation_table import Rounds, show, summary
from bench.generation_work import (
    CPU_ROWS,
    GPU_ROWS,
    GenerationStart,
    GenerationWork,
    generation_start,
)
from bench.harness import Cost, Stopwatch, alternate, facts
from tandem.engine.allocator import keep_freed_memory


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Check and measure row by row, show each; returns what --json writes."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    kept = keep_freed_memory() if options.keep_freed_memory else False
    console = Console()
    result = {**facts(), "keeps_freed_memory": kept, "rows": {}}
    for name, work in _rows(options).items():
        console.print(f"{name} ...", style="dim")
        row = measure_row(work, options)
        result["rows"][name] = row
        show(console, name, row)
        if options.json:  # after every row: a long run that is stopped keeps what it has
            options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    machine, versions = result["machine"], result["versions"]
    console.print(
        f"{machine['gpu'] if options.device == 'cuda' else machine['cpu']}, {result['threads']} of "
        f"{machine['cores']} cores, load {machine['load_average'][0]:.1f}; torch "
        f"{versions['torch']}, transformers {versions['transformers']}; commit "
        f"{result['commit'][:12] or 'unknown'}"
        f"{' with changes' if result['uncommitted_changes'] else ''}"
    )
    return result


def measure_row(work: GenerationWork, options: argparse.Namespace) -> dict[str, Any]:
    """Check, warm up and measure one row; all that is known of it."""
    start = generation_start(work)
    apart = agreement(work, start)
    sides, absent = _ready(work, start, options)
    lengths, costs = measure(work, sides, options.rounds)
    if work.ends:
        require_same_lengths(lengths)
    limit = _limit(work, start, options)
    row = {
        "work": asdict(work),
        "apart": apart,
        "absent": absent,
        "limit": limit,
        "rounds": {
            side: [
                {"tokens": sum(tokens), **{phase: asdict(cost) for phase, cost in one.items()}}
                for tokens, one in zip(lengths[side], costs[side], strict=True)
            ]
            for side in sides
        },
        "summary": summary(work, start, lengths, costs, limit),
    }
    sides.clear()
    del start
    gc.collect()
    if work.device == "cuda":
        torch.cuda.empty_cache()
    return row


def _ready(
    work: GenerationWork, start: GenerationStart, options: argparse.Namespace
) -> tuple[dict[str, Side], dict[str, str]]:
    """The sides, each run once; and why others cannot be had with this transformers or machine."""
    sides, absent = {}, {}
    for name in options.sides:
        try:
            side = make_side(name, work, start, options.slots)
            _step(work, side, 0)
        except Exception as error:
            if name in ("tandem", "hf"):
                raise
            reason = str(error).strip().partition("\n")[0]
            absent[name] = f"{type(error).__name__}: {reason}"
            continue
        sides[name] = side
    return sides, absent


def _step(work: GenerationWork, side: Side, number: int) -> tuple[Answers, dict[str, Cost]]:
    """One timed answer to all prompts; on a GPU also, before it, of one token each."""
    watch = Stopwatch()
    if work.device == "cuda":
        with watch("evaluate"):
            side.generate(number, 1)
        prefill = watch.take()["total"]
    with watch("generate"):
        output = side.generate(number, work.max_new_tokens)
    costs = {"total": watch.take()["total"]}
    if work.device == "cuda":
        total = costs["total"]
        costs["prefill"] = prefill
        costs["decode"] = Cost(total.wall - prefill.wall, total.cpu - prefill.cpu)
    answers = side.answers(output)
    require_whole(work, answers)
    return answers, costs


def measure(
    work: GenerationWork, sides: Mapping[str, Side], rounds: int
) -> tuple[dict[str, list[list[int]]], Rounds]:
    """Tokens of each answer and costs, by side and round; every round draws anew."""
    lengths: dict[str, list[list[int]]] = {name: [] for name in sides}

    def steps_of(name: str) -> Callable[[], dict[str, Cost]]:
        def step() -> dict[str, Cost]:
            answers, costs = _step(work, sides[name], len(lengths[name]) + 1)
            lengths[name].append([len(answer) for answer in answers])
            return costs

        return step

    return lengths, alternate({name: steps_of(name) for name in sides}, rounds)


def _limit(
    work: GenerationWork, start: GenerationStart, options: argparse.Namespace
) -> dict[str, float]:
    """What the machine can do at best, in the row's type."""
    if work.device == "cuda":
        bandwidth = options.bandwidth * 1e12 if options.bandwidth else copy_bandwidth("cuda")
        return {
            "bytes_per_second": bandwidth,
            "decode_bytes": decode_bytes(start.model, work),
        }
    return {"flops_per_cpu_second": gemm_rate(work.dtype)}


def _rows(options: argparse.Namespace) -> dict[str, GenerationWork]:
    known = GPU_ROWS if options.device == "cuda" else CPU_ROWS
    rows = {name: known[name] for name in options.rows or known}
    if options.device == "cuda":
        return {
            f"{name}-batch-{batch}": replace(work, num_prompts=batch)
            for name, work in rows.items()
            for batch in options.batch
        }
    if options.model:
        rows = {
            name: replace(work, folder=str(options.model)) if "stories260k" in name else work
            for name, work in rows.items()
        }
    return rows


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--rows", nargs="+", metavar="ROW", help=", ".join((*CPU_ROWS, *GPU_ROWS)))
    default = [side for side in SIDES if side != "hf-compile"]  # it compiles for minutes
    add("--sides", nargs="+", choices=SIDES, default=default)
    add("--rounds", type=_count, default=5, help="answers of each side that are measured")
    add("--threads", type=_count, default=1, help="of torch, for all sides")
    add("--slots", type=_count, default=0, help="answers side by side in Tandem; all by default")
    add("--model", type=Path, help="folder of the real stories260K, for its two rows")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--batch", nargs="+", type=_count, default=[8, 32, 128, 512], help="prompts, on a GPU")
    add("--bandwidth", type=float, help="of the GPU's memory, TB/s; measured by default")
    add(
        "--default-allocator",
        dest="keep_freed_memory",
        action="store_false",
        help="leave the C library's allocator as it is, for all sides",
    )
    add("--json", type=Path, help="write everything there too")
    options = parser.parse_args(arguments)
    known = GPU_ROWS if options.device == "cuda" else CPU_ROWS
    for name in options.rows or ():
        if name not in known:
            parser.error(f"--rows must be of {', '.join(known)}; got {name}")
    return options


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    main()
