"""What every bench asks for and hands over: shared flags, facts beside figures, tables, JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from tandem import processor
from tandem.engine.allocator import keep_freed_memory

ROOT = Path(__file__).resolve().parents[1]


def count(text: str) -> int:
    """A flag's number that must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


SHARED: Mapping[str, Mapping[str, Any]] = {
    "rounds": {"type": count, "default": 5, "help": "measurements of each side, after one before"},
    "threads": {"type": count, "default": 1, "help": "of torch, for all sides"},
    "dtype": {"choices": ("fp32", "bf16"), "default": "fp32", "help": "compute type"},
    "device": {"choices": ("cpu", "cuda"), "default": "cpu"},
    "micro-batch-tokens": {"type": count, "help": "padded tokens per forward, for all sides"},
    "default-allocator": {
        "dest": "keep_freed_memory",
        "action": "store_false",
        "help": "leave the C library's allocator as it is, for all sides",
    },
    "knobs": {
        "nargs": "*",
        "default": [],
        "metavar": "NAME=VALUE",
        "help": "of tandem train, as in lora.rank=8",
    },
    "tiny": {"action": "store_true", "help": "tiny models and little work: does all of it run?"},
    "json": {"type": Path, "help": "write everything there too"},
}
"""Flags that mean the same in every bench that has them."""


def parser(description: str | None, shared: str) -> argparse.ArgumentParser:
    """A bench's parser with the `shared` flags, names with blanks between; all have --tiny, --json.

    Args:
        description: the bench's docstring, whose first line is shown.
    """
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    for name in (*shared.split(), "tiny", "json"):
        made.add_argument(f"--{name}", **SHARED[name])
    return made


class Report:
    """A bench's result as it grows: shown on the console, and kept in the file of --json.

    result: facts first, then whatever the bench puts in.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """Sets torch's threads and the allocator where the bench has flags for them."""
        self.console = Console(width=None if sys.stdout.isatty() else 120)
        self.result: dict[str, Any] = {}
        self._file: Path | None = options.json
        if "threads" in options:
            torch.set_num_threads(options.threads)
        if "keep_freed_memory" in options:
            # As `tandem train` does; all sides share the process, so none wins by it.
            kept = keep_freed_memory() if options.keep_freed_memory else False
            self.result["keeps_freed_memory"] = kept
        self.result |= {**facts(), "options": vars(options)}

    def print_line(self, line: str) -> None:
        """A line on what is going on."""
        self.console.print(line, style="dim", highlight=False, soft_wrap=True)

    def keep(self) -> None:
        """Write what there is; after every row, for a long run that is stopped keeps it then."""
        if self._file:
            text = json.dumps(self.result, indent=2, default=_plain)
            self._file.write_text(text + "\n", encoding="utf-8")

    def end(self) -> dict[str, Any]:
        """Show where this was measured, write it all, return it."""
        result, machine = self.result, self.result["machine"]
        versions, device = result["versions"], result["options"].get("device")
        where = machine["gpu" if device == "cuda" else "cpu"]
        commit = f"{result['commit'][:12] or 'unknown'}"
        commit += " with changes" if result["uncommitted_changes"] else ""
        self.print_line(
            f"{where}, {result['threads']} of {machine['cores']} cores, load "
            f"{machine['load_average'][0]:.1f}; torch {versions['torch']}, transformers "
            f"{versions['transformers']}; commit {commit}\n{result['command']}"
        )
        self.keep()
        return self.result


def _plain(value: Any) -> Any:
    """Dataclasses as objects, all else that JSON has not (paths, types) as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)


def table(
    title: str, caption: str, left: Sequence[str], right: Sequence[str], rows: Iterable[Any]
) -> Table:
    """A table of text: columns aligned on the left, then those of figures on the right."""
    made = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for name in (*left, *right):
        made.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def sides_table(
    title: str,
    caption: str,
    groups: Mapping[str, Mapping[str, Mapping[str, Any]]],
    group: str,
    more: Mapping[str, Callable[[Mapping[str, Any]], str]] | None = None,
) -> Table:
    """What `harness.compare` found, group by group (phases, models) and side by side.

    Args:
        group: heading of the groups' column.
        more: further columns, made of a side's figures.
    """
    more = more or {}
    rows = []
    for name, sides in groups.items():
        for number, (side, of) in enumerate(sides.items()):
            shown = ("wall_ratio", "cpu_ratio") if side != "tandem" else ()
            ratios = [str(of.get(key, "")) for key in shown] or ["", ""]
            rows.append(
                (
                    "" if number else name,
                    side,
                    f"{of['wall_seconds']:.3f}",
                    f"{of['cpu_seconds']:.3f}",
                    f"{of['tokens_per_wall_second']:.0f}",
                    f"{of['tokens_per_cpu_second']:.0f}",
                    *ratios,
                    *(column(of) for column in more.values()),
                )
            )
    right = ("wall s", "CPU s", "tokens/s", "/CPU s", "ratio", "CPU ratio", *more)
    caption += "; medians; ratio: the side's cost of a token / Tandem's by round (least-most)"
    return table(title, caption, (group, "side"), right, rows)


def facts() -> dict[str, Any]:
    """Machine, versions, command, commit and load: what a figure needs beside it."""
    cuda = torch.cuda.is_available()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "machine": {
            "cpu": processor.kind(),
            "cores": os.cpu_count(),
            "cores_allowed": len(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
            "gpu": torch.cuda.get_device_name() if cuda else None,
            "platform": platform.platform(),
            "load_average": os.getloadavg(),
        },
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "allocator": {
            name: value
            for name, value in os.environ.items()
            if name == "LD_PRELOAD" or name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
        },
    }


def _git(*arguments: str) -> str:
    """What git says, or nothing where the bench is not in a repository."""
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
