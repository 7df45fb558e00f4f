"""Which folders a run may write in: new ones, empty ones, and its own."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from tandem.checkpoint.folder import together
from tandem.config.load import load_config
from tandem.config.schema import RunConfig
from tandem.config.stages import stage_names
from tandem.data.chat.own_template import with_kept_template
from tandem.errors import CheckpointError
from tandem.files import existing, lock, not_a_run
from tandem.parallel.world import World
from tandem.text import visible

SAVE_NOW = "save-now"
"""A file of this name in the run's folder asks for a checkpoint after the running step."""
CHECKPOINTS = "checkpoints"
COMMAND_FILE = "command.txt"
"""The first file that is written into a run's folder; it identifies one."""
LOCK_FILE = ".lock"
"""Locked by the process that writes into the folder, with its host and number as text."""
GIVEN = "given"
"""Where data and models that Python code has given a run are kept."""


def config_of_run(folder: str) -> RunConfig:
    """The configuration that a run was made with; its `output_dir` is where the folder lies now.

    Raises:
        CheckpointError: the folder is not a run's.
    """
    path = Path(folder)
    if not (path / "config.yaml").is_file():
        raise CheckpointError(not_a_run(folder))
    config = with_kept_template(load_config(path / "config.yaml"), path)
    return replace(config, output_dir=folder)


def on_these_ranks(config: RunConfig, world: World) -> RunConfig:
    """The same run, to be read on ranks that need not be as many as its own: copies (replicas) and
    slices for generation that these ranks cannot have are 1. Figures differ by rounding."""
    parallel = config.parallel
    replicas, slices = parallel.replicas, parallel.inference_tp_size
    pieces, node = world.size // replicas, world.ranks_per_node
    if world.size % replicas or pieces == 1 or (node % pieces and pieces % node):
        replicas, pieces = 1, world.size
    if pieces % slices or node % slices:
        slices = 1
    return replace(config, parallel=replace(parallel, replicas=replicas, inference_tp_size=slices))


def names_data(config: RunConfig) -> bool:
    """Whether a run's data can be read again; else only its program has them."""
    return bool(config.data or config.sft_data)


def require_data(config: RunConfig, what: str) -> None:
    """Refuse a run whose prompts only its program has, for what reads its data again.

    Args:
        what: that would be done with the run.
    Raises:
        CheckpointError: it names no data.
    """
    if not names_data(config):
        raise CheckpointError(
            f"{config.output_dir} must name its data to be {what}; got a run without any, whose "
            "prompts came from a program. Repeat or evaluate it there, or evaluate its models on "
            "rows of a file (tandem eval --data FILE)."
        )


def run_around(path: Path) -> Path | None:
    """The run's folder that a path is, or is in; None if there is none."""
    path = path.resolve()
    for outer in (path, *path.parents):
        if (outer / COMMAND_FILE).exists() and (outer / "config.yaml").exists():
            return outer
    return None


def hold(path: Path) -> BinaryIO:
    """Lock the run's folder for this process until the file is closed: two runs would mix their
    lines and remove each other's checkpoints.

    Raises:
        CheckpointError: another process, on this host or another, writes there.
        OSError: nothing can be written there.
    """
    found = lock(path / LOCK_FILE)
    if found is None:
        holder = ""
        with suppress(OSError):  # it has ended meanwhile
            holder = (path / LOCK_FILE).read_text("utf-8", "replace").strip()
        by = f" ({visible(holder)})" if holder else ""
        raise CheckpointError(
            f"{path} must be written by one run at a time; got another that is running in it{by}. "
            "Wait until it ends, or use another --output-dir."
        )
    found.truncate(0)
    found.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return found


def not_writable(path: Path, reason: str) -> CheckpointError:
    """The error for a run's folder in which nothing can be written."""
    return CheckpointError(
        f"--output-dir must be a folder that can be written; got {path} ({reason}). Choose another."
    )


def require_held(held: BinaryIO | None, path: Path, world: World) -> None:
    """Refuse to write into a folder that is no longer the one that `hold` was given, for what is
    left of the run would make half of one; all ranks together. One that was moved and is back is
    the same.

    Args:
        held: of the ranks that keep the folder; None on others.
    Raises:
        CheckpointError: it was removed, moved or replaced, or its file system fails.
    """

    def check() -> None:
        if held is not None and not _is_held(held, path):
            where = f"{path} on {socket.gethostname()}" if len(world.folders) > 1 else str(path)
            raise CheckpointError(
                f"{where} must stay where it is until the run ends; got a run whose folder, or "
                f"{LOCK_FILE} in it, was removed, moved or replaced meanwhile. It ends here; the "
                "same command continues what is there."
            )

    together(check, path, world)


def _is_held(held: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(held.fileno()), os.stat(path / LOCK_FILE))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            return False
        raise


def require_run_folder(path: Path, writes: bool = True) -> None:
    """Refuse a folder that is not a run's, before anything is written there.

    Args:
        writes: this process will write there.
    Raises:
        CheckpointError: it is inside another run's folder, holds other things, of which the message
            names one, or is no folder that this process can write in.
    """
    try:
        if path.is_symlink() and not path.exists():
            raise not_writable(path, "a link to what is not there")
        above = existing(path)
        is_folder = above.is_dir()
    except OSError as error:
        raise not_writable(path, str(error.strerror)) from None
    if not is_folder:
        raise not_writable(path, f"{above} is a file")
    effective = os.access in os.supports_effective_ids
    if writes and not os.access(above, os.W_OK | os.X_OK, effective_ids=effective):
        raise not_writable(path, f"nothing can be written in {above}")
    if (path / COMMAND_FILE).exists():
        return
    if outer := run_around(path.resolve().parent):
        raise CheckpointError(
            f"--output-dir must not be inside another run's folder; got {path}, which "
            f"is inside {outer}. Give {outer} to continue that run, or another folder."
        )
    if not path.is_dir():
        return
    # Before the run, the launcher writes the ranks' logs there and the demo its base model.
    # Stages are checked elsewhere.
    own = {"logs", "base", GIVEN, SAVE_NOW, CHECKPOINTS, *stage_names()}
    others = sorted(
        found.name
        for found in path.iterdir()
        if found.name not in own and not found.name.startswith(".")
    )
    if others:
        raise CheckpointError(
            f"--output-dir must be a run's folder, a new one or an empty one; got {path} "
            f"with {others[0]!r}{f' and {len(others) - 1} more' if others[1:] else ''}. Choose "
            "another."
        )
