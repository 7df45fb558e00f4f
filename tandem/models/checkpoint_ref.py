"""What a model starts from: a base, and perhaps an adapter on it.

A model that was trained with adapters is saved twice, merged and as an adapter. If the base is
quantized, or shared by several models, the adapter is loaded: quantizing merged weights would round
most of what the adapter learned away.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.errors import ModelError
from tandem.models.save import ADAPTER_FOLDER
from tandem.models.source import Located, adapter_base, locate, read_adapter_config

_READ = {".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".py"}
_READ_BY_NAME = {"vocab.txt", "merges.txt"}


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """What a model is loaded from.

    base: a folder or hub name of a whole model. adapter: the folder of an adapter on it.
    classifies: the adapter is a scalar model's, and brings its head.
    """

    base: str
    adapter: str | None = None
    classifies: bool = False


def checkpoint_ref_of(path: str, *, unmerged: bool = False) -> CheckpointRef:
    """Find the base and the adapter that a folder or hub name refers to.

    Args:
        unmerged: if a folder of merged weights also has the adapter, take that and its base.
    Raises:
        ModelError: there is no such model, or not the base that its adapter names.
    """
    source = locate(path)
    adapter = read_adapter_config(source)
    if adapter is None and unmerged and source.folder is not None:
        source = Located(str(source.folder / ADAPTER_FOLDER))
        adapter = read_adapter_config(source)
    if adapter is None:
        return CheckpointRef(locate(path).name)
    try:
        base = adapter_base(source, adapter)
    except ModelError as error:
        if not unmerged:
            raise
        raise ModelError(
            f"{error} It is the base of the adapter {source.name!r}, which --frozen-weights, "
            "--shared-base and --weights load instead of merged weights."
        ) from error
    return CheckpointRef(base.name, source.name, adapter.get("task_type") == "SEQ_CLS")


def model_folders(path: str) -> list[Path]:
    """The local folders that a model is read from: its own and, for an adapter, its base's. Empty
    for a hub name.

    Raises:
        ModelError: there is no such model, or not the base that its adapter names.
    """
    source = locate(path)
    if source.folder is None:
        return []
    folders = [source.folder]
    for adapted in (source, Located(str(source.folder / ADAPTER_FOLDER))):
        adapter = read_adapter_config(adapted)
        if adapter is None:
            continue
        try:
            base = adapter_base(adapted, adapter)
        except ModelError:
            if adapted is source:
                raise
            continue  # merged weights do not need it; loading the adapter itself would fail
        if base.folder is not None:
            folders.append(base.folder)
    return folders


def model_files(folder: Path) -> list[Path]:
    """The files of a model's folder that change what is loaded: weights, config, generation
    settings, tokenizer, chat template, adapter, code; sorted. Not a manifest or a model card."""
    found = [
        path
        for place in ("", ADAPTER_FOLDER, "additional_chat_templates")
        for path in (folder / place).glob("*")
        if path.suffix in _READ or path.name in _READ_BY_NAME
    ]
    return sorted(path for path in found if path.name != "MANIFEST.json" and path.is_file())


def same_base(one: str, other: str) -> bool:
    """Whether two names refer to one model: the same folder, or the same hub name."""
    return one == other or (
        Path(one).is_dir() and Path(other).is_dir() and Path(one).resolve() == Path(other).resolve()
    )
