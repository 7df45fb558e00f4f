"""One table of what the batteries found: `python -m tests.battery.table FILE` after a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table


def main(path: str) -> int:
    """Print the table; 1 where the file has nothing."""
    file = Path(path)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    table = Table("test", "figures", box=box.SIMPLE, title=f"{len(lines)} batteries")
    for line in lines:
        figures = json.loads(line)
        name = figures.pop("test")
        table.add_row(name, ", ".join(f"{key} {value}" for key, value in figures.items()))
    Console().print(table)
    return 0 if lines else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
