"""The model that a run's folder and a name mean, and what to know of it before one talks to it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tandem.config.load import load_config
from tandem.config.recorded import base_gone, found_model, is_gone
from tandem.config.schema import SamplingConfig, rl_section
from tandem.config.spellings import listed
from tandem.config.stages import latest_first, policy_folders
from tandem.errors import ModelError
from tandem.serve.sources import unfinished_stages
from tandem.text import visible

_LONGEST_SHOWN = 200
"""Letters of a form in a note."""


def find_model(path: str, which: str) -> str:
    """The model that `path` and `which` name: the folder itself, or for a run the actor of its last
    stage (`ema`, its moving average, only on request).

    Raises:
        ModelError: a run's folder without such a model, or whose base is gone.
    """
    folder = Path(path)
    if not _is_run(folder):
        if which:
            raise ModelError(
                f"--model must go with a run's folder; got {visible(path)}, which is not one. "
                "Remove --model."
            )
        return path
    if which == "base":
        named = load_config(folder / "config.yaml").actor_model
        base = found_model(named, folder, "actor_model")
        if is_gone(base):
            told = base_gone(visible(path), base)
            raise ModelError(f"{told}. Talk to it where it is now: tandem chat FOLDER.")
        return base
    models = models_of(path)
    if which in models or (models and not which):
        return models[which] if which else next(iter(models.values()))
    raise ModelError(_why_missing(path, which, [*models, "base"]))


def _why_missing(path: str, which: str, has: list[str]) -> str:
    """The error of a run without the model that was asked for, or without any."""
    config = load_config(Path(path) / "config.yaml")
    unfinished = unfinished_stages(Path(path), config)
    if which and which not in unfinished:
        return f"--model must be one that {visible(path)} has, {listed(has)}; got {which!r}."
    if not unfinished:
        stages = ", ".join(config.stages)
        return f"{visible(path)} must have a stage with a policy; got {stages}. Use --model base."
    wanted = [which] if which else list(unfinished)
    step = next(filter(None, (unfinished[name] for name in wanted)), "")
    shown = visible(path)
    talks = f", or take its checkpoint: tandem serve {shown}, tandem export {shown}" if step else ""
    return (
        f"{visible(path)} must have a finished {listed(wanted)} stage; got {step or 'none'}. Run "
        f"the same tandem train command again to finish it{talks}."
    )


def notes_of(path: str) -> list[str]:
    """A line for each stage of a run that is not finished; none for any other folder."""
    run = Path(path)
    if not _is_run(run):
        return []
    unfinished = unfinished_stages(run, load_config(run / "config.yaml"))
    serve = f"tandem serve {visible(path)} answers with its newest checkpoint"
    export = f"tandem export {visible(path)} writes its models"
    return [
        f"note: {name} is not finished{f'; {serve}, {step}, {export}' * bool(step)}; the same "
        "tandem train command finishes it.\n"
        for name, step in unfinished.items()
    ]


def notes_on_flags(path: str, tools: Sequence[str], sampling: SamplingConfig) -> list[str]:
    """Lines that name the flags for tools and a form that a run was trained with, and the chat is
    not given; none for any other folder."""
    if not _is_run(run := Path(path)):
        return []
    config, notes = load_config(run / "config.yaml"), []
    if (named := rl_section(config).tools) and not tools:
        called = shlex.join(named)
        notes.append(f"note: its policy may call tools; to make its calls: --tools {called}\n")
    if not sampling.json_schema and not sampling.regex:
        notes += _note_on_form(path, config.sampling)
    return notes


def _note_on_form(path: str, trained: SamplingConfig) -> list[str]:
    """A line if a run's answers had a form."""
    schema, pattern = trained.json_schema, trained.regex
    if not schema and not pattern:
        return []
    flag, value = ("--json-schema", schema) if schema else ("--regex", pattern)
    shown = visible(shlex.quote(value))
    if len(shown) > _LONGEST_SHOWN:
        shown = f"{'SCHEMA' if schema else 'PATTERN'}, as in {visible(path)}/config.yaml"
    return [f"note: its answers had a form in training; to ask for it: {flag} {shown}\n"]


def models_of(path: str) -> dict[str, str]:
    """The models of a run's folder by the names of --model; none for any other folder."""
    run = Path(path)
    if not _is_run(run):
        return {}
    places = policy_folders()
    return {
        name: str(run / places[name])
        for name in latest_first()
        if (run / places[name] / "config.json").exists()
    }


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists()
