"""The figures of the generation bench: rates, ratios, shares of the limit, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.generation_limits import real_flops
from bench.generation_work import GenerationStart, GenerationWork
from bench.harness import Cost, Ratio, ratio

Rounds = dict[str, list[dict[str, Cost]]]


def summary(
    work: GenerationWork,
    start: GenerationStart,
    lengths: Mapping[str, list[list[int]]],
    costs: Rounds,
    limit: Mapping[str, float],
) -> dict[str, dict[str, Any]]:
    """By side: median rates, Tandem's rate over the side's, and the share of the limit."""
    phase = "decode" if work.device == "cuda" else "total"
    rates: dict[str, dict[str, list[float]]] = {}
    for side, rounds in costs.items():
        tokens = [
            sum(one) - (work.num_answers if phase == "decode" else 0) for one in lengths[side]
        ]
        rates[side] = {
            clock: [n / getattr(one[phase], clock) for n, one in zip(tokens, rounds, strict=True)]
            for clock in ("wall", "cpu")
        }
    prompt_lengths = [len(row) for row in start.prompts]
    table: dict[str, dict[str, Any]] = {}
    for side, rounds in costs.items():
        row: dict[str, Any] = {
            "answer_tokens": statistics.mean(n for one in lengths[side] for n in one),
            "wall_seconds": statistics.median(one["total"].wall for one in rounds),
            "cpu_seconds": statistics.median(one["total"].cpu for one in rounds),
        }
        for clock in ("wall", "cpu"):
            row[f"tokens_per_{clock}_second"] = statistics.median(rates[side][clock])
            if "tandem" in rates:
                row[f"{clock}_ratio"] = asdict(ratio(rates["tandem"][clock], rates[side][clock]))
        if phase == "decode":
            seconds = statistics.median(one["decode"].wall for one in rounds)
            row["share_of_limit"] = limit["decode_bytes"] / seconds / limit["bytes_per_second"]
        else:
            row["share_of_limit"] = statistics.median(
                real_flops(start.model, prompt_lengths, one)
                / done["total"].cpu
                / limit["flops_per_cpu_second"]
                for one, done in zip(lengths[side], rounds, strict=True)
            )
        table[side] = row
    return table


def show(console: Console, name: str, row: dict[str, Any]) -> None:
    """One row's table, and under it the limit and the sides that could not be had."""
    work, on_gpu = row["work"], row["work"]["device"] == "cuda"
    rounds = max(len(one) for one in row["rounds"].values())
    samples = f" x {work['samples_per_prompt']}" if work["samples_per_prompt"] > 1 else ""
    table = Table(
        title=f"{name}: {work['num_prompts']} prompts{samples} of {work['prompt_tokens'][0]}-"
        f"{work['prompt_tokens'][1]} tokens, {work['dtype']}",
        caption=f"mean: tokens of an answer; rates by wall and CPU: medians of {rounds} round(s); "
        "ratio: Tandem's rate / the side's in each round, median (least-most)",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("side", no_wrap=True)
    rate = "decode/s" if on_gpu else "tokens/s"
    for heading in ("mean", rate, "ratio", "/CPU s", "ratio", "limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    for side, of in row["summary"].items():
        cells = [side, f"{of['answer_tokens']:.1f}"]
        for clock in ("wall", "cpu"):
            cells.append(f"{of[f'tokens_per_{clock}_second']:.0f}")
            shown = side != "tandem" and f"{clock}_ratio" in of
            cells.append(_short(Ratio(**of[f"{clock}_ratio"])) if shown else "")
        table.add_row(*cells, f"{of['share_of_limit']:.0%}")
    console.print(table)
    if on_gpu:
        console.print(f"limit: {row['limit']['bytes_per_second'] / 1e12:.2f} TB/s", style="dim")
    else:
        rate_here = row["limit"]["flops_per_cpu_second"] / 1e9
        console.print(f"limit: {rate_here:.0f} GFLOP per CPU second", style="dim")
    for side, reason in row["absent"].items():
        console.print(f"{side} is unavailable: {reason}", style="dim", soft_wrap=True)


def _short(found: Ratio) -> str:
    """Three digits, so that two ratios stand in a line."""
    digits = 2 if found.most < 10 else 1
    return f"{found.median:.{digits}f} ({found.least:.{digits}f}-{found.most:.{digits}f})"
