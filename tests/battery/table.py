"""One table of what the batteries found: `python -m tests.battery.table FILE` after a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tests.battery.figures import FAILED


def main(path: str) -> int:
    """Print the table, what failed last; 1 where something did, or the file has nothing."""
    file = Path(path)
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    lines = sorted(map(json.loads, text.splitlines()), key=lambda line: FAILED in line)
    failed = [line for line in lines if FAILED in line]
    title = f"{len(lines) - len(failed)} batteries held, {len(failed)} tests failed"
    table = Table("test", "figures", box=box.SIMPLE, title=title)
    for figures in lines:
        name = figures.pop("test")
        table.add_row(name, ", ".join(f"{key} {value}" for key, value in figures.items()))
    Console().print(table)
    return 0 if lines and not failed else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
