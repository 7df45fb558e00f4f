"""A folder that is either whole or not there: written aside, named last, checked when read.

    write to .tmp-NAME-PID/ -> fsync every file -> MANIFEST.json (bytes and SHA-256 of each, and
    its own) -> rename to NAME

A folder without a manifest that holds is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointError, TandemError
from tandem.files import sha256, sync, write_new
from tandem.parallel.world import World

MANIFEST = "MANIFEST.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file of a finished folder must be."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Entry:
        """What a file is now."""
        return cls(path.stat().st_size, sha256(path))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a folder by their names in it, and what is known of it."""

    entries: Mapping[str, Entry]
    facts: Mapping[str, Any]

    def text(self) -> str:
        """As written: its own SHA-256 goes last, so that no bit of it changes unseen."""
        said: dict[str, Any] = {
            "files": {n: {"bytes": e.bytes, "sha256": e.sha256} for n, e in self.entries.items()},
            "facts": dict(self.facts),
        }
        said["sha256"] = hashlib.sha256(_dumped(said).encode()).hexdigest()
        return _dumped(said)


def _dumped(said: Mapping[str, Any]) -> str:
    return json.dumps(said, indent=1, allow_nan=False)


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
        TandemError: as `fill` does, on whichever rank.
    """
    world = world or World()
    require_own(folder)
    aside = folder.parent / f".tmp-{folder.name}-{world.collect(os.getpid())[0]}"
    try:
        together(lambda: clear(folder, aside) if world.is_first else None, folder, world)
        together(lambda: fill(aside), folder, world)
        entries = _described(aside, folder, world)
        manifest = Manifest(entries, facts or {})
        together(
            lambda: publish(aside, folder, manifest) if world.is_first else None, folder, world
        )
    except TandemError:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def clear(folder: Path, aside: Path) -> None:
    """Make the folder to write in, and remove what a killed process left of earlier ones."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".tmp-{folder.name}-*"):
        shutil.rmtree(left, ignore_errors=True)
    aside.mkdir()


def publish(aside: Path, folder: Path, manifest: Manifest) -> None:
    """Give a written folder its manifest and its name; what had the name before goes.

    Raises:
        OSError: the disk refuses.
    """
    write_new(aside / MANIFEST, manifest.text().encode())
    for path in aside.rglob("*"):
        sync(path)
    sync(aside)
    if folder.exists():
        replaced = folder.parent / f".tmp-{folder.name}-replaced-{os.getpid()}"
        os.replace(folder, replaced)
        os.replace(aside, folder)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.replace(aside, folder)
    sync(folder.parent)


def together(do: Callable[[], object], folder: Path, world: World) -> None:
    """Do something on every rank; if it fails on one, every rank says so.

    Raises:
        CheckpointError: the disk refused a rank.
        TandemError: whatever else `do` raised on a rank.
    """
    failed: TandemError | None = None
    cause: OSError | None = None
    try:
        do()
    except OSError as error:
        failed, cause = unwritable(folder, error), error
    except TandemError as error:
        failed = error
    for problem in world.collect(failed):
        if problem is not None:
            raise problem from cause


def unwritable(folder: Path, error: OSError) -> CheckpointError:
    """What to say where the disk refuses to take something for `folder`."""
    free = shutil.disk_usage(_existing(folder)).free
    return CheckpointError(
        f"{folder} must be writable; got: {error.strerror or error} ({free:,} bytes free). "
        "Free some space or choose another --output-dir; earlier checkpoints are intact."
    )


def require_space(folder: Path, num_bytes: int, world: World) -> None:
    """Refuse to begin what cannot be finished.

    Args:
        num_bytes: what will be written, the same on every rank.
    Raises:
        CheckpointError: less is free, where the first rank looks.
    """
    place = _existing(folder)
    free = world.collect(shutil.disk_usage(place).free)[0]
    if num_bytes > free:
        raise CheckpointError(
            f"{folder} must have room for {num_bytes:,} bytes; got {free:,} bytes free. Free some "
            "space or choose another --output-dir; earlier checkpoints are intact."
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


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder that `write_folder` made; its files are not looked at.

    Raises:
        CheckpointError: there is none, or it is not as it was written.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        said = json.loads(text)
        entries = {
            str(name): Entry(int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in said["files"].items()
        }
        manifest = Manifest(entries, dict(said["facts"]))
        if manifest.text() != text:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{folder} must hold a whole {MANIFEST}; got none that can be trusted. "
            "It was not finished, or is damaged."
        ) from None
    return manifest


def read_facts(folder: Path, *, verify: bool = True, world: World | None = None) -> dict[str, Any]:
    """The facts of a folder that `write_folder` made.

    Args:
        verify: check every file's size and SHA-256 first.
        world: the ranks that check together, each its share of the files.
    Raises:
        CheckpointError: no manifest, or a file that is missing or not what it was.
    """
    world = world or World()
    manifest = read_manifest(folder)
    if verify:
        mine = world.share(list(manifest.entries))
        together(lambda: check_files(folder, manifest, mine), folder, world)
    return dict(manifest.facts)


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare files with what the manifest says of them.

    Raises:
        CheckpointError: one is missing, cannot be read or is not what it was.
    """
    for name in names:
        path, expected = folder / name, manifest.entries[name]
        try:
            found = path.stat().st_size if path.is_file() else None
            digest = sha256(path) if found == expected.bytes else ""
        except OSError as error:
            raise CheckpointError(f"{path} must be readable; got: {error.strerror}.") from None
        if found != expected.bytes:
            size = "no such file" if found is None else f"{found} bytes"
            raise CheckpointError(f"{path} must have {expected.bytes} bytes; got {size}.")
        if digest != expected.sha256:
            raise CheckpointError(f"{path} must have the SHA-256 in its manifest; it changed.")


def is_whole(folder: Path) -> bool:
    """Whether the folder was finished and nothing in it has changed since."""
    try:
        read_facts(folder)
    except CheckpointError:
        return False
    return True


def _described(aside: Path, folder: Path, world: World) -> dict[str, Entry]:
    """Every file of a folder, hashed by the ranks in turn; named by the first, who sees all."""
    names = [str(p.relative_to(aside)) for p in sorted(aside.rglob("*")) if p.is_file()]
    names = world.collect(names)[0]
    mine: dict[str, Entry] = {}

    def describe() -> None:
        mine.update({name: Entry.of(aside / name) for name in world.share(names)})

    together(describe, folder, world)
    known = {name: entry for share in world.collect(mine) for name, entry in share.items()}
    return {name: known[name] for name in names}


def _existing(path: Path) -> Path:
    """The nearest folder above `path` that exists, to ask about free space."""
    while not path.exists():
        path = path.parent
    return path
