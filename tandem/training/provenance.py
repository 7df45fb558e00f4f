"""What a stage depends on, so that one made from something else is not reused."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from tandem import processor
from tandem.checkpoint.folder import MANIFEST, read_manifest
from tandem.checkpoint.state import newest_numbers
from tandem.config.answer_form import schema_digest
from tandem.config.load import config_knobs, dump_config, knob_value
from tandem.config.recorded import MODELS
from tandem.config.rules import selecting
from tandem.config.schema import RunConfig
from tandem.config.scoring import weighted_models
from tandem.config.spellings import RENAMED
from tandem.config.stages import STAGES, stage_names, stage_of
from tandem.data.chat.own_template import digest_of, read_template
from tandem.errors import CheckpointError
from tandem.parallel.world import World
from tandem.training.differences import ROWS, KnownRows, difference
from tandem.training.given_files import GivenFiles
from tandem.version import own_version

# What every stage depends on, beside its section and the knobs in its record.
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
# The template of conversations; where its file lies does not matter.
_TEMPLATE = ("dataset.chat_template", "the chat template")
# The same of the schema that answers have.
_SCHEMA = ("sampling.json_schema", "the schema of answers")
# What later stages build on: rows that are theirs or held out, how they are rendered, and in what
# form weights are left.
_BUILT_ON = (
    *("seed", "dataset.heldout", "the rows of eval_data", *_TEMPLATE),
    *("parallel.frozen_weights", "parallel.shared_base"),
)
_CRITIC_RANK = "lora.critic_rank"
# These change metrics on the way, never the trained model.
_HARMLESS = ("max_skipped", "workers", "self_test")
# Nor do these, unless the stage's result is chosen among its evaluations.
_EVALUATING = ("eval_every", "eval_prompts", "eval_rows")


def recorded(folder: Path, name: str) -> dict[str, Any]:
    """What stages in a run's folder, finished or not, were made from under this name; of those that
    have it, the latest last."""
    found = {}
    for stage in stage_names():
        facts = newest_numbers(folder / "checkpoints" / stage) or {}
        if (folder / stage / MANIFEST).exists():
            try:
                facts = read_manifest(folder / stage).facts
            except CheckpointError:
                continue  # reported when the stage itself is read
        made_from = facts.get("made_from") or {}
        if name in made_from:
            found[stage] = made_from[name]
    return found


class Identity:
    """The knobs, rows, models and code that the stages of a run are made from.

    Attributes:
        fingerprints: of the rows by kind (`data`, `sft_data`, `eval_data`, `ptx_data`), once they
            are read.
        named: the configuration with models and files as the run has recorded their names.
        known_rows: the accounts of the rows, as recorded and as they are, for messages.
        in_memory: digests of what Python code gave RL stages in memory, by what it is.
        files: digests of the models and code that knobs name.
    """

    def __init__(self, config: RunConfig, path: Path, world: World) -> None:
        """`path` is the run's folder."""
        self.config = self.named = config
        self.path = path
        self.world = world
        self.fingerprints: dict[str, list[str]] = {}
        self.known_rows: KnownRows = {}
        self.in_memory: dict[str, str] = {}
        self.files = GivenFiles(config, world)

    @cached_property
    def _template(self) -> str:
        """The digest of the run's own chat template, as it was at first."""
        return digest_of(read_template(self.config.dataset.own_template))

    @cached_property
    def _schema(self) -> str:
        """The digest of the schema in `sampling.json_schema`'s file; a run keeps that it began
        with."""
        return schema_digest(self.config.sampling)

    def note_files(self) -> None:
        """Take the digests of all files that the run is given, as it begins to use them."""
        self.files.note()
        _ = self._template, self._schema

    def of_template(self) -> dict[str, Any]:
        """The text of the run's own chat template; nothing without one."""
        return {_TEMPLATE[1]: {"its text": self._template}} if self._template else {}

    def of_schema(self) -> dict[str, Any]:
        """The text of the file of `sampling.json_schema`; nothing without one."""
        return {_SCHEMA[1]: {"its text": self._schema}} if self._schema else {}

    def note_rows(self, digests: Sequence[str]) -> None:
        """Keep the fingerprints of the data sets, in the order in which they are read."""
        left = iter(digests)
        for kind in ("data", "sft_data", "eval_data"):
            self.fingerprints[kind] = list(islice(left, len(getattr(self.config, kind))))
        self.fingerprints["ptx_data"] = list(left)

    def made_from(self, stage_name: str) -> dict[str, Any]:
        """What the stage depends on: knobs by dotted name, and digests of the rows, the models'
        files, the earlier stages, the answers' schema and the reward function's code."""
        stage = stage_of(stage_name)
        depends_on = {*_SHARED, *stage.knobs, stage.section}
        if stage.after:  # it may train adapters further that share their base
            depends_on.add("parallel.shared_base")
        selects = selecting(getattr(self.config, stage.section))
        harmless = _HARMLESS if selects else (*_HARMLESS, *_EVALUATING)
        made_from = self.knobs(
            name
            for name, _ in config_knobs()
            if {name, name.split(".")[0]} & depends_on
            and name.split(".")[-1] not in harmless
            and (knob_value(self.config, name) or not name.startswith("parallel."))
            and not (name == _CRITIC_RANK and "critic" not in stage.trains)
        )
        # Every stage takes the policy's tokenizer from the given model, but its weights only if no
        # earlier stage has trained them.
        given = {"actor_model"} | ({"reward_model"} & made_from.keys())
        for name in stage.after:
            manifest = self.path / name / MANIFEST
            if manifest.exists():
                entries = read_manifest(self.path / name).entries
                made_from[f"the {name} stage"] = {n: entry.sha256 for n, entry in entries.items()}
            else:
                given.add(stage_of(name).given)
        given |= {knob for knob in ("reference_model", "critic_model") if made_from.get(knob)}
        made_from |= self.of_template()
        if "sampling" in depends_on:
            made_from |= self.of_schema()
        for knob in sorted(given):
            made_from[knob] = knob_value(self.config, knob)
            made_from[f"the files of {knob}"] = self.files_of(knob)
        if made_from.get("dpo.loss_function"):
            made_from["the loss function"] = self.files.dpo_loss()
        if stage.family == "rl":
            made_from |= self.files.of_functions()
            for further in weighted_models(self.config.scoring.reward_models):
                made_from[f"the files of {further.source}"] = self.files.of_model(further.source)
            made_from |= self.in_memory
        for kind in stage.data:
            if kind in self.fingerprints:
                made_from[f"the rows of {kind}"] = self.fingerprints[kind]
        if "eval_data" in self.fingerprints:  # what begins like them is not trained on
            made_from["the rows of eval_data"] = self.fingerprints["eval_data"]
        return made_from

    def knobs(self, names: Iterable[str]) -> dict[str, Any]:
        """Values by dotted name, as JSON has them."""
        return {name: _json_value(knob_value(self.named, name)) for name in names}

    def files_of(self, knob: str) -> dict[str, str]:
        """The digests of the model that a knob names."""
        return self.files.of_model(str(knob_value(self.config, knob)))

    def require_same(self, stage: str, where: Path, before: Mapping[str, Any]) -> None:
        """Refuse a folder that was made from something else.

        Args:
            where: the folder, for the message. before: its `made_from`, perhaps of an earlier
                version: with knobs under earlier names, or without those added since.
        Raises:
            CheckpointError: with what has changed.
        """
        if changed := self.changes(stage, before):
            raise _made_otherwise(stage, where, changed)

    def require_all_same(self, made_from: Mapping[str, Mapping[str, Any]]) -> None:
        """The same of finished stages, by name in their order: all that are refused in one line."""
        refused = {stage: self.changes(stage, made_from[stage]) for stage in made_from}
        refused = {stage: changed for stage, changed in refused.items() if changed}
        if len(refused) == 1:
            ((stage, changes),) = refused.items()
            raise _made_otherwise(stage, self.path / stage, changes)
        if refused:
            folders = [str(self.path / stage) for stage in refused]
            changed = dict.fromkeys(text for texts in refused.values() for text in texts)
            raise CheckpointError(
                f"{_listed(folders)} were made with other knobs, rows or models than these; "
                f"changed: {', '.join(changed)}. To redo these stages, remove {_listed(folders)}; "
                "to keep them, use another --output-dir."
            )

    def changes(self, stage: str, before: Mapping[str, Any]) -> list[str]:
        """What differs now from a folder's `made_from`, as text.

        A stage that this run does not run is taken as it stands, but for what the stages after it
        build on: its tokenizer, its part of the rows, the form of its weights.
        """
        now = self.made_from(stage)
        before = _as_recorded_now({_new_name(name): value for name, value in before.items()}, now)
        if stage not in self.config.stages:
            given = {f"the files of {knob}" for knob in MODELS if knob_value(self.config, knob)}
            given = given & now.keys() & before.keys()
            given |= {name for name in before.keys() | now.keys() if _is_built_on(name)}
            now = {name: now[name] for name in given & now.keys()}
            before = {name: before[name] for name in given & before.keys()}
        return [
            difference(name, before.get(name), now.get(name), self.known_rows)
            for name in sorted(before.keys() | now.keys())
            if _or_none(before.get(name)) != _or_none(now.get(name))
            # Rows are compared only after they are read.
            and not (name.startswith(ROWS) and name not in now)
            # Data may lie elsewhere now: their rows say whether they are others.
            and not (_names_data(name) and _last_parts(before, name) == _last_parts(now, name))
            # A model may lie elsewhere now: its files say whether it is another.
            and not (name in MODELS and _is_alike(before, now, f"the files of {name}"))
            and not any(name == x and _is_alike(before, now, y) for x, y in (_TEMPLATE, _SCHEMA))
        ]


