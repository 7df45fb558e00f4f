"""The files that a run is given beside its rows: models, and the code that knobs name.

Their digests are those at the run's start: a file that is edited while the run uses what it read
must not be recorded as what the run was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tandem.config.load import knob_value
from tandem.config.recorded import MODELS
from tandem.config.schema import RunConfig, rl_section
from tandem.config.scoring import weighted_models
from tandem.config.stages import of_family, rl_stage, stage_of
from tandem.errors import CheckpointError, TandemError
from tandem.files import at_once, sha256, sha256_once
from tandem.models.checkpoint_ref import model_files, model_folders
from tandem.models.hub_name import with_revision
from tandem.models.source import locate
from tandem.named_functions import files_of_function
from tandem.parallel.world import World
from tandem.rewards.loading import source_files
from tandem.rewards.scoring import named, text_of
from tandem.text import visible

Digests = dict[str, str]
"""SHA-256 by a file's name."""
_ENVIRONMENT, _TOOLS = "the environment", "the tools"
_DPO_LOSS = "dpo.loss_function"


class GivenFiles:
    """Digests of files, each as it was when it was first asked for."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config = config
        self._world = world
        self._models: dict[str, Digests] = {}
        self._code: dict[str, tuple[dict[str, Path], Digests]] = {}

    def note(self) -> None:
        """Take the digests of all that the run's stages may read; every rank calls it."""
        for knob in MODELS:
            self.of_model(str(knob_value(self._config, knob)))
        if of_family(self._config.stages, "rl"):
            for further in weighted_models(self._config.scoring.reward_models):
                self.of_model(further.source)
            self.of_functions()
        if any(stage_of(name).reads(_DPO_LOSS) for name in self._config.stages):
            self.dpo_loss()

    def require_unchanged(self) -> None:
        """Refuse to go on with other files than those that the run began with; every rank calls it.

        Raises:
            CheckpointError: some were changed or removed, which it names.
        """
        changed: dict[str, list[str]] = {}
        for model, before in self._models.items():
            changed[f"model {visible(model)}"] = self._changed_in(model, before)
        for what, (paths, before) in self._code.items():
            changed[what] = [n for n, path in paths.items() if _digest(path) != before[n]]
        mine = [
            f"{what} ({', '.join(map(visible, names))})" for what, names in changed.items() if names
        ]
        found = dict.fromkeys(
            line for lines in self._world.all_gather_object(mine) for line in lines
        )
        if found:
            raise CheckpointError(
                "what a run is given must stay as it is until the run ends; got other files than "
                f"it began with: {', '.join(found)}. Put them back, or keep them if no finished "
                "stage was made from them, and run the same command again."
            )

    def of_model(self, model: str) -> Digests:
        """Each of a model's files, with those of an adapter's base, or the commit of a hub name;
        empty without a name.

        Raises:
            CheckpointError: nodes have different files.
        """
        if model and model not in self._models:
            self._models[model] = self._digests_of(model)
        return self._models[model] if model else {}

    def dpo_loss(self) -> Digests:
        """The source files of DPO's loss function; empty without one."""
        text = self._config.dpo.loss_function
        if not text:
            return {}
        return self._once(_DPO_LOSS, lambda: files_of_function(text, _DPO_LOSS))

    def reward_function(self) -> Digests:
        """The source files of the reward functions."""
        specs = [spec for spec, _ in named(rl_section(self._config).reward_function)]
        return self._once(
            "the reward function", lambda: [p for s in specs for p in source_files(text_of(s))]
        )

    def of_functions(self) -> dict[str, Digests]:
        """The source files of every kind of function that the RL section names."""
        rl, section = rl_section(self._config), rl_stage(self._config.stages).section
        found = {"the reward function": self.reward_function()} if rl.reward_function else {}
        for what, name, texts in (
            ("the loss function", "loss_function", [rl.loss_function]),
            ("the advantage function", "advantage_function", [rl.advantage_function]),
            (_ENVIRONMENT, "environment", [rl.environment]),
            (_TOOLS, "tools", rl.tools),
        ):
            if any(texts):
                found[what] = self._once(what, partial(_files_of, texts, f"{section}.{name}"))
        return found

    def conversations(self) -> dict[str, Digests]:
        """The same of what answers the policy: environment and tools, if there are some."""
        found = self.of_functions()
        return {what: found[what] for what in (_ENVIRONMENT, _TOOLS) if what in found}

    def _once(self, what: str, files: Callable[[], Iterable[Path]]) -> Digests:
        """By the files' names, or by their paths where two have one name."""
        if what not in self._code:
            found = sorted(set(files()))
            names = [path.name for path in found]
            paths = {p.name if names.count(p.name) == 1 else str(p): p for p in found}
            self._code[what] = paths, {name: sha256(path) for name, path in paths.items()}
        return self._code[what][1]

    def _changed_in(self, model: str, before: Digests) -> list[str]:
        """The files of a model that are others now, among this rank's share of them."""
        try:
            files = _model_files(model)
            if not files:
                began = f"{with_revision(model)[0]}@{before.get('commit')}"
                is_same = locate(model).commit == before.get("commit")
                return [] if is_same else [f"another commit; it began with {began}"]
            now = self._share_of({name: files[name] for name in files.keys() & before.keys()})
        except (TandemError, OSError):
            return ["not there"]
        differ = {name for name, digest in now.items() if digest != before[name]}
        return sorted(differ | (files.keys() ^ before.keys()))

    def _share_of(self, files: dict[str, Path]) -> Digests:
        """The digests of this rank's share of some files."""
        mine = self._world.share(sorted(files))
        return dict(zip(mine, at_once(sha256_once, [files[name] for name in mine]), strict=True))

    def _digests_of(self, model: str) -> Digests:
        files = _model_files(model)
        if not files:
            return {"commit": locate(model).commit}
        shares = self._world.all_gather_object(self._share_of(files))
        by_node = [
            {k: v for rank in self._world.seeing(keeper) for k, v in shares[rank].items()}
            for keeper in self._world.folders
        ]
        if any(found != by_node[0] for found in by_node):
            raise CheckpointError(
                f"model {model!r} must have the same files on every node; got others. Copy its "
                "folder from one to all."
            )
        return dict(sorted(by_node[0].items()))


def _model_files(model: str) -> dict[str, Path]:
    """By the names in the model's folder; files of an adapter's base are under `base/`. None of a
    hub name."""
    return {
        ("" if i == 0 else "base/") + path.relative_to(folder).as_posix(): path
        for i, folder in enumerate(model_folders(model))
        for path in model_files(folder)
    }


def _files_of(functions: Iterable[str], knob: str) -> list[Path]:
    return [path for text in functions for path in files_of_function(text, knob)]


def _digest(path: Path) -> str:
    try:
        return sha256(path)
    except OSError:
        return ""
