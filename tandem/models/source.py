"""From a folder or a hub name to a config; every failure is a one-line ModelError."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from tandem.errors import ModelError
from tandem.files import folder_near
from tandem.models.composite import layer_numbers, names_beside_parts, text_config, text_part
from tandem.models.folder import read_headers, read_object
from tandem.models.hf_logging import quiet
from tandem.models.hub_name import base_of, with_revision
from tandem.models.text_families import has_equal
from tandem.models.validate_checkpoint import check_folder, check_weights
from tandem.text import cause_of, counted, is_unicode, one_line, visible

ADAPTER_CONFIG = "adapter_config.json"
_HUB_TIMEOUT_SECONDS = 10.0
_SHOWN = 3
"""Files of a folder that is no model which are named."""
_SAVED_DTYPE = "tandem_saved_dtype"
"""The attribute in which a model keeps the dtype of its checkpoint."""
_LAYER_NUMBERS = "tandem_layer_numbers"
"""The attribute in which it keeps how its checkpoint counts its layers."""


@dataclass(frozen=True, slots=True)
class Located:
    """A model that exists: the arguments of `from_pretrained`.

    name: a folder, or a hub name as it was given. offline: the hub does not answer, so its cache is
    used. commit: the hub's commit; empty for a folder.
    """

    name: str
    offline: bool = False
    commit: str = ""

    @property
    def repository(self) -> str:
        """The folder, or the hub name without the revision behind `@`."""
        return self.name if self.folder is not None else with_revision(self.name)[0]

    @property
    def options(self) -> dict[str, Any]:
        """How `from_pretrained` opens the repository."""
        revision = "" if self.folder is not None else with_revision(self.name)[1]
        return {"local_files_only": self.offline, "revision": revision or None}

    @property
    def folder(self) -> Path | None:
        """The local folder, or None for a hub name."""
        path = Path(self.name)
        return path if path.is_dir() else None


def locate(path: str | Path) -> Located:
    """Find a model folder or hub name before anything is loaded.

    A name that looks like a path (absolute, with `.`, `~` or more than one `/`) is never looked
    up in the hub. If the hub does not answer, its cache is used. `NAME@REVISION` is a branch, a
    tag or a commit of a hub model.

    Raises:
        ModelError: neither a folder nor a model that the hub or its cache has, or a folder whose
            small files point elsewhere (see `validate_checkpoint.check_folder`).
    """
    text = str(path)
    try:
        folder = Path(text).expanduser()
        is_folder = bool(text) and folder.is_dir()
    except (RuntimeError, OSError, ValueError) as error:  # ~nobody, a name of a megabyte
        raise ModelError(
            f"model {text[:100]!r} must be a valid folder or hub name; got "
            f"{one_line(error)[:100]}. Check the spelling."
        ) from error
    if not is_unicode(text):
        raise ModelError(
            f"model {text!r} must have a name in UTF-8; got other bytes. Rename the folder."
        )
    if is_folder:
        check_folder(folder)
        return Located(str(folder))
    name, revision = with_revision(text)
    is_path = folder.is_absolute() or text.startswith((".", "~")) or name.count("/") > 1
    if is_path or folder.exists() or not text:
        raise ModelError(
            f"model {text!r} must be a folder with config.json; got "
            f"{'a file' if folder.is_file() else 'no such folder'}. "
            + _meant(folder, "Give a model's folder or its hub name.")
        )
    if not revision and "@" in text:
        raise ModelError(
            f"model {text!r} must be NAME@REVISION; got no revision behind the @. Name a branch, a "
            "tag or a commit, or remove the @."
        )
    try:
        info = HfApi().model_info(name, revision=revision or None, timeout=_HUB_TIMEOUT_SECONDS)
    except Exception as error:  # the client raises many kinds of errors
        if cached := _in_cache(name, revision):
            return Located(text, offline=True, commit=cached.parent.name)
        raise ModelError(
            f"model {text!r} must be a folder or a reachable hub name; got no folder "
            f"{os.path.abspath(folder)!r}, nothing in the hub's cache, and from the hub: "
            f"{cause_of(error)}. "
            f"{_meant(folder, 'Check the spelling, or copy the model here and give its folder.')}"
        ) from error
    return Located(text, commit=str(info.sha or ""))


def _meant(folder: Path, otherwise: str) -> str:
    """What to do about a folder that is not there: the one beside it that is called alike."""
    near = "" if folder.exists() else folder_near(folder)
    return f"Did you mean {visible(near)}?" if near else otherwise


def _in_cache(name: str, revision: str) -> Path | None:
    """The config.json of a model in the hub's cache, in a folder named by its commit."""
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision or None)
    except ValueError:  # not a name that the hub could have
        return None
    return Path(found) if isinstance(found, str) else None


