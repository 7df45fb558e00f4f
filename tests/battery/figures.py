"""What a battery found: one line on the screen, and one in the file that TANDEM_BATTERY names."""

from __future__ import annotations

import json
import os
from pathlib import Path

FAILED = "FAILED"
"""Among a test's figures: why it failed."""


def record(test: str, **figures: object) -> None:
    """Show and keep a battery's figures (seeds, counts, seconds)."""
    line = {"test": test, **figures}
    print(", ".join(f"{name} {value}" for name, value in line.items()))
    if os.environ.get("TANDEM_BATTERY"):
        with Path(os.environ["TANDEM_BATTERY"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
