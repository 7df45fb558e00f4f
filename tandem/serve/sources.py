"""Which models a path offers: those of a run's stages, finished or not, or one folder or hub name.

Nothing is loaded here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tandem.checkpoint.layout import read_layout
from tandem.checkpoint.state import LATEST, number_of, numbered
from tandem.config.load import load_config
from tandem.config.recorded import base_gone, found_model, is_gone
from tandem.config.schema import RunConfig
from tandem.config.stages import STAGES, Stage, in_order, leaving, policy_folders, sources
from tandem.data.chat.own_template import with_kept_template
from tandem.errors import CheckpointError, ModelError, TandemError
from tandem.files import folder_near
from tandem.models.hub_name import base_of
from tandem.models.source import ADAPTER_CONFIG, Located, adapter_base, read_adapter_config
from tandem.text import visible

BASE = "base"
"""The name of the model that a run started from."""
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be served.

    path: its folder or hub name; of an unfinished stage, what that stage started from.
    base: of an adapter whose recorded base was moved, where it is now; else "".
    checkpoints, part: of an unfinished stage, the folder of its checkpoints and the part of them
    that holds these weights.
    stage: what made it, "" for a base. reference: the model that its KL is taken to.
    """

    name: str
    path: str
    base: str = ""
    checkpoints: Path | None = None
    part: str = ""
    stage: str = ""
    reference: str = ""

    def version(self) -> str:
        """Changes when the files do: a checkpoint's name and pointer, or a manifest's time."""
        if self.checkpoints is not None:
            return _stamp(self.checkpoints / LATEST)
        folder = Path(self.path)
        stamps = [_stamp(place / "MANIFEST.json") for place in (folder, folder.parent)]
        return "/".join([self.path, *stamps, _stamp(folder / "config.json")])


@dataclass(frozen=True, slots=True)
class Offer:
    """What a path offers.

    models: the policies by name, in the order of training. preferred: the one that answers where
    a request names none. reward_model, critic: what scores answers, None without.
    run: the run's folder; None for a model's folder or a hub name. config: the run's.
    gone: what the run's base is called if it is nowhere and so not offered: the folder where it
    was, or a name that neither the hub nor its cache has.
    """

    models: dict[str, ModelSource]
    preferred: str
    reward_model: ModelSource | None = None
    critic: ModelSource | None = None
    run: Path | None = None
    config: RunConfig | None = None
    gone: str = ""


def offer_of(path: str, *, base: str = "", is_nowhere: Callable[[str], bool] = is_gone) -> Offer:
    """What can be served of a run's folder, a model's folder or a hub name.

    Args:
        base: where the run's base model is now, if it was moved.
        is_nowhere: whether there is no base of that name; by default no hub is asked.
    Raises:
        ModelError: nothing can, or `base` is nowhere.
    """
    folder = Path(path).expanduser()
    if (folder / "config.yaml").is_file():
        return _offer_of_run(folder, base, is_nowhere)
    if not folder.is_dir():
        _refuse_misspelled(path, folder)
        name = path.rstrip("/").rpartition("/")[2] or path
        return Offer({name: ModelSource(name, path)}, name)
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        runs = sorted(inner.parent.name for inner in folder.glob("*/config.yaml"))
        advice = (
            f"It holds runs: tandem serve {folder / runs[0]}."
            if runs
            else "Give a folder that tandem train or save_pretrained wrote, or a hub name."
        )
        raise ModelError(
            f"{visible(path)} must be a run's folder (with config.yaml) or a model's (with "
            f"config.json); it is neither. {visible(advice)}"
        )
    name = folder.resolve().name
    return Offer(
        {name: ModelSource(name, str(folder), _moved_base(str(folder), folder, base))}, name
    )


def _refuse_misspelled(path: str, folder: Path) -> None:
    """A path whose parent is there is no hub name if something beside it is called alike; and what
    begins like a path, or has more parts than a hub name, never is one."""
    near = folder_near(folder) if "/" in path else ""
    is_path = path.startswith(("/", ".", "~")) or path.rstrip("/").count("/") > 1
    if near or is_path or folder.exists():
        found = f"Did you mean {near}?" if near else "Give its folder."
        kind = "a file" if folder.exists() else "no such folder"
        raise ModelError(
            f"{visible(path)} must be a run's folder, a model's folder or a hub name; got {kind}. "
            f"{visible(found)}"
        )


def _offer_of_run(run: Path, base: str, is_nowhere: Callable[[str], bool]) -> Offer:
    file = run / "config.yaml"
    config = with_kept_template(_config_in(file, _stamp(file)), run)
    models: dict[str, ModelSource] = {}
    start = base or found_model(config.actor_model, run, "actor_model")
    gone = start if start and is_nowhere(start) else ""
    if base and gone:
        raise ModelError(
            f"--base must be a model's folder or a hub name; got {visible(base)}, and there is no "
            f"such folder{_nor_in_hub(base)}. Give its folder."
        )
    if start and not gone:
        models[BASE] = ModelSource(BASE, start)
    for label, place in policy_folders().items():
        if _holds_model(run / place):
            moved = _moved_base(str(run / place), run, base)
            models[label] = ModelSource(label, str(run / place), moved)
    models |= _unfinished(run, config, models)
    models = {n: replace(source, **_facts(n, models, config)) for n, source in models.items()}
    finished = [name for name in models if name != BASE]
    if not models:
        if gone:
            raise ModelError(
                f"{visible(base_gone(run, gone))}{_nor_in_hub(gone)}, and no stage is finished. "
                "Give --base MODEL."
            )
        raise ModelError(
            f"{visible(str(run))} must have a base model or a finished stage; got none. Run the "
            "same tandem train command again, or give --base MODEL."
        )
    return Offer(
        models,
        _preferred(finished) or BASE,
        _reward_model(run, config, base),
        _critic(run, base),
        run,
        config,
        gone,
    )