def require_config(source: Located) -> None:
    """Refuse a folder that is not a model.

    Raises:
        ModelError: it has no config.json, or one whose text_config is no object.
    """
    if source.folder is not None and not (source.folder / "config.json").exists():
        raise _no_config(source.name, source.folder)
    if source.folder is not None:
        try:
            text = read_object(source.folder / "config.json").get("text_config", {})
        except ModelError:
            return  # reading the model will tell
        if not isinstance(text, dict):
            raise ModelError(
                f"text_config of {source.name!r} must be an object of a config's settings; got "
                f"{type(text).__name__}. Copy or save the model again."
            )


def _no_config(name: str, folder: Path) -> ModelError:
    """What is said of a folder without config.json."""
    held = sorted(path.name for path in folder.iterdir())
    models = [held_name for held_name in held if (folder / held_name / "config.json").is_file()]
    found, advice = "an empty folder", "Give a model's folder or its hub name."
    if held:
        listed = ", ".join(held[:_SHOWN]) + ", ..." * (len(held) > _SHOWN)
        found = f"one that holds {counted(len(held), 'other')}: {visible(listed)}"
    if models:
        advice = f"{visible(models[0])} in it has a config.json: give {str(folder / models[0])!r}."
    return ModelError(f"model {name!r} must be a folder with config.json; got {found}. {advice}")


