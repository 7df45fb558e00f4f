"""What a model starts from: a base, and perhaps an adapter on it.

A model that was trained with adapters is saved twice, merged and as an adapter. Where the base is
quantized, or is to be one for several models, the adapter is what counts: merged weights quantized
again round most of what the adapter learned back to where they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.errors import ModelError
from tandem.models.save import ADAPTER_FOLDER
from tandem.models.source import Located, adapter_base, locate, read_adapter_config


@dataclass(frozen=True, slots=True)
class Start:
    """What a model is loaded from.

    base: a folder or hub name of a whole model. adapter: the folder of an adapter on it.
    classifies: the adapter is a scalar model's, and brings its head.
    """

    base: str
    adapter: str | None = None
    classifies: bool = False


def start_of(path: str, *, unmerged: bool = False) -> Start:
    """Find what a folder or hub name stands for.

    Args:
        unmerged: take the adapter inside a folder of merged weights, where there is one, and its
            base, instead of the merged weights.
    Raises:
        ModelError: there is no such model, or not the base that its adapter names.
    """
    source = locate(path)
    adapter = read_adapter_config(source)
    if adapter is None and unmerged and source.folder is not None:
        source = Located(str(source.folder / ADAPTER_FOLDER))
        adapter = read_adapter_config(source)
    if adapter is None:
        return Start(locate(path).name)
    try:
        base = adapter_base(source, adapter)
    except ModelError as error:
        if not unmerged:
            raise
        raise ModelError(
            f"{error} It is the base of the adapter {source.name!r}, which --frozen-weights and "
            "--shared-base load instead of merged weights."
        ) from error
    return Start(base.name, source.name, adapter.get("task_type") == "SEQ_CLS")


def same_base(one: str, other: str) -> bool:
    """Whether two names are of one model: the same folder, or the same hub name."""
    return one == other or (
        Path(one).is_dir() and Path(other).is_dir() and Path(one).resolve() == Path(other).resolve()
    )
