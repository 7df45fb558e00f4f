"""Check models that a run or a chat is given against the manifest beside their weights."""

from __future__ import annotations

from pathlib import Path

from tandem.checkpoint.folder import MANIFEST, check_files, read_manifest, together
from tandem.errors import CheckpointError
from tandem.parallel.world import World

PARTS = ("actor", "critic", "ema", "adapter")
"""Folders inside a finished stage's, covered by its manifest."""


def manifest_above(folder: Path) -> Path | None:
    """The folder with the manifest that covers a model's: itself, or the finished stage's of which
    it is a part; None if there is none."""
    top = folder.resolve()
    while top.name in PARTS and not (top / MANIFEST).exists():
        top = top.parent
    return top if (top / MANIFEST).exists() else None


def verify_beside(folder: Path, *, world: World | None = None) -> None:
    """Check a model's folder against its manifest, if there is one: in the folder, or above a part
    of a finished stage's (ppo/actor, sft/adapter).

    Args:
        world: the ranks that check together, each its share of the files.
    Raises:
        CheckpointError: the manifest is damaged, or a file that it names is missing or changed.
    """
    world = world or World()
    folder = folder.resolve()
    top = manifest_above(folder)
    if top is None:
        return
    try:
        manifest = read_manifest(top)
        inside = folder.relative_to(top).as_posix()
        names = [n for n in manifest.entries if inside == "." or n.startswith(f"{inside}/")]
        mine = world.share(names)
        together(lambda: check_files(top, manifest, mine, again=False), folder, world)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} Copy the model again from where it is whole; a {MANIFEST} that is not "
            "Tandem's must not be there."
        ) from None
