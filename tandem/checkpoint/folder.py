"""A folder that is either complete or absent: written aside, renamed last, verified when read.

    write to .tmp-NAME-PID/ -> fsync every file -> MANIFEST.json (bytes and SHA-256 of each, and
    its own) -> rename to NAME

A folder without a valid manifest is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoint.sending import pass_on
from tandem.errors import CheckpointError, TandemError
from tandem.files import at_once, existing, sha256, sha256_once, sync, way_out, write_new
from tandem.parallel.world import World

MANIFEST = "MANIFEST.json"
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Entry:
    """Size and hash of a file in a finished folder."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Entry:
        """Of a file as it is now."""
        return cls(path.stat().st_size, sha256(path))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a folder by name, and facts about it."""

    entries: Mapping[str, Entry]
    facts: Mapping[str, Any]

    def text(self) -> str:
        """As written, with its own SHA-256 last, so that no bit of it can change unnoticed."""
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
        fill: writes files into an empty folder; every rank calls it, and writes its own files.
        facts: JSON values for the manifest (step, fingerprint, figures).
        world: the ranks that write together. Those that see the first rank's folder write there;
            other file systems get a copy.
    Raises:
        CheckpointError: the disk refused a rank, or `folder` exists and was not made by this
            function; what was there is untouched.
        TandemError: as `fill` raises on any rank.
    """
    world = world or World()
    together(lambda: require_own(folder), folder, world)
    aside = folder.parent / f".tmp-{folder.name}-{world.all_gather_object(os.getpid())[0]}"
    try:
        together(lambda: clear(folder, aside) if world.is_first else None, folder, world)
        together(lambda: _fill(fill, aside, folder), folder, world)
        entries = _described(aside, folder, world)
        manifest = Manifest(entries, facts or {})
        together(
            lambda: publish(aside, folder, manifest) if world.is_first else None, folder, world
        )
    except TandemError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    copy_folder(folder, world)


def _fill(fill: Callable[[Path], None], aside: Path, folder: Path) -> None:
    """Call `fill`; a disk's error within names `folder`, not the one aside that nobody has
    chosen."""
    try:
        fill(aside)
    except DiskError as error:
        raise error.of_folder(aside, folder) from error.__cause__


def copy_folder(folder: Path, world: World) -> bool:
    """Copy a finished folder to every file system of the run that does not have it.

    Its bytes are sent from one keeper to the next, which writes them while it sends them on.

    Returns:
        whether there was one to copy to.
    Raises:
        CheckpointError: file systems have different ones, one is damaged, or a disk refused a rank.
    """
    if len(world.folders) == 1:
        return False
    text = _manifest_text(folder) if world.is_keeper else ""
    texts = [world.all_gather_object(text)[keeper] for keeper in world.folders]
    found = {text for text in texts if text}
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} must be the same on every node; got {len(found)} that differ. Keep the one "
            "that you want, and remove the others."
        )
    if not found or all(texts):
        return False
    has = next(i for i, text in enumerate(texts) if text)
    chain = [world.folders[(has + i) % len(texts)] for i in range(len(texts))]
    aside = folder.parent / f".tmp-{folder.name}-{os.getpid()}"
    told: list[tuple[Manifest, dict[str, Entry]]] = []
    together(lambda: told.append(_whole(folder)) if world.rank == chain[0] else None, folder, world)
    ((manifest, files),) = world.all_gather_object(told)[chain[0]]
    is_written = world.is_keeper and not text

    def copy() -> None:
        if world.rank not in chain:
            return
        sizes = {name: (entry.bytes, entry.sha256) for name, entry in files.items()}
        is_whole = pass_on(folder, aside if is_written else None, sizes, chain)
        if is_written and is_whole:
            publish(aside, folder, manifest)

    try:
        together(lambda: clear(folder, aside) if is_written else None, folder, world)
        together(copy, folder, world)
    except TandemError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return True


def _whole(folder: Path) -> tuple[Manifest, dict[str, Entry]]:
    """A folder's manifest and files, before others wait for them; a card may be its owner's."""
    read_facts(folder)
    manifest = read_manifest(folder)
    there = {name: entry for name, entry in manifest.entries.items() if (folder / name).exists()}
    cards = {name: Entry.of(folder / name) for name in there if Path(name).name == CARD}
    return manifest, there | cards


def _manifest_text(folder: Path) -> str:
    """The manifest of a finished folder; empty if there is no valid one."""
    try:
        return read_manifest(folder).text()
    except CheckpointError:
        return ""


def clear(folder: Path, aside: Path) -> None:
    """Make the folder to write in, and remove those that killed processes left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Not those of another folder, `NAME-more`, which may be written at this moment.
    own = re.compile(rf"\.tmp-{re.escape(folder.name)}-(replaced-)?\d+")
    for left in folder.parent.iterdir():
        if own.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)
    aside.mkdir()


def publish(aside: Path, folder: Path, manifest: Manifest) -> None:
    """Write a folder's manifest and rename it, in place of an earlier folder of that name.

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
    """Call `do` on every rank; if it fails on one, every rank raises.

    Raises:
        CheckpointError: the disk refused a rank.
        TandemError: as `do` raised on a rank.
    """
    failed: TandemError | None = None
    cause: OSError | None = None
    try:
        do()
    except OSError as error:
        failed, cause = unwritable(folder, error, world), error
    except TandemError as error:
        failed = error
    for problem in world.all_gather_object(failed):
        if problem is not None:
            raise problem from cause


