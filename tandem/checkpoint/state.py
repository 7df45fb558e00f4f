"""Training state from numbered folders: the newest that is complete, verified before use.

Safetensors and JSON only; nothing that is loaded can run code.

    CHECKPOINTS/step-000010/{actor,actor_optimizer,...}.safetensors, layout.json, MANIFEST.json
    CHECKPOINTS/step-000010-part-2-of-2/    where ranks see several file systems, a folder for each
    CHECKPOINTS/latest                      the newest's name, and the SHA-256 of its manifest

Parts may be on their own nodes or together in one folder; a rank reads what it needs from either.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from tandem.checkpoint.folder import MANIFEST, Manifest, check_files, read_manifest
from tandem.checkpoint.layout import Layout, read_layout
from tandem.checkpoint.saved import PieceFiles, SavedTensor
from tandem.errors import CheckpointError
from tandem.files import replace as replace_file
from tandem.files import sha256
from tandem.parallel.world import World

LATEST = "latest"
_NAME = re.compile(r"step-(\d{6,})(?:-part-(\d+)-of-(\d+))?")
_MOST_NAMED = 4
"""Files that a message names; it counts the rest."""


@dataclass(frozen=True, slots=True)
class State:
    """What a stage resumes from: tensors by part ("actor", "actor_optimizer"), and numbers.

    best: the step of the best state so far, if the stage is to end with that one: its checkpoint is
    kept as long as this one is.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    numbers: Mapping[str, Any]
    best: int | None = None


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved `State`; its tensors are read on demand."""

    step: int
    tensors: Mapping[str, Mapping[str, SavedTensor]]
    numbers: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A checkpoint, by the parts that any rank sees.

    save: distinguishes two saves of one step. folders: of each part, by its number, where
    keepers have it.
    """

    step: int
    num_parts: int
    save: str
    folders: dict[int, dict[int, Path]] = field(default_factory=dict)


def load_newest_state(
    folder: Path, world: World | None = None
) -> tuple[SavedState | None, list[str]]:
    """The newest complete checkpoint, and a line for each newer one that is not; a collective.

    Damaged ones are renamed. One of step 0 is not continued from: the stage has done nothing yet.

    Returns:
        (None, notes) if there is none: the stage starts from its beginning.
    Raises:
        CheckpointError: the only checkpoints have parts that are on no node of this run.
    """
    world = world or World()
    candidates, notes = _candidates(folder, world)
    candidates = [candidate for candidate in candidates if candidate.step > 0]
    absent = ""
    for candidate in candidates:
        state, problem, is_damaged = _loaded(folder, candidate, world, aside=True)
        if state is not None:
            return state, [*notes, f"{problem} Another node has it whole."] if problem else notes
        notes.append(f"{problem} Falling back to the checkpoint before it.")
        absent = absent or ("" if is_damaged else problem)
    if absent:
        raise CheckpointError(absent)
    if candidates:
        notes[-1] = notes[-1].replace(
            "Falling back to the checkpoint before it",
            "There is none before it: starting from the beginning",
        )
    return None, notes


def take_newest(
    folder: Path, take: Callable[[SavedState], object], world: World | None = None
) -> tuple[int | None, list[str]]:
    """Hand the newest complete checkpoint of a run to `take`, and leave the run as it is.

    A run that goes on may remove the one that is read; the one after it is then there.

    Returns:
        its step, None if there is none; a line for each newer one that is not complete.
    Raises:
        CheckpointError, OSError: as `take` raises, the third time.
    """
    tries = 3
    while True:
        state, notes = load_state_before(folder, None, world)
        if state is None:
            return None, notes
        try:
            take(state)
        except (CheckpointError, OSError):
            tries -= 1
            if not tries:
                raise
        else:
            return state.step, notes


def load_state_before(
    folder: Path, step: int | None, world: World | None = None
) -> tuple[SavedState | None, list[str]]:
    """As `load_newest_state`, of checkpoints before a step (None: of all); damaged ones are not
    renamed."""
    world = world or World()
    notes: list[str] = []
    for candidate in _candidates(folder, world)[0]:
        if candidate.step == 0 or (step is not None and candidate.step >= step):
            continue
        state, problem, _ = _loaded(folder, candidate, world, aside=False)
        if state is not None:
            return state, notes
        notes.append(problem)
    return None, notes


def load_state_of(folder: Path, step: int, world: World | None = None) -> SavedState:
    """The checkpoint of one step; a collective.

    Raises:
        CheckpointError: it is missing or not complete.
    """
    world = world or World()
    problem = f"{step_folder(folder, step)} must be there; got no such checkpoint."
    for candidate in _candidates(folder, world)[0]:
        if candidate.step == step:
            state, problem, _ = _loaded(folder, candidate, world, aside=False)
            if state is not None:
                return state
    raise CheckpointError(problem)


