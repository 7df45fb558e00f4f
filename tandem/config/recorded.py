"""Where the files that a run's knobs name are, seen from another folder than the run was made in.

config.yaml keeps names as they were written. The run's environment.json says from which folder, and
where its models were if they were folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.config.load import build_config, config_knobs, knob_value, plain_values, set_knob
from tandem.config.schema import RunConfig

ENVIRONMENT_FILE = "environment.json"
"""Of a run's folder."""
_FOLDER = "folder"
MODELS = ("actor_model", "reward_model", "reference_model", "critic_model")
"""The knobs that name a model."""


def places(config: RunConfig) -> dict[str, str]:
    """What a run records: the working folder, and the whole path of each model that is a folder."""
    models = {knob: Path(str(knob_value(config, knob))).expanduser() for knob in MODELS}
    found = {k: str(model.absolute()) for k, model in models.items() if _named(config, k, model)}
    return {_FOLDER: str(Path.cwd()), **found}


def with_found_models(config: RunConfig, run: Path) -> RunConfig:
    """A run's configuration with its models where they are now, see `found_model`."""
    changed = {k: found_model(knob_value(config, k), run, k) for k in MODELS}
    return replace(config, **changed)  # type: ignore[arg-type]


def with_found(config: RunConfig, run: Path) -> RunConfig:
    """The same with all files that knobs name: one that is not where its relative name says, but is
    there from the run's working folder, is named from there."""
    config = with_found_models(config, run)
    folder = _recorded(run).get(_FOLDER, "")
    values: dict[str, Any] = plain_values(config)
    if not folder:
        return config
    for name, knob in config_knobs():
        if knob.metadata.get("path") and name != "output_dir":
            set_knob(values, name, _each(knob_value(config, name), lambda n: _from(folder, n)))
    return build_config(values)


def found_model(name: str, run: Path, knob: str) -> str:
    """A model that a run's knob names: by that name, or where it was when the run was made, or, if
    it moved with the run, beside or in it. Its whole path if it was a folder and is nowhere."""
    if not name or is_folder(name):
        return name
    was, last = _recorded(run).get(knob, ""), Path(name).name
    for place in (was, run / last, run.parent / last):
        if last and place and _holds_model(Path(place)):
            return str(place)
    return was or name


def is_gone(model: str) -> bool:
    """Whether a model's name can only be a folder's, and there is no such folder."""
    is_path = model.startswith((".", "~")) or Path(model).is_absolute() or model.count("/") > 1
    return is_path and not is_folder(model)


def base_gone(run: str | Path, model: str) -> str:
    """What to say of a run whose base model is gone; what to do about it comes behind."""
    return f"the base model of {run} must be a folder that is there; got {model!r}, which is not"


def _named(config: RunConfig, knob: str, model: Path) -> bool:
    return bool(knob_value(config, knob)) and is_folder(str(model))


def is_folder(name: str) -> bool:
    """Whether a model's name is that of a folder that is there."""
    try:
        return Path(name).expanduser().is_dir()
    except (OSError, RuntimeError, ValueError):  # ~nobody, a name of a megabyte
        return False


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _recorded(run: Path) -> dict[str, str]:
    """What `places` has recorded; empty in runs from before and where the file is damaged."""
    try:
        found = json.loads((run / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    known = (_FOLDER, *MODELS)
    return {k: str(found[k]) for k in known if k in found} if isinstance(found, dict) else {}


def _each(value: Any, found: Callable[[str], str]) -> Any:
    return [found(name) for name in value] if isinstance(value, tuple) else found(value)


def _from(folder: str, name: str) -> str:
    """A name as it is, or from the folder if the file at its beginning is only there."""
    for head in (name, name.partition("?")[0], name.partition(":")[0], name.rpartition(":")[0]):
        try:
            is_there = bool(head) and not Path(head).exists() and (Path(folder) / head).exists()
        except (OSError, ValueError):
            continue
        if is_there and not Path(head).is_absolute():
            return str(Path(folder) / name)
    return name
