"""Training state from numbered folders: the newest that is whole, verified before it is used.

Safetensors and JSON only; nothing that is loaded can run code.

    CHECKPOINTS/step-000010/{actor,actor_optimizer,...}.safetensors, MANIFEST.json
    CHECKPOINTS/latest                  the name of the newest, and the SHA-256 of its manifest
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.checkpoint.folder import (
    MANIFEST,
    Manifest,
    check_files,
    read_manifest,
    together,
)
from tandem.checkpoint.pieces import read_parts
from tandem.errors import CheckpointError
from tandem.files import replace as replace_file
from tandem.files import sha256
from tandem.parallel.world import World

LATEST = "latest"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class State:
    """What a stage continues from: tensors by part ("actor", "actor_optimizer"), and numbers."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    numbers: Mapping[str, Any]


def load_newest_state(folder: Path, world: World | None = None) -> tuple[State | None, list[str]]:
    """The newest checkpoint that is whole, and a line for each newer one that is not.

    A damaged one is kept aside under another name. All ranks take part, and take the same.

    Returns:
        (None, notes) where there is none: the stage starts from its beginning.
    """
    world = world or World()
    names, notes = world.collect(_candidates(folder))[0]
    for name in names:
        try:
            state = _load(folder / name, world)
        except CheckpointError as error:
            notes.append(f"{error} Falling back to the checkpoint before it.")
            if world.is_first:
                _put_aside(folder / name)
            continue
        return state, notes
    if names:
        notes[-1] = notes[-1].replace(
            "Falling back to the checkpoint before it",
            "There is none before it: starting from the beginning",
        )
    return None, notes


def load_state_before(
    folder: Path, step: int, world: World | None = None
) -> tuple[State | None, list[str]]:
    """As `load_newest_state`, of the checkpoints from before a step; nothing is put aside."""
    notes: list[str] = []
    for candidate in reversed(numbered(folder)):
        if int(candidate.name.removeprefix("step-")) >= step:
            continue
        try:
            return _load(candidate, world or World()), notes
        except CheckpointError as error:
            notes.append(str(error))
    return None, notes


def newest_numbers(folder: Path) -> Mapping[str, Any] | None:
    """The numbers of the newest checkpoint whose manifest holds, its tensors unverified: a quick
    look."""
    for candidate in reversed(numbered(folder)):
        try:
            manifest = read_manifest(candidate)
            _step_of(manifest, candidate)
            return dict(manifest.facts["numbers"])
        except CheckpointError:
            continue
    return None


def numbered(folder: Path) -> list[Path]:
    """Finished checkpoint folders, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        (path for path in folder.iterdir() if _NAME.fullmatch(path.name)),
        key=lambda path: int(path.name.removeprefix("step-")),
    )


def step_folder(folder: Path, step: int) -> Path:
    """Where the state after `step` steps goes."""
    return folder / f"step-{step:06d}"


def point_to(newest: Path) -> None:
    """Let `latest` name a checkpoint that has just got its own name.

    Raises:
        OSError: the disk refuses.
    """
    said = {"folder": newest.name, "sha256": sha256(newest / MANIFEST)}
    replace_file(newest.parent / LATEST, (json.dumps(said) + "\n").encode())


def _candidates(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the checkpoints, newest first, and what the pointer says is amiss."""
    names = [path.name for path in reversed(numbered(folder))]
    path = folder / LATEST
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        newest, digest = str(said["folder"]), str(said["sha256"])
        is_readable = json.dumps({"folder": newest, "sha256": digest}) + "\n" == path.read_text()
    except FileNotFoundError:
        return names, (
            [f"{path} must name the newest checkpoint; got no such file."] if names else []
        )
    except (OSError, ValueError, KeyError, TypeError):
        is_readable = False
    if not is_readable:
        return names, [f"{path} must name the newest checkpoint; got what cannot be read."]
    if newest not in names:
        return names, [f"{folder / newest} must be there, for {LATEST} names it; got none."]
    manifest = folder / newest / MANIFEST
    if manifest.is_file() and sha256(manifest) != digest:
        return names, [f"{manifest} must be the one that {LATEST} names; got another."]
    return names, []


def _load(folder: Path, world: World) -> State:
    manifest: Manifest | None = None
    step = -1

    def check() -> None:
        nonlocal manifest, step
        manifest = read_manifest(folder)
        step = _step_of(manifest, folder)
        check_files(folder, manifest, world.share(list(manifest.entries)))

    together(check, folder, world)
    assert manifest is not None
    return State(step, read_parts(folder, list(manifest.entries)), manifest.facts["numbers"])


def _step_of(manifest: Manifest, folder: Path) -> int:
    """The step that a checkpoint is of."""
    step, numbers = manifest.facts.get("step"), manifest.facts.get("numbers")
    if not isinstance(step, int) or step_folder(folder.parent, step) != folder:
        raise CheckpointError(f"{folder} must be a checkpoint of its step; got step {step!r}.")
    if not isinstance(numbers, dict):
        raise CheckpointError(f"{folder} must be a checkpoint with numbers; got {numbers!r}.")
    return step


def _put_aside(folder: Path) -> None:
    """Give a damaged checkpoint a name that is not tried again; the user may look at it."""
    for number in range(100):
        aside = folder.with_name(f"damaged-{folder.name}-{number}")
        if aside.exists():
            continue
        try:
            os.rename(folder, aside)
        except OSError:  # it can be read but not renamed: it will be found damaged again
            return
        return