def best_named_by(checkpoint: Path) -> int | None:
    """The step whose checkpoint must be kept as long as this one (`State.best`)."""
    try:
        best = read_manifest(checkpoint).facts.get("best")
    except CheckpointError:
        return None
    return best if isinstance(best, int) else None


def newest_numbers(folder: Path, world: World | None = None) -> Mapping[str, Any] | None:
    """The numbers of the newest checkpoint with a valid manifest, its tensors unverified; the same
    on all ranks."""
    world = world or World()

    def look() -> tuple[int, Mapping[str, Any]] | None:
        for path in reversed(numbered(folder)):
            if number_of(path) == 0:  # it is not continued from
                break
            try:
                manifest = read_manifest(path)
                return _step_of(manifest, path), dict(manifest.facts["numbers"])
            except CheckpointError:
                continue
        return None

    found = world.all_gather_object(look() if world.is_keeper else None)
    steps = [seen for seen in found if seen is not None]
    return max(steps, key=lambda seen: seen[0])[1] if steps else None


def numbered(folder: Path) -> list[Path]:
    """Finished folders of checkpoints or their parts, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (number_of(path), path.name))


def number_of(folder: Path) -> int:
    """The step in the name of a checkpoint's or part's folder."""
    return _named(folder)[0]


def step_folder(folder: Path, step: int, part: int = 1, num_parts: int = 1) -> Path:
    """The folder of the state after `step` steps, or of a part of it, counted from 1."""
    return folder / (f"step-{step:06d}" + (f"-part-{part}-of-{num_parts}" if num_parts > 1 else ""))


def own_folder(folder: Path, step: int, world: World) -> Path:
    """The folder of this rank's part of the state after `step` steps."""
    return step_folder(folder, step, world.folders.index(world.keeper) + 1, len(world.folders))


def point_to(newest: Path) -> None:
    """Let `latest` name a new checkpoint.

    Raises:
        OSError: the disk refuses.
    """
    said = {"folder": newest.name, "sha256": sha256(newest / MANIFEST)}
    replace_file(newest.parent / LATEST, (json.dumps(said) + "\n").encode())


def _named(folder: Path) -> tuple[int, int, int]:
    """The step, part and number of parts in a folder's name."""
    found = _NAME.fullmatch(folder.name)
    assert found is not None, folder
    step, part, num_parts = found.groups(default="1")
    return int(step), int(part), int(num_parts)


def _candidates(folder: Path, world: World) -> tuple[list[_Candidate], list[str]]:
    """The checkpoints that any rank sees, newest first, and problems with `latest`."""
    seen: list[tuple[str, str]] = []
    notes: list[str] = []
    if world.is_keeper:
        seen = [(path.name, _save_of(path)) for path in numbered(folder)]
        notes = _amiss(folder, [name for name, _ in seen])
    said = world.all_gather_object((seen, notes))
    found: dict[tuple[int, int, str], _Candidate] = {}
    for keeper in world.folders:
        for name, save in said[keeper][0]:
            step, part, num_parts = _named(folder / name)
            candidate = found.setdefault((step, num_parts, save), _Candidate(step, num_parts, save))
            candidate.folders.setdefault(part, {})[keeper] = folder / name
    order = sorted(found, key=lambda key: (key[0], len(found[key].folders) == key[1]))
    return [found[key] for key in reversed(order)], [note for _, ns in said for note in ns]


def _save_of(path: Path) -> str:
    """The save that a part belongs to; empty for an undivided or unreadable checkpoint."""
    try:
        return str(read_manifest(path).facts["parts"]["save"])
    except (CheckpointError, KeyError, TypeError):
        return ""


def _amiss(folder: Path, names: list[str]) -> list[str]:
    """Problems with the pointer to the newest checkpoint."""
    path = folder / LATEST
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        newest, digest = str(said["folder"]), str(said["sha256"])
        is_readable = json.dumps({"folder": newest, "sha256": digest}) + "\n" == path.read_text()
    except FileNotFoundError:
        return [f"{path} must name the newest checkpoint; got no such file."] if names else []
    except (OSError, ValueError, KeyError, TypeError):
        is_readable = False
    if not is_readable:
        return [f"{path} must name the newest checkpoint; got something unreadable."]
    if newest not in names:
        return [f"{folder / newest} must be there, for {LATEST} names it; got none."]
    manifest = folder / newest / MANIFEST
    if manifest.is_file() and sha256(manifest) != digest:
        return [f"{manifest} must be the one that {LATEST} names; got another."]
    return []


