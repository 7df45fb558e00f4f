"""Checkpoints written in the background: training waits only while they are copied.

    copy to host memory -> (a thread) files -> manifest -> rename -> `latest` -> remove older ones

At most one is being written. The ranks' threads do not communicate: each writes a list of its files
to the folder, and the keeper's publishes the checkpoint when all lists are there. Errors are known
to all ranks at the next `save` or `wait`, which every rank calls.

Ranks on other file systems write a part with its own manifest (`step-000010-part-2-of-2`). A
checkpoint is complete if all of its parts are.
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
from tandem.checkpoint.state import (
    State,
    best_named_by,
    number_of,
    numbered,
    own_folder,
    point_to,
)
from tandem.errors import CheckpointError, NumericsError
from tandem.files import sync, write_new
from tandem.parallel.world import World

_SLACK_BYTES = 2**16
"""For manifests, headers and the file system's rounding."""
_POLL_SECONDS = 0.02
_ORPHAN_SECONDS = 60.0
"""How long a keeper's thread waits for the others' files after the training has ended."""


class Saver:
    """Writes the states of one stage into numbered folders, and keeps the newest few."""

    def __init__(
        self, folder: Path, *, keep: int, world: World | None = None, beside: bool = True
    ) -> None:
        """
        Args:
            folder: of the checkpoints, on every file system; for this saver only.
            keep: the number of steps that are kept, beside the best that they name.
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
        """Save `state` as it is now as `folder/step-N`; every rank calls it.

        Args:
            facts: JSON values for the manifest, beside step and numbers.
            synced: files that grow beside the checkpoints and must be on the disk before them.
        Raises:
            CheckpointError: the disk refused the last save, or has no room for this one; older
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
        if state.best is not None:
            known["best"] = state.best
        if len(world.folders) > 1:
            known["parts"] = self._parts()
        json.dumps(known, allow_nan=False)  # raises here, not in the thread
        name = f".tmp-{target.name}-{world.all_gather_object(os.getpid())[world.keeper]}"
        aside = target.parent / name
        together(lambda: self._clear(target, aside), target, self.world)
        if self.beside:
            pieces = [piece.copied() for piece in pieces]
        said = layout.to_json() if world.is_keeper else ""
        self._writing = _Writing(self, target, aside, pieces, said, known, list(synced))
        self._writing.thread.start()
        if not self.beside:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint being written is on the disk; every rank calls it.

        Raises:
            CheckpointError: the disk refused a rank; older checkpoints are untouched.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.wrote.wait()
        try:
            together(writing.complain, writing.target, self.world)
            writing.thread.join()
            together(writing.complain, writing.target, self.world)
        except CheckpointError:
            writing.abandoned.set()
            writing.thread.join()
            shutil.rmtree(writing.aside, ignore_errors=True)
            raise

    def leave(self) -> None:
        """Finish the checkpoint being written, if any, before the folder is another process's;
        other ranks may be gone, and an error is nobody's any more."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.left.set()
            writing.thread.join()

    def prune(self, newest: Path) -> None:
        """Remove all but the newest steps and the best ones that they name, and other folders of
        the newest step's number."""
        found = numbered(self.folder)
        recent = sorted({number_of(path) for path in found})[-self.keep :]
        kept = {*recent, *(best_named_by(path) for path in found if number_of(path) in recent)}
        stale = [path for path in found if number_of(path) not in kept]
        stale += [p for p in found if number_of(p) == number_of(newest) and p != newest]
        for old in stale:
            # The manifest first: a half-removed folder must not look whole.
            (old / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(old, ignore_errors=True)

    def _parts(self) -> dict[str, Any]:
        """An id of this save, and which ranks on which hosts write its parts."""
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
    """One checkpoint that this rank is writing."""

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
        self.abandoned = threading.Event()
        self.left = threading.Event()  # nobody will call `wait`
        self._entries: dict[str, dict[str, Any]] = {}
        self._error: Exception | None = None
        # Not a daemon: a process finishes its checkpoint before it ends.
        self.thread = threading.Thread(target=self._run, name=f"save {target.name}")

    def _run(self) -> None:
        """Write, and keep any error for `complain`."""
        try:
            self._write()
            self.wrote.set()
            if self._saver.world.is_keeper:
                self._publish()
        except Exception as error:
            self._error = error
            # If the run has ended for another reason, nobody calls `wait`.
            if self._saver.world.is_keeper:
                shutil.rmtree(self.aside, ignore_errors=True)
        finally:
            self.wrote.set()

    def complain(self) -> None:
        """Raise the error, if there was one."""
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
        if self.abandoned.is_set():
            return
        for path in self._synced:
            if path.exists():
                sync(path)
        manifest = Manifest({n: Entry(**entries[n]) for n in sorted(entries)}, self._facts)
        publish(self.aside, self.target, manifest)
        point_to(self.target)
        self._saver.prune(self.target)

    def _others_entries(self) -> dict[str, dict[str, Any]]:
        """The other ranks' lists, waiting for each."""
        entries: dict[str, dict[str, Any]] = {}
        for rank in self._saver.world.here:
            if rank == self._saver.world.rank:
                continue
            path = self.aside / _list_of(rank)
            deadline = None
            while not path.exists() and not self.abandoned.is_set():
                alone = self.left.is_set() or not threading.main_thread().is_alive()
                if deadline is None and alone:
                    deadline = time.monotonic() + _ORPHAN_SECONDS
                if deadline is not None and time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{self.target} must be written by all ranks; got nothing from rank {rank}."
                    )
                time.sleep(_POLL_SECONDS)
            if self.abandoned.is_set():
                return {}
            entries |= json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
        return entries


def _list_of(rank: int) -> str:
    return f"rank-{rank}.json"
