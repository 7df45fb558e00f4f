"""From a folder or a hub name to a config and weights, every failure as a one-line ModelError."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from tandem.errors import ModelError
from tandem.models.quiet import quiet

ADAPTER_CONFIG = "adapter_config.json"
_HUB_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Located:
    """A model that exists: what `from_pretrained` is told.

    name: a folder or a hub name. offline: take it from the hub's cache, the hub does not answer.
    """

    name: str
    offline: bool = False

    @property
    def folder(self) -> Path | None:
        """The local folder, or None for a hub name."""
        path = Path(self.name)
        return path if path.is_dir() else None


def one_line(error: BaseException) -> str:
    """What an error says, in at most 300 characters of one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def locate(path: str | Path) -> Located:
    """Find a model folder or hub name before anything is loaded.

    A name that looks like a path (absolute, with `.`, `~` or more than one `/`) is never asked of
    the hub. A hub that does not answer is asked once, and its cache used where it has the model.

    Raises:
        ModelError: neither a folder nor a model that the hub or its cache has.
    """
    text = str(path)
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return Located(str(folder))
    is_path = folder.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1
    if is_path or folder.exists() or not text:
        raise ModelError(
            f"model {text!r} must be a folder with config.json; got "
            f"{'a file' if folder.is_file() else 'no such folder'}. Give a model's folder or its "
            "hub name."
        )
    try:
        HfApi().model_info(text, timeout=_HUB_TIMEOUT_SECONDS)
    except Exception as error:  # whichever error the client raises, the answer is the same
        if isinstance(try_to_load_from_cache(text, "config.json"), str):
            return Located(text, offline=True)
        raise ModelError(
            f"model {text!r} must be a folder or a reachable hub name; got no folder "
            f"{str(folder.resolve())!r}, nothing in the hub's cache, and from the hub: "
            f"{one_line(error)}. Check the spelling, or copy the model here and give its folder."
        ) from error
    return Located(text)


def load_config(source: Located, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's config.

    Raises:
        ModelError: config.json is missing or broken, names a family that transformers does not
            know, or needs remote code that was not allowed.
    """
    try:
        with quiet():
            return AutoConfig.from_pretrained(
                source.name, trust_remote_code=trust_remote_code, local_files_only=source.offline
            )
    except Exception as error:  # OSError, ValueError, KeyError, the strict config's own errors
        raise ModelError(
            f"model {source.name!r} must have a config.json that transformers reads; got: "
            f"{one_line(error)}. Check the folder, or update transformers; "
            "--trust-remote-code allows a model's own code."
        ) from error


def load_weights(
    auto_class: Any,
    source: Located,
    config: PreTrainedConfig,
    *,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[PreTrainedModel, set[str], set[str]]:
    """Run `auto_class.from_pretrained` in float32, from safetensors alone.

    Returns:
        the model in eval mode, the names it has and the files lack, the names only the files have.
    Raises:
        ModelError: pickled weights, damaged or truncated files, tensors of the wrong shape.
    """
    _refuse_pickle(source)
    try:
        with quiet():
            model, report = auto_class.from_pretrained(
                source.name,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
                local_files_only=source.offline,
                **options,
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"weights of {source.name!r} must be complete safetensors files that fit config.json; "
            f"got: {one_line(error)}. Copy or save the model again."
        ) from error
    return model.eval(), set(report["missing_keys"]), set(report["unexpected_keys"])


def read_adapter_config(source: Located) -> dict[str, Any] | None:
    """The PEFT adapter_config.json of a local folder; None where there is none.

    Raises:
        ModelError: the file is no JSON object.
    """
    if source.folder is None or not (source.folder / ADAPTER_CONFIG).is_file():
        return None
    file = source.folder / ADAPTER_CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(
            f"{file} must be JSON; got: {one_line(error)}. Save the adapter again."
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            f"{file} must hold a JSON object; got {type(config).__name__}. Save the adapter again."
        )
    return config


def adapter_base(source: Located, adapter: dict[str, Any]) -> Located:
    """The base model that an adapter folder names; a relative path may start at that folder.

    Raises:
        ModelError: no base is named, it does not exist, or it is an adapter itself.
    """
    name = adapter.get("base_model_name_or_path")
    if not name:
        raise ModelError(
            f"{source.name}/{ADAPTER_CONFIG} must name its base model; got "
            f"base_model_name_or_path={name!r}. Put the base model's folder there."
        )
    beside = Path(source.name) / name
    base = locate(beside if not Path(name).is_dir() and beside.is_dir() else name)
    if base.folder is not None and not (base.folder / "config.json").is_file():
        raise ModelError(
            f"the base model of adapter {source.name!r} must be a whole model; got {base.name!r}, "
            "which has no config.json. Merge that adapter first."
        )
    return base


def _refuse_pickle(source: Located) -> None:
    """Refuse a local folder that has weights, but none in safetensors."""
    if source.folder is None or any(source.folder.glob("*.safetensors")):
        return
    pickled = sorted(
        p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in source.folder.glob(pattern)
    )
    if pickled:
        raise ModelError(
            f"model {source.name!r} must have safetensors weights; got {pickled[0]}, a pickle, "
            'which can run code when it is read. If you trust it, convert it: python -c "from '
            "transformers import AutoModelForCausalLM as M; M.from_pretrained("
            f"{source.name!r}, use_safetensors=False).save_pretrained('NEW_FOLDER')\" and copy "
            "the tokenizer's files there."
        )
    raise ModelError(
        f"model {source.name!r} must hold *.safetensors files; got none. Give the folder that "
        "save_pretrained wrote."
    )
