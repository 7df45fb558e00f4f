"""Whether a folder was finished and is as it was written."""

from __future__ import annotations

from pathlib import Path

from tandem.checkpoint.folder import read_facts
from tandem.errors import CheckpointError


def is_whole(folder: Path) -> bool:
    """Whether its manifest holds, and every file in it."""
    try:
        read_facts(folder)
    except CheckpointError:
        return False
    return True
