"""`tandem export`: the models of an unfinished stage, as it would leave them after a checkpoint.

Nothing in the run changes, so it can be continued afterwards, or be running meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandem.checkpoint.folder import MANIFEST, DiskError, read_manifest
from tandem.checkpoint.state import (
    best_named_by,
    load_state_of,
    newest_numbers,
    number_of,
    numbered,
    take_newest,
)
from tandem.config.recorded import with_found
from tandem.config.schema import RunConfig
from tandem.config.spellings import listed
from tandem.config.stages import in_order, stage_of
from tandem.errors import CheckpointError, ConfigError
from tandem.files import existing
from tandem.parallel.world import World
from tandem.training.lineage import lineage_of
from tandem.training.model_card import write_models
from tandem.training.own_folder import (
    CHECKPOINTS,
    COMMAND_FILE,
    config_of_run,
    on_these_ranks,
    run_around,
)
from tandem.training.run_folder import Run
from tandem.training.run_stages import prepared, tokenizer_sources
from tandem.training.stage_data import prepare_rows
from tandem.training.stage_loop import StageJob

NEWEST = -1
"""In place of a step: that of the newest checkpoint."""
_EXPORTED = "exported"
"""The fact in the manifest of an exported folder: from which run."""


def export(
    folder: str,
    output: str,
    *,
    stage: str = "",
    step: int = NEWEST,
    world: World | None = None,
    print_line: Callable[[str], None] = print,
) -> Path:
    """Write the models of a stage after a step; returns the folder of what the stage leaves.

    A reward model is evaluated and normalized, as at its stage's end.

    Args:
        folder: the run's.
        output: a folder that is not there yet or empty, or one that this function wrote.
        stage: its name; empty: the unfinished one.
        step: whose checkpoint.
        world: the ranks that hold the models together. None: one process.
    Raises:
        CheckpointError: the folder is not a run's, or has no such checkpoint, or what the stage was
            made from has changed, or the disk does not take the models.
        ConfigError: there is no such stage, or `output` is not such a folder.
    """
    config = config_of_run(folder)
    target = Path(output)
    _require_target(target, output)
    stage = _stage_of(config, Path(folder), stage)
    _require_step(Path(folder) / CHECKPOINTS / stage, step)
    found = on_these_ranks(with_found(config, Path(folder)), world or World())
    run = Run(found, print_line, world, writes=False)
    run.identity.named = config
    commands = run.path / COMMAND_FILE
    run.command = commands.read_text("utf-8").rstrip().split("\n")[-1] if commands.exists() else ""
    rows = prepare_rows(run.config, *tokenizer_sources(run))
    run.note_data(rows)
    job = prepared(stage, run, rows)
    at = _restored(run, stage, step, job)
    facts = {**job.complete(job.trainer.evaluate()), "steps": float(at)}
    *earlier, last = lineage_of(run, stage_of(stage))
    model = target / Path(last["model"]).relative_to(run.folder(stage))
    title = f"{last['title']}, step {at} of {job.order.num_steps}"
    last |= {"model": str(model), "title": title, "titles": [*last["titles"][:-1], title]}
    if run.world.is_first and target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    origin = {_EXPORTED: str(run.path)}
    try:
        write_models(run, stage, target, job.save, facts, [*earlier, last], origin)
    except DiskError as error:
        raise error.of_flag("--output") from error.__cause__
    run.print_line(f"{title}: saved in {model}")
    return model


def _require_target(target: Path, given: str) -> None:
    """Refuse a folder that holds anything but an earlier export, before anything is loaded.

    Raises:
        ConfigError: it does, or cannot be a folder.
    """
    must = "--output must be a new folder, an empty one or one that tandem export wrote"
    if not given:
        raise ConfigError(f"{must}; got nothing.")
    if run := run_around(target):
        raise ConfigError(f"--output must be outside of runs' folders; got {given}, in {run}.")
    if not existing(target).is_dir():
        raise ConfigError(f"{must}; got {given}, where a file is. Choose another.")
    if not target.exists() or not any(target.iterdir()):
        return
    try:
        is_ours = _EXPORTED in read_manifest(target).facts
    except CheckpointError:
        is_ours = False
    if not is_ours:
        raise ConfigError(f"{must}; got {given}, which holds other things. Choose another.")


def _stage_of(config: RunConfig, folder: Path, stage: str) -> str:
    """The stage that is meant, which must not be finished."""
    names = [known.name for known in in_order(config.stages)]
    if stage and stage not in names:
        raise ConfigError(f"--stage must be {listed(names)}, the run's stages; got {stage!r}.")
    saved = {name: numbered(folder / CHECKPOINTS / name) for name in names}
    found = stage or next((name for name in names if saved[name]), "")
    left = {name: folder / stage_of(name).model_folder for name in names}
    finished = [name for name in names if (folder / name / MANIFEST).exists()]
    if found in finished or (not found and len(finished) == len(names)):
        name = found or names[-1]
        raise CheckpointError(
            f"{name} of {folder} must be unfinished; it is finished, and its model is in "
            f"{left[name]}."
        )
    if not found or not saved[found]:
        raise CheckpointError(
            f"{folder} must have a checkpoint of {found or 'an unfinished stage'}; got none. "
            "Stopping it with Ctrl-C leaves one, --save-every N one every N steps."
        )
    return found


def _require_step(checkpoints: Path, step: int) -> None:
    """Refuse a step without a checkpoint, and the newest where it is that of step 0."""
    steps = sorted({number_of(path) for path in numbered(checkpoints)})
    if step == NEWEST and steps == [0]:
        raise CheckpointError(
            f"{checkpoints} must have a checkpoint after a step; got only that of step 0, which "
            "holds what the stage starts from. Wait for the next one, or take it: --step 0."
        )
    if step != NEWEST and step not in steps:
        there = listed([str(number) for number in steps])
        raise CheckpointError(
            f"--step must be one whose checkpoint is in {checkpoints}: {there}; got {step}."
        )


def _restored(run: Run, stage: str, step: int, job: StageJob) -> int:
    """Bring the stage's models to a checkpoint; returns its step."""
    folder = run.checkpoints(stage)
    if step != NEWEST:
        state = load_state_of(folder, step, run.world)
        _require_same(run, stage, state.numbers)
        job.trainer.restore(state)
        at: int | None = step
    else:
        _require_same(run, stage, newest_numbers(folder, run.world) or {})
        at, notes = take_newest(folder, job.trainer.restore, run.world)
        for note in notes:
            run.print_line(note)
    if at is None:
        raise CheckpointError(f"{folder} must have a checkpoint that is whole; got none.")
    best = best_named_by(run.checkpoint(stage, at))
    if best is not None and best != at:
        run.print_line(
            f"note: the best evaluation so far is that of step {best} (keep_best); --step "
            f"{best} takes its models"
        )
    return at


def _require_same(run: Run, stage: str, numbers: Mapping[str, Any]) -> None:
    """Refuse a checkpoint, by its numbers, of something else than there is now."""
    if numbers and (changed := run.identity.changes(stage, numbers["made_from"])):
        raise CheckpointError(
            f"{run.checkpoints(stage)} was made with other knobs, rows or models than there are "
            f"now; changed: {', '.join(changed)}. Put back what it was made from."
        )