class DiskError(CheckpointError):
    """A disk does not take a folder, which a flag of the command names: a run's `--output-dir`,
    unless the command that writes says otherwise."""

    def __init__(self, problem: str, advice: str, flag: str = "--output-dir") -> None:
        super().__init__(problem, advice, flag)  # so that other ranks get all of it

    def __str__(self) -> str:
        problem, advice, flag = self.args
        return f"{problem} {advice} or choose another {flag}; what was saved before is intact."

    def of_flag(self, flag: str) -> DiskError:
        """The same where another flag names the folder."""
        problem, advice, _ = self.args
        return DiskError(problem, advice, flag)

    def of_folder(self, aside: Path, folder: Path) -> DiskError:
        """The same with another folder's name in place of the one that it has."""
        problem, advice, flag = self.args
        return DiskError(problem.replace(str(aside), str(folder)), advice, flag)


def unwritable(folder: Path, error: OSError, world: World) -> DiskError:
    """The error for an OSError while writing `folder`."""
    free = shutil.disk_usage(existing(folder)).free
    return DiskError(
        f"{_where(folder, world)} must be writable; got: {error.strerror or error} "
        f"({free:,} bytes free).",
        way_out(error),
    )


def _where(folder: Path, world: World) -> str:
    """A folder in a message, with its node where there are others like it."""
    return f"{folder} on {socket.gethostname()}" if len(world.folders) > 1 else str(folder)


def require_space(folder: Path, num_bytes: int, world: World) -> None:
    """Check free space before writing.

    Args:
        num_bytes: to be written on the file system that this rank sees.
    Raises:
        CheckpointError: a keeper finds less.
    """

    def check() -> None:
        free = shutil.disk_usage(existing(folder)).free
        if num_bytes > free:
            raise DiskError(
                f"{_where(folder, world)} must have room for {num_bytes:,} bytes; got {free:,} "
                "bytes free.",
                "Free some space",
            )

    together(check if world.is_keeper else lambda: None, folder, world)


def require_own(folder: Path) -> None:
    """Check that a folder is absent or was made by `write_folder`.

    Raises:
        CheckpointError: it exists without a manifest.
    """
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} must be free or a finished step (with {MANIFEST}); got something else, "
            "which would be lost. Move it away, or use another --output-dir."
        )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder that `write_folder` made; its files are not read.

    Raises:
        CheckpointError: there is none, or it has changed.
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
            f"{folder} must hold a whole {MANIFEST}; got none that can be trusted: it was not "
            "finished, or is damaged."
        ) from None
    return manifest


def read_facts(folder: Path, *, verify: bool = True, world: World | None = None) -> dict[str, Any]:
    """The facts of a folder that `write_folder` made.

    Args:
        verify: check every file's size and SHA-256 first.
        world: the ranks that check together, each its share of the files.
    Raises:
        CheckpointError: no valid manifest, or a missing or changed file.
    """
    world = world or World()
    try:
        manifest = read_manifest(folder)
        if verify:
            mine = world.share(list(manifest.entries))
            together(lambda: check_files(folder, manifest, mine), folder, world)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} Bring back what was there, or remove {folder} to make it again."
        ) from None
    return dict(manifest.facts)


def check_files(
    folder: Path, manifest: Manifest, names: Iterable[str], *, again: bool = True
) -> None:
    """Compare files with the manifest.

    Args:
        again: also read files that this process has hashed before and that seem unchanged.
    Raises:
        CheckpointError: one is missing, unreadable or changed.
    """
    read = sha256 if again else sha256_once

    def check(name: str) -> None:
        path, expected = folder / name, manifest.entries[name]
        if path.name == CARD:  # a model's card is its owner's to edit
            return
        try:
            found = path.stat().st_size if path.is_file() else None
            digest = read(path) if found == expected.bytes else ""
        except OSError as error:
            raise CheckpointError(f"{path} must be readable; got: {error.strerror}.") from None
        if found != expected.bytes:
            size = "no such file" if found is None else f"{found} bytes"
            raise CheckpointError(f"{path} must have {expected.bytes} bytes; got {size}.")
        if digest != expected.sha256:
            raise CheckpointError(
                f"{path} must have the SHA-256 in its {MANIFEST}; got another: it changed after it "
                "was written."
            )

    at_once(check, list(names))


def _described(aside: Path, folder: Path, world: World) -> dict[str, Entry]:
    """Every file of a folder, hashed by the ranks that see it, in the order of the first rank."""
    names = [str(p.relative_to(aside)) for p in sorted(aside.rglob("*")) if p.is_file()]
    names = world.all_gather_object(names)[0]
    mine: dict[str, Entry] = {}

    def describe() -> None:
        if world.keeper == 0:
            mine.update({name: Entry.of(aside / name) for name in world.share(names)})

    together(describe, folder, world)
    parts = world.all_gather_object(mine)
    known = {name: entry for part in parts for name, entry in part.items()}
    return {name: known[name] for name in names}
