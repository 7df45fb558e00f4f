"""The figures of the training benches: rates and ratios by side, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.harness import Cost, Ratio, ratio


def summary(
    tokens: int, costs: Mapping[str, Sequence[Mapping[str, Cost]]]
) -> dict[str, dict[str, Any]]:
    """By side: median seconds, real tokens per second, and its cost over Tandem's by round.

    tokens: real ones that every side reads in a round; padding never counts.
    """
    table: dict[str, dict[str, Any]] = {}
    for side, rounds in costs.items():
        row: dict[str, Any] = {}
        for clock in ("wall", "cpu"):
            ours, theirs = (
                [getattr(one["total"], clock) for one in of] for of in (costs["tandem"], rounds)
            )
            row[f"{clock}_seconds"] = statistics.median(theirs)
            row[f"tokens_per_{clock}_second"] = tokens / row[f"{clock}_seconds"]
            row[f"{clock}_ratio"] = asdict(ratio(theirs, ours))
        table[side] = row
    return table


def show(console: Console, title: str, row: Mapping[str, Any]) -> None:
    """The table of one row of a training bench."""
    rounds = len(row["rounds"]["tandem"])
    apart = max(row["apart"].values())
    table = Table(
        title=title,
        caption=f"{row['tokens']} real tokens, micro-batches of {row['micro_batch_tokens']}, "
        f"padding {row['padding']:.2f}x; at most {apart:.1e} apart; medians of {rounds} round(s); "
        "ratio: the side's cost / Tandem's in each round, median (least-most)",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("side", no_wrap=True)
    for heading in ("wall s", "CPU s", "tokens/s", "ratio", "CPU ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for side, of in row["summary"].items():
        ratios = [str(Ratio(**of[f"{clock}_ratio"])) for clock in ("wall", "cpu")]
        table.add_row(
            side,
            f"{of['wall_seconds']:.3f}",
            f"{of['cpu_seconds']:.3f}",
            f"{of['tokens_per_wall_second']:.0f}",
            *(ratios if side != "tandem" else ("", "")),
        )
    console.print(table)
