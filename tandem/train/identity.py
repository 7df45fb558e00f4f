"""What a step's outcome depends on, so that one made from something else is not taken for it."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from tandem.checkpoint.folder import MANIFEST
from tandem.config.load import config_knobs, dump_config
from tandem.config.schema import RunConfig
from tandem.errors import CheckpointError
from tandem.files import sha256
from tandem.parallel.world import World

# What each step's outcome depends on: these knobs and whole sections.
_SHARED = (
    "seed",
    "dtype",
    "dropout",
    "dataset",
    "lora",
    "data",
    "guards",
    "parallel.frozen_weights",
)
DEPENDS_ON: dict[str, tuple[str, ...]] = {
    "sft": (*_SHARED, "actor_model", "sft_data", "sft"),
    "reward": (*_SHARED, "reward_model", "reward", "sampling", "parallel.shared_base"),
    "dpo": (*_SHARED, "dpo", "parallel.shared_base"),
    "ppo": (*_SHARED, "ppo", "sampling", "hybrid_engine", "parallel.shared_base"),
}
# These change what is measured or shown on the way, never what comes out.
_HARMLESS = ("eval_every", "eval_prompts", "max_skipped")


class Identity:
    """The knobs, rows and models that the steps of a run are made from.

    Attributes:
        fingerprints: of the rows by kind (`data`, `sft_data`), once they have been read.
    """

    def __init__(self, config: RunConfig, path: Path, world: World) -> None:
        """`path` is the run's folder."""
        self.config = config
        self.path = path
        self.world = world
        self.fingerprints: dict[str, list[str]] = {}
        self._digests: dict[str, dict[str, str]] = {}

    def made_from(self, step: str) -> dict[str, Any]:
        """What the step's outcome depends on: knobs by dotted name, and earlier steps' digests."""
        knobs = {
            name: _json_value(_knob_value(self.config, name))
            for name, _ in config_knobs()
            if {name, name.split(".")[0]} & {*DEPENDS_ON[step]}
            and name.split(".")[-1] not in _HARMLESS
            and (_knob_value(self.config, name) or not name.startswith("parallel."))
        }
        for name in ("actor_model", "reward_model"):
            if knobs.get(name):
                knobs[f"the weights of {name}"] = self._digests_of(str(knobs[name]))
        earlier = {"sft": (), "reward": ("sft",), "dpo": ("sft",), "ppo": ("sft", "reward")}[step]
        script = Path(self.config.ppo.reward_function.rpartition(":")[0])
        if step == "ppo" and script.is_file():
            knobs["the reward function"] = hashlib.sha256(script.read_bytes()).hexdigest()
        for kind in ("data", "sft_data") if step == "sft" else ("data",):
            if kind in self.fingerprints:
                knobs[f"the rows of {kind}"] = self.fingerprints[kind]
        for name in earlier:
            manifest = self.path / name / MANIFEST
            if manifest.exists():
                weights = json.loads(manifest.read_text(encoding="utf-8"))["files"]
                knobs[f"the {name} step"] = {
                    path: facts["sha256"]
                    for path, facts in weights.items()
                    if path.endswith(".safetensors")
                }
                continue
            knob = {"sft": "actor_model", "reward": "reward_model"}[name]
            knobs[knob] = getattr(self.config, knob)
            knobs[f"the weights of {knob}"] = self._digests_of(str(knobs[knob]))
        return knobs

    def _digests_of(self, model: str) -> dict[str, str]:
        """The SHA-256 of each weight file of a local folder, which the ranks read in turn."""
        if model not in self._digests:
            folder = Path(model).expanduser()
            names = sorted(path.name for path in folder.glob("*.safetensors")) if model else []
            mine = {name: sha256(folder / name) for name in self.world.share(names)}
            found = {k: v for share in self.world.collect(mine) for k, v in share.items()}
            self._digests[model] = dict(sorted(found.items()))
        return self._digests[model]

    def require_same(self, step: str, where: Path, before: Mapping[str, Any]) -> None:
        """Refuse what was made from something else.

        Args:
            where: the folder, to name it. before: what its `made_from` said.
        Raises:
            CheckpointError: naming what changed.
        """
        now = self.made_from(step)
        changed = [
            f"{name} {_short(before.get(name))} -> {_short(now.get(name))}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
            # Rows are compared once they have been read.
            and not (name.startswith("the rows of") and name not in now)
        ]
        if changed:
            raise CheckpointError(
                f"{where} was made with other knobs or rows than these; changed: "
                f"{', '.join(changed)}. To redo this step alone, remove {where}; to keep it, use "
                f"another --output-dir.{_longer(step, where, changed)}"
            )


def _longer(step: str, where: Path, changed: list[str]) -> str:
    """What to do where a finished step was only to go on for longer."""
    lengths = {f"{step}.{name}" for name in ("steps", "max_steps", "epochs")}
    if {text.split(" ")[0] for text in changed} - lengths or not (where / MANIFEST).exists():
        return ""
    flag = "--reward-model" if step == "reward" else "--actor-model"
    model = where / "actor" if step == "ppo" else where
    note = ", its KL measured from there" if step == "ppo" else ""
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


def _short(value: Any) -> str:
    return "(others)" if isinstance(value, dict) else json.dumps(value)[:60]
