"""What a step's outcome depends on, so that one made from something else is not taken for it."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from tandem.checkpoint.folder import MANIFEST, read_manifest
from tandem.config.load import config_knobs, dump_config
from tandem.config.schema import RunConfig
from tandem.config.spellings import RENAMED
from tandem.config.stages import stage_of
from tandem.errors import CheckpointError
from tandem.files import at_once, sha256, sha256_once
from tandem.models.checkpoint_ref import model_files, model_folders
from tandem.models.source import locate
from tandem.parallel.world import World
from tandem.training.reward_function import source_files

# What every step's outcome depends on, beside its section and what its record names.
_SHARED = (
    "seed",
    "dtype",
    "save_dtype",
    "dropout",
    "dataset",
    "lora",
    "data",
    "guards",
    "parallel.frozen_weights",
)
# These change what is measured or shown on the way, never what comes out.
_HARMLESS = ("eval_every", "eval_prompts", "max_skipped")


class Identity:
    """The knobs, rows, models and code that the steps of a run are made from.

    Attributes:
        fingerprints: of the rows by kind (`data`, `sft_data`, `ptx_data`), once they have been
            read.
    """

    def __init__(self, config: RunConfig, path: Path, world: World) -> None:
        """`path` is the run's folder."""
        self.config = config
        self.path = path
        self.world = world
        self.fingerprints: dict[str, list[str]] = {}
        self._digests: dict[str, dict[str, str]] = {}

    def made_from(self, step: str) -> dict[str, Any]:
        """What the step's outcome depends on: knobs by dotted name, and digests of the rows, the
        models' files, the earlier steps and the reward function's code."""
        stage = stage_of(step)
        depends_on = {*_SHARED, *stage.knobs, stage.section}
        if stage.after:  # it may carry on adapters that share their base
            depends_on.add("parallel.shared_base")
        made_from = self.knobs(
            name
            for name, _ in config_knobs()
            if {name, name.split(".")[0]} & depends_on
            and name.split(".")[-1] not in _HARMLESS
            and (_knob_value(self.config, name) or not name.startswith("parallel."))
        )
        # Every step takes the policy's tokenizer from the given model, and no weights from it that
        # an earlier step has trained on.
        given = {"actor_model"} | ({"reward_model"} & made_from.keys())
        for name in stage.after:
            manifest = self.path / name / MANIFEST
            if manifest.exists():
                entries = read_manifest(self.path / name).entries
                made_from[f"the {name} step"] = {n: entry.sha256 for n, entry in entries.items()}
            else:
                given.add(stage_of(name).given)
        for knob in sorted(given):
            made_from[knob] = _knob_value(self.config, knob)
            made_from[f"the files of {knob}"] = self.files_of(knob)
        if stage.family == "rl" and self.config.ppo.reward_function:
            made_from["the reward function"] = self.reward_function()
        for kind in stage.data:
            if kind in self.fingerprints:
                made_from[f"the rows of {kind}"] = self.fingerprints[kind]
        return made_from

    def knobs(self, names: Iterable[str]) -> dict[str, Any]:
        """Values by dotted name, as JSON has them."""
        return {name: _json_value(_knob_value(self.config, name)) for name in names}

    def files_of(self, knob: str) -> dict[str, str]:
        """What the model that `actor_model` or `reward_model` names is loaded from: the SHA-256 of
        each of its files, those of an adapter's base too, or a hub name's commit."""
        model = str(_knob_value(self.config, knob))
        if model and model not in self._digests:
            self._digests[model] = self._digests_of(model)
        return self._digests[model] if model else {}

    def reward_function(self) -> dict[str, str]:
        """The SHA-256 of each source file of the reward function's."""
        files = source_files(self.config.ppo.reward_function)
        return {path.name: sha256(path) for path in files}

    def _digests_of(self, model: str) -> dict[str, str]:
        folders = model_folders(model)
        if not folders:
            return {"commit": locate(model).commit}
        # Named as in the folder; of an adapter's base, under that.
        files = {
            ("" if i == 0 else "base/") + path.relative_to(folder).as_posix(): path
            for i, folder in enumerate(folders)
            for path in model_files(folder)
        }
        mine = self.world.share(sorted(files))
        read = dict(zip(mine, at_once(sha256_once, [files[name] for name in mine]), strict=True))
        shares = self.world.all_gather_object(read)
        by_node = [
            {k: v for rank in self.world.seeing(keeper) for k, v in shares[rank].items()}
            for keeper in self.world.folders
        ]
        if any(found != by_node[0] for found in by_node):
            raise CheckpointError(
                f"model {model!r} must have the same files on every node; got others. Copy its "
                "folder from one to all."
            )
        return dict(sorted(by_node[0].items()))

    def require_same(self, step: str, where: Path, before: Mapping[str, Any]) -> None:
        """Refuse what was made from something else.

        Args:
            where: the folder, to name it. before: what its `made_from` said, perhaps with knobs
                under their earlier names.
        Raises:
            CheckpointError: naming what changed.
        """
        now = self.made_from(step)
        before = {RENAMED.get(name, name): value for name, value in before.items()}
        changed = [
            _changed(name, before.get(name), now.get(name))
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
            # Rows are compared once they have been read.
            and not (name.startswith("the rows of") and name not in now)
            # This run's shares are those of the steps that it runs.
            and not (name == "dataset.split" and step not in self.config.stages)
        ]
        if changed:
            raise CheckpointError(
                f"{where} was made with other knobs, rows or models than these; changed: "
                f"{', '.join(changed)}. To redo this step alone, remove {where}; to keep it, use "
                f"another --output-dir.{_longer(step, where, changed)}"
            )


def _longer(step: str, where: Path, changed: list[str]) -> str:
    """What to do where a finished step was only to go on for longer."""
    stage = stage_of(step)
    lengths = {f"{stage.section}.{name}" for name in ("steps", "max_steps", "epochs")}
    if {text.split(" ")[0] for text in changed} - lengths or not (where / MANIFEST).exists():
        return ""
    flag = f"--{stage.given.replace('_', '-')}"
    model = where.parent / stage.model_folder
    note = ", its KL measured from there" if stage.family == "rl" else ""
    return (
        " A finished step cannot be made longer: its schedule has ended and its optimizer is gone. "
        f"To train its model on, give {flag} {model} in another --output-dir{note}."
    )


def origin(config: RunConfig, world: World) -> dict[str, Any]:
    """What made a folder, for whoever finds it."""
    told = environment()
    return {
        "config_sha256": hashlib.sha256(dump_config(config).encode()).hexdigest(),
        "versions": {name: told[name] for name in ("tandem", "python", "torch", "transformers")},
        "ranks": world.size,
    }


def environment() -> dict[str, str]:
    """Versions and hardware, for the report and for bug reports."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {
        "tandem": version("tandem-rlhf"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "gpu": gpu,
        "threads": str(torch.get_num_threads()),
    }


def _knob_value(config: RunConfig, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def _json_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _changed(name: str, before: Any, now: Any) -> str:
    """What differs: both values of a knob, or the names of files."""
    if not isinstance(before, dict) and not isinstance(now, dict):
        return f"{name} {_short(before)} -> {_short(now)}"
    before, now = before or {}, now or {}
    files = [file for file in sorted({*before, *now}) if before.get(file) != now.get(file)]
    more = f" and {len(files) - 3} more" if files[3:] else ""
    return f"{name} ({', '.join(files[:3])}{more})"


def _short(value: Any) -> str:
    return json.dumps(value)[:60]
