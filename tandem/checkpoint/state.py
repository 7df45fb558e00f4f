"""Training state in numbered folders: save, keep the last few, load the newest whole one.

Safetensors and JSON only; nothing that is loaded can run code.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.checkpoint.folder import MANIFEST, read_facts, write_folder
from tandem.errors import CheckpointError
from tandem.parallel.pieces import whole
from tandem.parallel.world import World

_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class State:
    """What a stage continues from: tensors by part ("actor", "actor_optimizer"), and numbers."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    numbers: Mapping[str, Any]


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of one safetensors file by name, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Reads the names alone."""
        self._file = safe_open(path, framework="pt")
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def save_state(folder: Path, state: State, *, keep: int, world: World | None = None) -> None:
    """Write `folder/step-N`, then remove all but the newest `keep`.

    Tensors in pieces are written whole, so that any number of ranks can continue from them; they
    are gathered one at a time, and the parts' files are written by the ranks in turn.

    Raises:
        CheckpointError: the disk refused; older checkpoints are untouched.
    """
    ranks = world or World()

    def fill(aside: Path) -> None:
        for number, (part, tensors) in enumerate(state.tensors.items()):
            is_writer = number % ranks.size == ranks.rank
            flat = {}
            for name, tensor in tensors.items():
                full = whole(tensor.detach())
                if is_writer:
                    # Cloning tensors that share storage (tied weights) is what safetensors asks.
                    flat[name] = full.cpu().contiguous().clone()
            if is_writer:
                save_file(flat, aside / f"{part}.safetensors")
        if ranks.is_first:
            (aside / "numbers.json").write_text(json.dumps(dict(state.numbers)), encoding="utf-8")

    write_folder(folder / f"step-{state.step:06d}", fill, {"step": state.step}, world=ranks)
    for old in () if not ranks.is_first else _numbered(folder)[:-keep]:
        # The manifest first: a half-removed folder must not look whole.
        (old / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)


def load_newest_state(folder: Path) -> tuple[State | None, list[str]]:
    """The newest checkpoint that is whole, and a line for each newer one that is not.

    Returns:
        (None, notes) where there is none: the stage starts from its beginning.
    """
    notes: list[str] = []
    for candidate in reversed(_numbered(folder)):
        try:
            return _load(candidate), notes
        except CheckpointError as error:
            notes.append(f"{error} Falling back to the checkpoint before it.")
    return None, notes


def newest_numbers(folder: Path) -> Mapping[str, Any] | None:
    """The numbers of the newest checkpoint, unverified and without its tensors: a quick look."""
    for candidate in reversed(_numbered(folder)):
        try:
            return dict(json.loads((candidate / "numbers.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
    return None


def _load(folder: Path) -> State:
    facts = read_facts(folder)
    try:
        tensors = {path.stem: SavedTensors(path) for path in folder.glob("*.safetensors")}
        numbers = json.loads((folder / "numbers.json").read_text(encoding="utf-8"))
        return State(int(facts["step"]), tensors, numbers)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} must be a checkpoint; got none ({error}).") from None


def _numbered(folder: Path) -> list[Path]:
    """Finished checkpoint folders, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        (path for path in folder.iterdir() if _NAME.fullmatch(path.name)),
        key=lambda path: int(path.name.removeprefix("step-")),
    )