@lru_cache(maxsize=8)
def _config_in(file: Path, stamp: str) -> RunConfig:
    """The configuration in a file as it was at its `_stamp`; reading it takes 0.1 s, and a server
    that follows a run looks at each request."""
    return load_config(file)


def _nor_in_hub(model: str) -> str:
    """What to add of a model that is no folder, where its name may be the hub's."""
    return "" if is_gone(model) else ", nor does the hub or its cache have it"


def _preferred(names: list[str]) -> str:
    """The main policy of the last stage that has one."""
    for stage in reversed(STAGES):
        if stage.policies and stage.policies[0].label in names:
            return stage.policies[0].label
    return names[-1] if names else ""


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file()


def _facts(name: str, models: dict[str, ModelSource], config: RunConfig) -> dict[str, Any]:
    """The stage that made a model, and what its KL is taken to, if that is among the models."""
    stage = next((s for s in STAGES for p in s.policies if p.label == name), None)
    if stage is None:
        return {}
    before = [earlier.policies[0].label for earlier in sources("policy", stage.name)]
    starts = [*(label for label in before if label in models), BASE]
    if config.reference_model and "reference" in stage.freezes:
        starts = [BASE] if config.reference_model == config.actor_model else []
    reference = next((start for start in starts if start in models), "")
    return {"stage": stage.name, "reference": reference}


def _unfinished(
    run: Path, config: RunConfig, finished: dict[str, ModelSource]
) -> dict[str, ModelSource]:
    """Policies of stages that have a checkpoint but are not finished."""
    found: dict[str, ModelSource] = {}
    for stage in STAGES:
        checkpoints = run / _CHECKPOINTS / stage.name
        if stage.name not in config.stages or not stage.policies or not _answering(checkpoints):
            continue
        start = _start_of(stage, finished)
        for policy, part in zip(stage.policies, _parts(stage), strict=False):
            if policy.label not in finished and start and _has_part(checkpoints, part):
                found[policy.label] = ModelSource(
                    policy.label, start.path, start.base, checkpoints, part
                )
    return found


def unfinished_stages(run: Path, config: RunConfig) -> dict[str, str]:
    """The stages of a run whose policy is not finished, in order, each with the step of its newest
    checkpoint, "step 173 of 200" or "step 40"; "" without one."""
    found: dict[str, str] = {}
    for stage in in_order(config.stages):
        if not stage.policies or _holds_model(run / stage.model_folder):
            continue
        saved = _answering(run / _CHECKPOINTS / stage.name)
        # In other families the number of steps follows from the rows.
        last = f" of {getattr(config, stage.section).steps}" if stage.family == "rl" else ""
        found[stage.name] = f"step {number_of(saved[-1])}{last}" if saved else ""
    return found


def _parts(stage: Stage) -> tuple[str, str]:
    """The parts of a checkpoint that hold a stage's policy and its moving average."""
    return ("actor" if stage.family == "rl" else "model"), "ema"


def _answering(checkpoints: Path) -> list[Path]:
    """The checkpoints that a policy can be read from, oldest first: after a step at least. That of
    step 0, which `keep_best` writes, holds what the stage starts from."""
    return [folder for folder in numbered(checkpoints) if number_of(folder) > 0]


def _has_part(checkpoints: Path, part: str) -> bool:
    """Whether the newest checkpoint has such a part, by its layout."""
    for folder in reversed(_answering(checkpoints)):
        try:
            return part in read_layout(folder).parts
        except (OSError, CheckpointError):
            continue
    return False


def _start_of(stage: Stage, finished: dict[str, ModelSource]) -> ModelSource | None:
    labels = [source.policies[0].label for source in sources("policy", stage.name)]
    return next((finished[label] for label in (*labels, BASE) if label in finished), None)


def _reward_model(run: Path, config: RunConfig, base: str) -> ModelSource | None:
    for stage in STAGES:
        if stage.leaves == "reward model" and _holds_model(run / stage.model_folder):
            folder = str(run / stage.model_folder)
            moved = _moved_base(folder, run, base)
            return ModelSource(stage.name, folder, moved, stage=stage.name)
    if config.reward_model and not leaving(config.stages, "reward model"):
        return ModelSource("reward", found_model(config.reward_model, run, "reward_model"))
    return None


def _critic(run: Path, base: str) -> ModelSource | None:
    """The critic that the last stage with one has left."""
    for stage in reversed(STAGES):
        folder = run / stage.name / "critic"
        if _holds_model(folder):
            return ModelSource("critic", str(folder), _moved_base(str(folder), run, base))
    return None


def _moved_base(folder: str, run: Path, base: str) -> str:
    """Where an adapter's base is now if not where the adapter says; "" if it need not be told."""
    source = Located(folder)
    adapter = read_adapter_config(source)
    if adapter is None or (Path(folder) / "config.json").is_file():
        return ""
    if base:
        return base
    recorded = base_of(adapter, folder)
    try:
        if Path(recorded).expanduser().is_absolute() and not Path(recorded).is_dir():
            found = found_model(recorded, run, "")
            return "" if found == recorded else found
        adapter_base(source, adapter)
    except TandemError:
        found = found_model(recorded, run, "")
        return "" if found == recorded else found
    return ""


def _stamp(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_mtime_ns}.{found.st_size}.{found.st_ino}"
