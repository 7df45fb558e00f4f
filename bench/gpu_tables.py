"""The JSON of bench/gpu.py as the Markdown rows of docs/benchmarks.md.

python bench/gpu_tables.py bench-gpu.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Mapping[str, Any]

GOALS = {
    "llama-7b, batch 16": 0.75,
    "llama-7b, batch 64": 0.80,
    "llama-7b, batch 128": 0.80,
    "opt-1.3b, batch 16": 0.65,
    "opt-1.3b, batch 64": 0.78,
    "opt-1.3b, batch 128": 0.80,
}
"""Shares of the bandwidth's limit to reach in decoding."""
PAIRS_GOAL = 25.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables of a file, with what they were measured on."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("file", type=Path)
    result = json.loads(flags.parse_args(arguments).file.read_text("utf-8"))
    machine, versions = result["machine"], result["versions"]
    print(
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, commit {result['commit'][:12]}."
    )
    if result["options"]["tiny"]:
        print("\nTiny shapes: this shows that the bench runs, and no figure of it means anything.")
    for table in tables(result["parts"]):
        print(f"\n{table}")


def tables(parts: Mapping[str, Rows]) -> Iterator[str]:
    """The tables of the parts that were measured, in order; rows that failed say why."""
    for letter, make in MAKERS.items():
        if letter in parts:
            yield from make(parts[letter])


def markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table under its title."""
    lines = [f"**{title}**", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _split(rows: Rows) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Rows with figures, and the reasons of the others."""
    failed = {
        name: row["failed"]
        for name, row in rows.items()
        if isinstance(row, dict) and "failed" in row
    }
    return {n: row for n, row in rows.items() if n not in failed}, list(failed.items())


def _first_look(rows: Rows) -> Iterator[str]:
    found, failed = _split(rows)
    lines = []
    for name, of in found.items():
        if name == "tests":
            lines.append((name, f"{of['summary'][-1]} in {of['seconds']:.0f} s"))
            lines += [("", line) for line in of["summary"][:-1]]
        elif isinstance(of, list):
            lines.append((name, ", ".join(f"{one['seconds']:.2f} s" for one in of)))
            if "reserved_bytes" in of[0]:
                sizes = ", ".join(f"{one['reserved_bytes'] / 1e9:.1f}" for one in of)
                lines.append(("reserved, GB", sizes))
                graphs = ", ".join(
                    f"{one['recordings']} in {one['recording_seconds']:.2f} s" for one in of
                )
                lines.append(("graphs recorded so far", graphs))
        else:
            lines += [(f"{name}: {case}", f"{value:.3g}") for case, value in of.items()]
    yield markdown("A. First look", ("what", "result"), [*lines, *failed])


def _decoding(rows: Rows) -> Iterator[str]:
    found, failed = _split(rows)
    lines = []
    for name, row in found.items():
        of, goal = row["summary"]["tandem"], GOALS.get(name)
        share = of.get("share_of_limit", 0.0)
        lines.append(
            (
                name,
                f"{of['tokens_per_wall_second']:.0f}",
                f"{share:.0%}",
                f"{goal:.0%}" if goal else "",
            )
        )
    head = ("work", "tokens/s", "share of the limit", "goal")
    yield markdown("B. Decoding", head, [*lines, *((n, why, "", "") for n, why in failed)])


def _ppo_step(rows: Rows) -> Iterator[str]:
    found, failed = _split(rows)
    lines = []
    for name in ("tandem", "plain"):
        if name not in found:
            continue
        of, goal = found[name], f"{PAIRS_GOAL:g}" if name == "tandem" else ""
        switch = f"{of['switch']['seconds'] * 1000:.1f} ms" if "switch" in of else ""
        lines.append(
            (
                name,
                f"{of['pairs_per_second']:.2f}",
                goal,
                f"{of['step_seconds']:.2f}",
                f"{of['peak_bytes'] / 1e9:.1f}",
                switch,
            )
        )
    head = ("side", "pairs/s", "goal", "seconds a step", "peak, GB", "switching modes")
    title = "C. PPO step, 64 x (256 + 256)"
    yield markdown(title, head, [*lines, *((n, why, "", "", "", "") for n, why in failed)])
    if "agreement" in found:
        rows_of = [(name, f"{apart:.2g}") for name, apart in found["agreement"].items()]
        yield markdown(
            "The same step by both sides, apart (relative)", ("number", "apart"), rows_of
        )


def _peers(rows: Rows) -> Iterator[str]:
    found, failed = _split(rows)
    lines = []
    for name, row in found.items():
        side = next((side for side in row["summary"] if side != "tandem"), None)
        if side is None:
            reasons = "; ".join(row["absent"].values())
            lines.append(
                (name, f"{row['summary']['tandem']['tokens_per_wall_second']:.0f}", reasons, "")
            )
            continue
        ours, theirs = row["summary"]["tandem"], row["summary"][side]
        own, other = (f"{of['tokens_per_wall_second']:.0f}" for of in (ours, theirs))
        lines.append((name, own, other, f"{theirs['wall_ratio']['median']:.2f}"))
    head = ("work", "Tandem, tokens/s", "the other, tokens/s", "ratio")
    yield markdown(
        "D. Beside Hugging Face", head, [*lines, *((n, why, "", "") for n, why in failed)]
    )


def _largest(rows: Rows) -> Iterator[str]:
    found, failed = _split(rows)
    lines = [
        (
            name,
            f"{of['actor_parameters'] / 1e9:.2f}",
            f"{of['step_seconds']:.1f}",
            f"{of['peak_bytes'] / 1e9:.1f}",
            f"{of['host_bytes'] / 1e9:.1f}",
        )
        for name, of in found.items()
    ]
    head = ("what", "actor, billion weights", "seconds a step", "peak on the GPU, GB", "host, GB")
    yield markdown("E. Largest", head, [*lines, *((n, why, "", "", "") for n, why in failed)])


def _profiles(rows: Rows) -> Iterator[str]:
    found, failed = _split(rows)
    for name, of in found.items():
        lines = [
            (line["name"], f"{line['calls']:.1f}", f"{line['us']:.0f}", f"{line['share']:.1%}")
            for line in of
        ]
        yield markdown(f"F. {name}", ("operation", "calls", "microseconds", "share"), lines)
    if failed:
        yield markdown("F. not profiled", ("what", "why"), failed)


MAKERS = {
    "A": _first_look,
    "B": _decoding,
    "C": _ppo_step,
    "D": _peers,
    "E": _largest,
    "F": _profiles,
}


if __name__ == "__main__":
    main()
