"""One step of PPO, Tandem beside a plain Hugging Face loop: the same work, alternating in one run.

    python bench/step3.py --shape a --mode ragged --rounds 7 --json step3.json

bench/README.md says what is the same on both sides and how to read the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import MEGABYTE, Cost, Ratio, alternate, facts, in_child, ratio
from bench.same import agreement, require_same_work
from bench.sides import Done, PlainSide, TandemSide, held_lengths, peak_memory
from bench.work import MICRO_BATCH_TOKENS, SHAPES, TANDEM_MICRO_BATCH_TOKENS, Work, start
from tandem.engine.allocator import keep_freed_memory

PHASES = ("generate", "score", "train", "total")
Rounds = dict[str, list[dict[str, Cost]]]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Check, measure, show; returns what --json writes."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    # As `tandem train` does; both sides share the process, so neither wins by it.
    kept = keep_freed_memory() if options.keep_freed_memory else False
    work = Work(
        shape=SHAPES[options.shape],
        mode=options.mode,
        epochs=options.epochs,
        minibatch_size=options.minibatch_size,
        micro_batch_tokens=options.micro_batch_tokens or MICRO_BATCH_TOKENS[options.shape],
        tandem_micro_batch_tokens=(
            options.micro_batch_tokens or TANDEM_MICRO_BATCH_TOKENS[options.shape]
        ),
        dtype=options.dtype,
        device=options.device,
    )
    console = Console()
    console.print("checking that both sides compute the same ...", style="dim")
    apart = agreement(work)
    console.print(f"they do: at most {max(apart.values()):.1e} apart", style="dim")
    lengths, costs = measure(work, options.rounds)
    memory = {}
    if options.memory:
        for side in ("tandem", "plain"):
            memory[side] = in_child(
                peak_memory, side, work, lengths, options.threads, options.keep_freed_memory
            )
    answer_tokens = [min(n, work.max_new_tokens) for n in lengths]
    result = {
        **facts(),
        "keeps_freed_memory": kept,
        "work": {**asdict(work), "name": options.shape, "answer_tokens": answer_tokens},
        "apart": apart,
        "rounds": {
            side: [{phase: asdict(cost) for phase, cost in one.items()} for one in rounds]
            for side, rounds in costs.items()
        },
        "summary": summary(work, answer_tokens, costs),
        "memory_bytes": memory,
    }
    show(console, result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def measure(work: Work, rounds: int) -> tuple[tuple[int, ...], Rounds]:
    """Lengths that the plain loop was held to, and the costs of `rounds` steps of each side.

    One step of each side goes before, unmeasured. Every measured step is checked for the same work.
    """
    begin = start(work)
    tandem = TandemSide(work, begin)
    lengths = held_lengths(work, tandem.make())
    plain = PlainSide(work, begin, lengths)
    first: Done = tandem.step()[0]
    plain.step()

    def step(side: TandemSide | PlainSide) -> dict[str, Cost]:
        done, cost = side.step()
        require_same_work(work, first, done)
        return cost

    sides = {"tandem": lambda: step(tandem), "plain": lambda: step(plain)}
    return lengths, alternate(sides, rounds)


def summary(work: Work, answer_tokens: Sequence[int], costs: Rounds) -> dict[str, dict[str, Any]]:
    """By phase: each side's median seconds and rates, and the plain loop's cost over Tandem's.

    tokens: those sampled (generate, total), or prompts and answers as often as they are read
    (score: once; train: once an epoch).
    """
    sampled = sum(answer_tokens)
    prompts = work.prompt_tokens
    whole = sampled + sum(prompts[i % len(prompts)] for i in range(work.num_prompts))
    tokens = {"generate": sampled, "score": whole, "train": whole * work.epochs, "total": sampled}
    table: dict[str, dict[str, Any]] = {}
    for phase in PHASES:
        row: dict[str, Any] = {}
        for side, rounds in costs.items():
            wall = statistics.median(one[phase].wall for one in rounds)
            row[side] = {
                "wall_seconds": wall,
                "cpu_seconds": statistics.median(one[phase].cpu for one in rounds),
                "tokens_per_second": tokens[phase] / wall,
                "samples_per_second": work.num_prompts / wall,
            }
        for clock in ("wall", "cpu"):
            plain, tandem = (
                [getattr(one[phase], clock) for one in costs[side]] for side in ("plain", "tandem")
            )
            row[f"{clock}_ratio"] = asdict(ratio(plain, tandem))
        table[phase] = row
    return table


def show(console: Console, result: dict[str, Any]) -> None:
    """The table, and under it what was measured where."""
    work, rounds = result["work"], len(result["rounds"]["tandem"])
    table = Table(
        title=f"one PPO step: Llama {work['name']}, {work['mode']}, {work['dtype']}, "
        f"{work['num_prompts']} answers of {statistics.mean(work['answer_tokens']):.1f} tokens",
        caption=f"medians of {rounds} round(s); ratio: plain / Tandem of each round, median "
        "(least-most); over 1 Tandem is faster",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("phase", no_wrap=True)
    table.add_column("side", no_wrap=True)
    for name in ("wall s", "CPU s", "tokens/s", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase, row in result["summary"].items():
        for side in ("tandem", "plain"):
            of = row[side]
            table.add_row(
                phase if side == "tandem" else "",
                side,
                f"{of['wall_seconds']:.3f}",
                f"{of['cpu_seconds']:.3f}",
                f"{of['tokens_per_second']:.0f}",
                f"{of['samples_per_second']:.1f}",
            )
        ratios = [str(Ratio(**row[f"{clock}_ratio"])) for clock in ("wall", "cpu")]
        table.add_row("", "ratio", *ratios, style="bold", end_section=True)
    console.print(table)
    for side, memory in result["memory_bytes"].items():
        console.print(
            f"peak memory, {side}: {memory['peak'] / MEGABYTE:.0f} MB "
            f"({memory['before'] / MEGABYTE:.0f} MB before the first step)"
        )
    machine, versions = result["machine"], result["versions"]
    console.print(
        f"{machine['gpu'] if work['device'] == 'cuda' else machine['cpu']}, "
        f"{result['threads']} of {machine['cores']} cores, load {machine['load_average'][0]:.1f}; "
        f"torch {versions['torch']}, transformers "
        f"{versions['transformers']}; commit {result['commit'][:12] or 'unknown'}"
        f"{' with changes' if result['uncommitted_changes'] else ''}"
    )
    console.print(result["command"], style="dim", soft_wrap=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="a", help="a: 0.94M, b: 15.2M parameters")
    add("--mode", choices=("forced", "ragged"), default="forced", help="lengths of the answers")
    add("--rounds", type=_count, default=5, help="steps of each side that are measured")
    add("--threads", type=_count, default=1, help="of torch, for both sides")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="compute type")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--epochs", type=_count, default=1, help="passes over the rollout")
    add("--minibatch-size", type=_count, default=64, help="answers per optimizer step")
    add("--micro-batch-tokens", type=_count, help="padded tokens per forward, for both sides")
    add(
        "--default-allocator",
        dest="keep_freed_memory",
        action="store_false",
        help="leave the C library's allocator as it is, for both sides",
    )
    add("--no-memory", dest="memory", action="store_false", help="leave out the peak memory")
    add("--json", type=Path, help="write everything there too")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


if __name__ == "__main__":
    main()
