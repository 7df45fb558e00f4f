"""Files of one JSON value a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_jsonl(path: Path, rows: Iterable[Any]) -> str:
    """The file's name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_jsonl(path: str | Path) -> list[Any]:
    """Every line's value."""
    return [json.loads(line) for line in Path(path).read_bytes().splitlines()]
