"""Which ranks see one output folder, tested with files in it before the first step."""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tandem.errors import CheckpointError
from tandem.files import existing
from tandem.parallel.world import World


def find_folders(path: Path, world: World) -> World:
    """The world with the `keepers` of an output folder, which need not exist yet.

    Every rank writes a file there and looks for the others'. A collective.

    Raises:
        CheckpointError: a rank cannot write there.
    """
    if world.size == 1:
        return world
    token = world.all_gather_object(secrets.token_hex(8))[0]
    folder = existing(path) / f".tandem-{token}"
    problem = ""
    try:
        folder.mkdir(exist_ok=True)
        (folder / str(world.rank)).touch()
    except OSError as error:
        problem = (
            f"--output-dir must be a folder that can be written; got {path} on "
            f"{socket.gethostname()} ({error.strerror}). Choose another."
        )
    try:
        problems = [text for text in world.all_gather_object(problem) if text]
        if problems:
            raise CheckpointError(problems[0])
        seen = min(int(file.name) for file in folder.iterdir())
        keepers = world.all_gather_object(seen)
    finally:
        if world.rank == 0 or not (folder / "0").exists():
            shutil.rmtree(folder, ignore_errors=True)
    return replace(world, keepers=() if set(keepers) == {0} else tuple(keepers))


def described(path: Path, world: World) -> str:
    """One line on several output folders; empty if all ranks see one. A collective."""
    hosts = world.all_gather_object(socket.gethostname())
    if len(world.folders) == 1:
        return ""
    found = "; ".join(
        f"ranks {_numbers(world.seeing(keeper))} on {hosts[keeper]}" for keeper in world.folders
    )
    return (
        f"no file system is shared: {path} is {len(world.folders)} folders ({found}). Each keeps "
        "the part of a checkpoint that its ranks wrote: continue on the same nodes, or copy their "
        "checkpoints into one folder. Finished models are copied to all; metrics, samples and the "
        f"report are on {hosts[0]}."
    )


def _numbers(ranks: Sequence[int]) -> str:
    """`first-last` for consecutive numbers."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
