"""What the page reads of a run's folder: its routes, below `/api`."""

from __future__ import annotations

from pathlib import Path

from starlette.routing import Route


def routes(folder: Path) -> list[Route]:
    """The page's own routes over a run's folder, or a folder of runs; none yet."""
    return []