def load_config(source: Located, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's config, of an adapter's folder its base's, checked against the weights there.

    Of a model with image or audio parts it is the text decoder's (`composite`).

    Raises:
        ModelError: config.json is missing or broken, names a family that transformers does not
            know, or needs remote code that was not allowed; or as `check_weights`.
    """
    source = whole_model(source)
    require_config(source)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(
                source.repository, trust_remote_code=trust_remote_code, **source.options
            )
    except Exception as error:  # OSError, ValueError, KeyError, the strict config's own errors
        raise ModelError(
            f"model {source.name!r} must have a config.json that transformers reads; got: "
            f"{cause_of(error)}. Check the folder, or update transformers; "
            "--trust-remote-code allows a model's own code."
        ) from error
    if not isinstance(config, PreTrainedConfig):
        raise ModelError(
            f"model {source.name!r} must have a config.json with a model_type; got none. "
            "Copy or save the model again."
        )
    if text_config(config) is not None:
        config = text_part(config, files_of(source))
    if source.folder is not None:
        check_weights(source.folder, config, trust_remote_code=trust_remote_code)
    return config


def files_of(source: Located) -> Path:
    """The folder of a model's weights and settings; from the hub they are downloaded."""
    if source.folder is not None:
        return source.folder
    patterns = ["*.safetensors", "*.json"]
    return Path(snapshot_download(source.repository, allow_patterns=patterns, **source.options))


def read_names(source: Located) -> list[str]:
    """The names of a model's tensors in its files; of the hub's, if the model has several parts.

    Raises:
        ModelError: a file is damaged.
    """
    if source.folder is None and not _has_parts(_config_dict(source)):
        return []
    return [tensor.name for tensor in read_headers(files_of(source))]


def whole_family(source: Located) -> str:
    """The family of a model with image or audio parts of which only the text decoder is loaded; ""
    for any other."""
    found = _config_dict(whole_model(source))
    return str(found.get("model_type", "")) if _has_parts(found) else ""


def _has_parts(config: dict[str, Any]) -> bool:
    """Whether config.json is of a model with image or audio parts; older ones of Qwen2-VL have the
    decoder's settings beside the image part's."""
    return "text_config" in config or has_equal(str(config.get("model_type")))


def names_in(source: Located, *, scalar: bool) -> Callable[[str], str]:
    """From a decoder's layer to what PEFT finds it under, in the module that transformers makes of
    the whole model: its own name unless that has image or audio parts too
    (`composite.names_beside_parts`).

    Args:
        scalar: of a sequence-classification model.
    """
    if not _has_parts(_config_dict(source)):
        return str
    with quiet():
        config = AutoConfig.from_pretrained(source.repository, **source.options)
    return names_beside_parts(config, read_names(source), scalar=scalar)


def _config_dict(source: Located) -> dict[str, Any]:
    """config.json as it stands."""
    found: dict[str, Any]
    with quiet():
        found, _ = PreTrainedConfig.get_config_dict(source.repository, **source.options)
    return found


def positions_in(config: PreTrainedConfig) -> int | None:
    """Most tokens of a sequence of the model; None if it has no limit."""
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit


def keep_layer_numbers(model: PreTrainedModel, stored: Iterable[str]) -> None:
    """Remember how the model's layers are counted in the files that it comes from.

    Args:
        stored: the names in the files.
    """
    model.__dict__[_LAYER_NUMBERS] = layer_numbers(stored)


def kept_layer_numbers(model: PreTrainedModel) -> list[int]:
    """As `composite.layer_numbers`; [] where they are counted as the model's are."""
    found: list[int] = model.__dict__.get(_LAYER_NUMBERS, [])
    return found


def keep_saved_dtype(model: PreTrainedModel, dtype: object) -> None:
    """Remember the dtype of the checkpoint that a model comes from; the first call wins.

    Args:
        dtype: anything but a floating-point dtype, as from a config without one, means float32.
    """
    known = dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
    model.__dict__.setdefault(_SAVED_DTYPE, known)


def saved_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of the checkpoint that the model comes from; its own if it comes from none."""
    found: torch.dtype = model.__dict__.get(_SAVED_DTYPE, model.dtype)
    return found


def read_adapter_config(source: Located) -> dict[str, Any] | None:
    """The PEFT adapter_config.json of a local folder; None if there is none.

    Raises:
        ModelError: the file is not a JSON object.
    """
    if source.folder is None or not (source.folder / ADAPTER_CONFIG).is_file():
        return None
    return read_object(source.folder / ADAPTER_CONFIG)


def classifies(adapter: str) -> bool:
    """Whether an adapter's folder holds a scalar model's, which brings its head."""
    found = read_adapter_config(Located(adapter)) or {}
    return found.get("task_type") == "SEQ_CLS"


def whole_model(source: Located) -> Located:
    """The model itself or, of an adapter's folder, the base that it names.

    Raises:
        ModelError: it is an adapter without a base (see `adapter_base`).
    """
    adapter = read_adapter_config(source)
    return source if adapter is None else adapter_base(source, adapter)


def adapter_base(source: Located, adapter: dict[str, Any]) -> Located:
    """The base model that an adapter folder names; a relative path may start at that folder.

    Raises:
        ModelError: no base is named, it does not exist, or it is an adapter itself.
    """
    name = base_of(adapter, source.name)
    if not name:
        raise ModelError(
            f"{source.name!r}: {ADAPTER_CONFIG} must name its base model; got "
            f"base_model_name_or_path={adapter.get('base_model_name_or_path')!r}. Put the base "
            "model's folder there."
        )
    beside = Path(source.name) / name
    base = locate(beside if not os.path.isdir(name) and os.path.isdir(beside) else name)
    if base.folder is not None and not (base.folder / "config.json").is_file():
        raise ModelError(
            f"the base model of adapter {source.name!r} must be a whole model; got {base.name!r}, "
            "which has no config.json. Merge that adapter first."
        )
    return base