def _new_name(recorded: str) -> str:
    """What a fact's name in an earlier version is called now."""
    if recorded.startswith("the ") and recorded.endswith(" step"):
        return f"{recorded.removesuffix('step')}stage"
    return RENAMED.get(recorded, recorded)


def _as_recorded_now(before: dict[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """A record as this version would have written it.

    A knob that the record lacks did not exist then, and had the effect of its default. This does
    not hold for `parallel.*`, whose knobs are recorded only when they are on. A text is a list's
    only item where the knob takes a list now.
    """
    defaults = RunConfig()
    known = {name for name, _ in config_knobs()}
    for name, value in now.items():
        if name not in known:
            continue
        if name not in before and not name.startswith("parallel."):
            before[name] = _json_value(knob_value(defaults, name))
        elif isinstance(value, list) and isinstance(before.get(name), str):
            before[name] = [before[name]] if before[name] else []
    return before


def _made_otherwise(stage: str, where: Path, changed: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{where} was made with other knobs, rows or models than these; changed: "
        f"{', '.join(changed)}. To redo this stage alone, remove {where}; to keep it, use "
        f"another --output-dir.{_longer(stage, where, changed)}"
    )


def _longer(name: str, where: Path, changed: list[str]) -> str:
    """What to do if the user only wanted to train a finished stage for longer."""
    stage = stage_of(name)
    lengths = {f"{stage.section}.{knob}" for knob in ("steps", "max_steps", "epochs")}
    if {text.split(" ")[0] for text in changed} - lengths or not (where / MANIFEST).exists():
        return ""
    flag = f"--{stage.given.replace('_', '-')}"
    model = where.parent / stage.model_folder
    note = ""
    if "reference" in stage.freezes:
        note = ", compared with it as it is there (or give --reference-model)"
    return (
        " A finished stage cannot be made longer: its schedule has ended and its optimizer is "
        "gone. "
        f"To train its model on, give {flag} {model} in another --output-dir{note}."
    )


def origin(config: RunConfig, world: World) -> dict[str, Any]:
    """What wrote a folder: configuration, versions, ranks."""
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
        "tandem": own_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": platform.platform(),
        "processor": processor.kind(),
        "gpu": gpu,
        "threads": str(torch.get_num_threads()),
    }


def _json_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _names_data(name: str) -> bool:
    """Whether a fact is the value of a knob that names data sets, whose rows are a fact too."""
    knobs = {"eval_data", *(knob for stage in STAGES for knob in stage.data)}
    return name.rpartition(".")[2] in knobs


def _last_parts(facts: Mapping[str, Any], name: str) -> list[str]:
    """Data sets as a knob names them, with their weights, without the folders before them."""
    return [text.rpartition("/")[2] for text in facts.get(name) or ()]


def _is_built_on(name: str) -> bool:
    return name in _BUILT_ON or (name.startswith("the ") and name.endswith(" stage"))


def _or_none(value: Any) -> Any:
    """No files or rows are as good as none recorded."""
    return None if value in ({}, []) else value


def _is_alike(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    return bool(now.get(name)) and before.get(name) == now.get(name)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
