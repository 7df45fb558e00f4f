"""Checkpoints written beside the training: it waits while they are copied, no longer.

    copy to host memory -> (a thread) files -> manifest -> rename -> `latest` -> older ones go

At most one is under way. The ranks' threads do not talk: each leaves a list of what it has written
in the folder, and the keeper's publishes when all lists are there. So what goes wrong is known to
all at the next `save` or `wait`, which every rank calls.

Ranks that see other file systems write a part of their own (`step-000010-part-2-of-2`), with a
manifest of its own. A checkpoint is whole once all of its parts are.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.checkpoint.folder import (
    MANIFEST,
    Entry,
    Manifest,
    clear,
    publish,
    require_space,
    together,
    unwritable,
)
from tandem.checkpoint.layout import LAYOUT, Layout
from tandem.checkpoint.shard_files import Piece, not_finite, own_pieces, write_pieces
from tandem.checkpoint.state import State, number_of, numbered, own_folder, point_to
from tandem.errors import CheckpointError, NumericsError
from tandem.files import sync, write_new
from tandem.parallel.world import World

_SLACK_BYTES = 2**16
"""For manifests, headers and what a file system rounds up to."""
_POLL_SECONDS = 0.02
_ORPHAN_SECONDS = 60.0
"""How long a keeper's thread outlives its training while it waits for the others' files."""


class Saver:
    """Writes the states of one stage into numbered folders, and keeps the newest few."""

    def __init__(
        self, folder: Path, *, keep: int, world: World | None = None, beside: bool = True
    ) -> None:
        """Nothing is written yet.

        Args:
            folder: of the checkpoints, on every file system; nobody else writes there.
            keep: how many steps stay.
            beside: write in a thread, from a copy; else at once, from the tensors themselves.
        """
        self.folder = folder
        self.keep = keep
        self.world = world or World()
        self.beside = beside
        self._writing: _Writing | None = None

    def save(
        self,
        state: State,
        facts: Mapping[str, Any] | None = None,
        *,
        synced: Sequence[Path] = (),
    ) -> None:
        """Keep `state` as it is now, as `folder/step-N`; every rank calls it.

        Args:
            facts: kept in the manifest besides step and numbers: anything JSON can say.
            synced: files that grow beside the checkpoints and must be on the disk before them.
        Raises:
            CheckpointError: the disk refused the save before, or has no room for this one; older
                checkpoints are untouched.
            NumericsError: a value is not finite; nothing is written.
        """
        self.wait()
        world = self.world
        layout = Layout.of(state.tensors, world)
        pieces = own_pieces(state.tensors, layout, world)
        self._require_finite(state.step, pieces)
        target = own_folder(self.folder, state.step, world)
        sizes = world.all_gather_object(sum(piece.rows.nbytes for piece in pieces))
        require_space(target, sum(sizes[rank] for rank in world.here) + _SLACK_BYTES, world)
        known = {**(facts or {}), "step": state.step, "numbers": dict(state.numbers)}
        if len(world.folders) > 1:
            known["parts"] = self._parts()
        json.dumps(known, allow_nan=False)  # what cannot be written is a mistake of the caller's
        name = f".tmp-{target.name}-{world.all_gather_object(os.getpid())[world.keeper]}"
        aside = target.parent / name
        together(lambda: self._clear(target, aside), target, self.world)
        if self.beside:
            pieces = [piece.copied() for piece in pieces]
        said = layout.to_json() if world.is_keeper else ""
        self._writing = _Writing(self, target, aside, pieces, said, known, list(synced))
        self._writing.start()
        if not self.beside:
            self.wait()

    def wait(self) -> None:
        """Until what is under way is on the disk; every rank calls it.

        Raises:
            CheckpointError: the disk refused, on whichever rank; older checkpoints are untouched.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.wrote.wait()
        try:
            together(writing.complain, writing.target, self.world)
            writing.finish()
            together(writing.complain, writing.target, self.world)
        except CheckpointError:
            writing.abandon()
            shutil.rmtree(writing.aside, ignore_errors=True)
            raise

    def prune(self, newest: Path) -> None:
        """Remove all but the newest steps, and what has the newest's number but is not of it."""
        found = numbered(self.folder)
        kept = sorted({number_of(path) for path in found})[-self.keep :]
        stale = [path for path in found if number_of(path) not in kept]
        stale += [p for p in found if number_of(p) == number_of(newest) and p != newest]
        for old in stale:
            # The manifest first: a half-removed folder must not look whole.
            (old / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(old, ignore_errors=True)

    def _parts(self) -> dict[str, Any]:
        """Which save this is, and who writes which part of it."""
        world = self.world
        told = world.all_gather_object((socket.gethostname(), secrets.token_hex(8)))
        return {
            "save": told[0][1],
            "hosts": [told[keeper][0] for keeper in world.folders],
            "ranks": [world.seeing(keeper) for keeper in world.folders],
        }

    def _clear(self, target: Path, aside: Path) -> None:
        if self.world.is_keeper:
            for left in self.folder.glob(".tmp-*"):
                shutil.rmtree(left, ignore_errors=True)
            clear(target, aside)

    def _require_finite(self, step: int, pieces: Sequence[Piece]) -> None:
        bad = [name for name in self.world.all_gather_object(not_finite(pieces)) if name]
        if bad:
            raise NumericsError(
                f"a checkpoint must hold finite values alone; got others in {bad[0]} after step "
                f"{step}, which was not saved. Lower the learning rate; the same command continues "
                "from the checkpoint before."
            )


class _Writing:
    """One checkpoint on its way to the disk, on this rank."""

    def __init__(
        self,
        saver: Saver,
        target: Path,
        aside: Path,
        pieces: Sequence[Piece],
        layout: str,
        facts: Mapping[str, Any],
        synced: Sequence[Path],
    ) -> None:
        self.target = target
        self.aside = aside
        self.wrote = threading.Event()  # this rank's own files
        self._saver = saver
        self._pieces = pieces
        self._layout = layout
        self._facts = facts
        self._synced = synced
        self._abandoned = threading.Event()
        self._entries: dict[str, dict[str, Any]] = {}
        self._error: Exception | None = None
        # Not a daemon: a process that ends finishes what it has begun.
        self._thread = threading.Thread(target=self._run, name=f"save {target.name}")

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        """Write; what goes wrong is kept for `complain`."""
        try:
            self._write()
            self.wrote.set()
            if self._saver.world.is_keeper:
                self._publish()
        except Exception as error:
            self._error = error
            # Nobody may come to `wait` where something else has ended the run.
            if self._saver.world.is_keeper:
                shutil.rmtree(self.aside, ignore_errors=True)
        finally:
            self.wrote.set()

    def finish(self) -> None:
        self._thread.join()

    def abandon(self) -> None:
        self._abandoned.set()
        self.finish()

    def complain(self) -> None:
        """Raise what went wrong."""
        if isinstance(self._error, OSError):
            raise unwritable(self.target, self._error, self._saver.world) from self._error
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        world = self._saver.world
        names = write_pieces(self.aside, self._pieces, world)
        self._pieces = ()
        if world.is_keeper:
            write_new(self.aside / LAYOUT, self._layout.encode())
            names.append(LAYOUT)
        self._entries = {name: asdict(Entry.of(self.aside / name)) for name in names}
        if not world.is_keeper:
            ready = self.aside / f"{_list_of(world.rank)}.part"
            write_new(ready, json.dumps(self._entries).encode())
            os.replace(ready, self.aside / _list_of(world.rank))

    def _publish(self) -> None:
        entries = self._entries | self._others_entries()
        if self._abandoned.is_set():
            return
        for path in self._synced:
            if path.exists():
                sync(path)
        manifest = Manifest({n: Entry(**entries[n]) for n in sorted(entries)}, self._facts)
        publish(self.aside, self.target, manifest)
        point_to(self.target)
        self._saver.prune(self.target)

    def _others_entries(self) -> dict[str, dict[str, Any]]:
        """Every rank's list, once it is there."""
        entries: dict[str, dict[str, Any]] = {}
        for rank in self._saver.world.here:
            if rank == self._saver.world.rank:
                continue
            path = self.aside / _list_of(rank)
            deadline = None
            while not path.exists() and not self._abandoned.is_set():
                if deadline is None and not threading.main_thread().is_alive():
                    deadline = time.monotonic() + _ORPHAN_SECONDS
                if deadline is not None and time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{self.target} must be written by all ranks; got nothing from rank {rank}."
                    )
                time.sleep(_POLL_SECONDS)
            if self._abandoned.is_set():
                return {}
            entries |= json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
        return entries


def _list_of(rank: int) -> str:
    return f"rank-{rank}.json"
