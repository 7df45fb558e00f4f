"""A folder that is either whole or not there: written aside, named last, checked when read.

    write to .tmp-NAME-PID/ -> fsync every file -> MANIFEST.json (bytes and SHA-256 of each)
    -> rename to NAME

A folder without a manifest that holds is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointError
from tandem.parallel.world import World

MANIFEST = "MANIFEST.json"


def write_folder(
    folder: Path,
    fill: Callable[[Path], None],
    facts: Mapping[str, Any] | None = None,
    *,
    world: World | None = None,
) -> None:
    """Make `folder` with what `fill` writes, all or nothing.

    Args:
        fill: given an empty folder, writes files into it; every rank calls it, for the weights in
            pieces that it gathers, and writes what is its own.
        facts: kept in the manifest (step, fingerprint, figures): anything JSON can say.
        world: the ranks that write together, into a folder that all of them see.
    Raises:
        CheckpointError: the disk refused, on whichever rank, or `folder` holds something that this
            did not make; what was there before is untouched.
    """
    world = world or World()
    require_own(folder)
    aside = folder.parent / f".tmp-{folder.name}-{world.collect(os.getpid())[0]}"

    def prepare() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for old in folder.parent.glob(f".tmp-{folder.name}-*"):
            shutil.rmtree(old, ignore_errors=True)
        aside.mkdir()

    def publish() -> None:
        manifest = {"files": _describe(aside), "facts": dict(facts or {})}
        text = json.dumps(manifest, indent=1, allow_nan=False)
        (aside / MANIFEST).write_text(text, encoding="utf-8")
        _sync_tree(aside)
        if folder.exists():
            replaced = folder.parent / f".old-{folder.name}-{os.getpid()}"
            os.replace(folder, replaced)
            os.replace(aside, folder)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.replace(aside, folder)
        _sync_path(folder.parent)

    _together(prepare if world.is_first else None, folder, aside, world)
    _together(lambda: fill(aside), folder, aside, world)
    _together(publish if world.is_first else None, folder, aside, world)


def _together(do: Callable[[], None] | None, folder: Path, aside: Path, world: World) -> None:
    """Do something on some ranks and wait for all; if the disk refuses one, every rank says so."""
    refused = ""
    try:
        if do is not None:
            do()
    except OSError as error:
        refused = error.strerror or str(error)
        if world.size == 1:
            raise _unwritable(folder, aside, refused) from error
    problems = [problem for problem in world.collect(refused) if problem]
    if problems:
        raise _unwritable(folder, aside, problems[0])


def _unwritable(folder: Path, aside: Path, why: str) -> CheckpointError:
    shutil.rmtree(aside, ignore_errors=True)
    free = shutil.disk_usage(_existing(folder)).free
    return CheckpointError(
        f"{folder} must be writable; got: {why} ({free:,} bytes free). "
        "Free some space or choose another --output-dir; earlier checkpoints are whole."
    )


def require_own(folder: Path) -> None:
    """Refuse to take a folder (or file) for ours that `write_folder` did not make.

    Raises:
        CheckpointError: it is there, without a manifest.
    """
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} must be free or a finished step (with {MANIFEST}); got something else, "
            "which would be lost. Move it away, or use another --output-dir."
        )


def read_facts(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """The facts of a folder that `write_folder` made.

    Args:
        verify: check every file's size and SHA-256 first.
    Raises:
        CheckpointError: no manifest, or a file that is missing or not what it was.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, facts = dict(manifest["files"]), dict(manifest["facts"])
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{folder} must hold a whole {MANIFEST}; got none that can be read. "
            "It was not finished, or is damaged."
        ) from None
    for name, expected in files.items() if verify else ():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
            raise CheckpointError(f"{path} must have {expected['bytes']} bytes; got {found}.")
        if _sha256(path) != expected["sha256"]:
            raise CheckpointError(f"{path} must have the SHA-256 in its manifest; it changed.")
    return facts


def is_whole(folder: Path) -> bool:
    """Whether the folder was finished and nothing in it has changed since."""
    try:
        read_facts(folder)
    except CheckpointError:
        return False
    return True


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync_path(path)
    _sync_path(folder)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _existing(path: Path) -> Path:
    """The nearest folder above `path` that exists, to ask about free space."""
    while not path.exists():
        path = path.parent
    return path
