"""A model folder's files, read without trust: JSON objects, the index, safetensors headers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tandem.errors import ModelError
from tandem.tensor_files import open_tensors
from tandem.text import cause_of, one_line

INDEX = "model.safetensors.index.json"
_MOST_JSON_BYTES = 2**26
_ROWS = 8192


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it; dtype as safetensors writes it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ModelError: it holds anything else, or more than 64 MiB.
    """
    require_small(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(
            f"{str(file)!r} must be JSON; got: {cause_of(error)}. Copy or save it again."
        ) from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{str(file)!r} must hold a JSON object; got {type(content).__name__}. "
            "Copy or save it again."
        )
    return content


def require_small(file: Path) -> None:
    """Refuse a JSON file that is too large for a model's settings.

    Raises:
        ModelError: it has more than 64 MiB.
    """
    if file.exists() and (size := file.stat().st_size) > _MOST_JSON_BYTES:
        raise ModelError(
            f"{str(file)!r} must have at most {_MOST_JSON_BYTES} bytes; got {size}. Copy or save "
            "the model again."
        )


def read_index(folder: Path) -> dict[str, str] | None:
    """The folder's index, from weights to files in it; None if it has none.

    Raises:
        ModelError: it is not an index, or names anything but safetensors files of this folder.
    """
    if not (folder / INDEX).exists():
        return None
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{str(folder / INDEX)!r} must have a weight_map from weights to files; got "
            f"{type(weight_map).__name__}. Copy or save the model again."
        )
    for file in weight_map.values():
        if not _is_own_weights(file):
            raise ModelError(
                f"{str(folder / INDEX)!r} must name safetensors files of its own folder; got "
                f"{file!r:.100}. Do not use this folder unless you know who made it."
            )
    return weight_map


def read_headers(folder: Path) -> list[StoredTensor]:
    """Every tensor of the folder's safetensors files, from the headers alone.

    Raises:
        ModelError: a file is damaged.
    """
    found: list[StoredTensor] = []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with open_tensors(file) as opened:
                for name in opened.keys():  # noqa: SIM118, it is not a mapping
                    view = opened.get_slice(name)
                    shape, dtype = tuple(view.get_shape()), str(view.get_dtype())
                    found.append(StoredTensor(file, name, shape, dtype))
        except (SafetensorError, OSError) as error:
            raise incomplete(folder, f"{one_line(error)} in {file.name!r}") from error
    return found


def is_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors in files are the same; read in parts, up to where they differ."""
    if first.shape != second.shape:
        return False
    with (
        open_tensors(first.file) as one,
        open_tensors(second.file) as other,
    ):
        views = one.get_slice(first.name), other.get_slice(second.name)
        starts = range(0, first.shape[0] if first.shape else 0, _ROWS)
        return all(torch.equal(*(view[at : at + _ROWS] for view in views)) for at in starts)


def incomplete(folder: Path, found: str) -> ModelError:
    """The error for weight files that are damaged or incomplete."""
    return ModelError(
        f"weights of {str(folder)!r} must be complete safetensors files; got: {found}. Copy or "
        "save the model again."
    )


def _is_own_weights(file: Any) -> bool:
    is_plain = isinstance(file, str) and "/" not in file and "\\" not in file and "\0" not in file
    return is_plain and file.endswith(".safetensors") and not file.startswith(".")