def _loaded(
    folder: Path, candidate: _Candidate, world: World, *, aside: bool
) -> tuple[SavedState | None, str, bool]:
    """A checkpoint, if all of its parts are complete somewhere; a problem with it, and whether that
    is damage.

    Args:
        aside: rename damaged parts.
    """
    own = {
        part: has[world.keeper] for part, has in candidate.folders.items() if world.keeper in has
    }
    manifests: dict[int, Manifest] = {}
    layouts: dict[int, Layout] = {}
    problems: dict[int, str] = {}
    for part, path in own.items():
        try:
            manifest = read_manifest(path)
            _step_of(manifest, path)
            check_files(path, manifest, world.share(list(manifest.entries)))
            manifests[part], layouts[part] = manifest, read_layout(path)
        except CheckpointError as error:
            problems[part] = str(error)
    said = world.all_gather_object(problems)
    bad = {
        (part, keeper)
        for keeper in world.folders
        for rank in world.seeing(keeper)
        for part in said[rank]
    }
    if aside and world.is_keeper:
        for part, path in own.items():
            if (part, world.rank) in bad:
                _put_aside(path)
    holders = {
        part: {keeper for keeper in candidate.folders.get(part, {}) if (part, keeper) not in bad}
        for part in range(1, candidate.num_parts + 1)
    }
    damaged = next((text for texts in said for text in texts.values()), "")
    lacking = [part for part, keepers in holders.items() if not keepers]
    if lacking:
        first = next(iter(manifests.items()), None)
        absent = (
            "" if damaged or first is None else _absent(folder, candidate, lacking, *first, layouts)
        )
        absent = next((text for text in world.all_gather_object(absent) if text), damaged)
        return None, damaged or absent, bool(damaged)
    if candidate.num_parts == 1 and len(world.folders) == 1:
        facts, layout = manifests[1].facts, layouts[1]
    else:
        teller = min(holders[1])
        told = (manifests[1].facts, layouts[1]) if world.rank == teller else None
        facts, layout = cast(
            tuple[Mapping[str, Any], Layout], world.all_gather_object(told)[teller]
        )
    part_of = dict.fromkeys(range(layout.ranks), 1)
    if candidate.num_parts > 1:
        for number, ranks in enumerate(facts["parts"]["ranks"], start=1):
            part_of |= dict.fromkeys(ranks, number)
    files = PieceFiles(
        layout, world, lambda rank: holders[part_of[rank]], lambda rank: own[part_of[rank]]
    )
    tensors = {part: files.tensors(part) for part in layout.parts}
    return SavedState(candidate.step, tensors, facts["numbers"]), damaged, bool(damaged)


def _absent(
    folder: Path,
    candidate: _Candidate,
    lacking: list[int],
    part: int,
    manifest: Manifest,
    layouts: Mapping[int, Layout],
) -> str:
    """The message on missing parts: their nodes and files."""
    told = manifest.facts["parts"]
    missing = []
    for number in lacking:
        ranks = told["ranks"][number - 1]
        files = layouts[part].files(ranks)
        more = f" and {len(files) - _MOST_NAMED} more" if len(files) > _MOST_NAMED else ""
        missing.append(
            f"part {number} of {told['hosts'][number - 1]} (ranks "
            f"{', '.join(map(str, ranks[:_MOST_NAMED]))}{'...' if ranks[_MOST_NAMED:] else ''}: "
            f"{', '.join(files[:_MOST_NAMED])}{more})"
        )
    path = step_folder(folder, candidate.step, lacking[0], candidate.num_parts)
    return (
        f"{step_folder(folder, candidate.step)} must have all {candidate.num_parts} parts, one of "
        f"each node that wrote it; got none of {'; '.join(missing)}. Start on that node too, or "
        f"copy its {path} to the same place on one of these."
    )


def _step_of(manifest: Manifest, folder: Path) -> int:
    """The step of a checkpoint, verified against its folder."""
    step, numbers = manifest.facts.get("step"), manifest.facts.get("numbers")
    _, part, num_parts = _named(folder)
    if not isinstance(step, int) or step_folder(folder.parent, step, part, num_parts) != folder:
        raise CheckpointError(f"{folder} must be a checkpoint of its step; got step {step!r}.")
    if not isinstance(numbers, dict):
        raise CheckpointError(f"{folder} must be a checkpoint with numbers; got {numbers!r}.")
    return step


def _put_aside(folder: Path) -> None:
    """Rename a damaged checkpoint, so that it is not tried again and the user can inspect it."""
    for number in range(100):
        aside = folder.with_name(f"damaged-{folder.name}-{number}")
        if aside.exists():
            continue
        try:
            os.rename(folder, aside)
        except OSError:  # a read-only folder: it will be found damaged again
            return
        return
