"""`tandem export`: the models of an unfinished stage, as it would leave them after a checkpoint.

Nothing in the run changes, so it can be continued afterwards, or be running meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tandem.checkpoint.folder import MANIFEST
from tandem.checkpoint.state import (
    SavedState,
    load_state_before,
    load_state_of,
    number_of,
    numbered,
)
from tandem.config.schema import RunConfig
from tandem.config.spellings import listed
from tandem.config.stages import in_order, stage_of
from tandem.errors import CheckpointError, ConfigError
from tandem.parallel.world import World
from tandem.training.lineage import lineage_of
from tandem.training.model_card import write_models
from tandem.training.own_folder import CHECKPOINTS, COMMAND_FILE, config_of_run
from tandem.training.run_folder import Run
from tandem.training.run_stages import prepared, tokenizer_sources
from tandem.training.stage_data import prepare_rows

_BEYOND = 10**9


def export(
    folder: str,
    output: str,
    *,
    stage: str = "",
    step: int = 0,
    world: World | None = None,
    print_line: Callable[[str], None] = print,
) -> Path:
    """Write the models of a stage after a step; returns the folder of what the stage leaves.

    A reward model is evaluated and normalized, as at its stage's end.

    Args:
        folder: the run's.
        output: a folder that is not there yet, or one that this function wrote.
        stage: its name; empty: the unfinished one.
        step: whose checkpoint; 0: the newest.
        world: the ranks that hold the models together. None: one process.
    Raises:
        CheckpointError: the folder is not a run's, or has no such checkpoint, or what the stage was
            made from has changed.
        ConfigError: there is no such stage, or `output` is in the run's folder.
    """
    config = config_of_run(folder)
    target = Path(output)
    if target.resolve().is_relative_to(Path(folder).resolve()):
        raise ConfigError(f"--output must be outside the run's folder {folder}; got {output}.")
    if step < 0:
        raise ConfigError(f"--step must be >= 1; got {step}.")
    stage = _stage_of(config, Path(folder), stage)
    run = Run(config, print_line, world, writes=False)
    commands = run.path / COMMAND_FILE
    run.command = commands.read_text("utf-8").rstrip().split("\n")[-1] if commands.exists() else ""
    rows = prepare_rows(config, *tokenizer_sources(run))
    run.note_data(rows)
    state = _state(run, stage, step)
    if changed := run.identity.changes(stage, state.numbers["made_from"]):
        raise CheckpointError(
            f"{run.checkpoints(stage)} was made with other knobs, rows or models than there are "
            f"now; changed: {', '.join(changed)}. Put back what it was made from."
        )
    job = prepared(stage, run, rows)
    job.trainer.restore(state)
    facts = {**job.complete(job.trainer.evaluate()), "steps": float(state.step)}
    *earlier, last = lineage_of(run, stage_of(stage))
    model = target / Path(last["model"]).relative_to(run.folder(stage))
    title = f"{last['title']}, step {state.step} of {job.order.num_steps}"
    last |= {"model": str(model), "title": title, "titles": [*last["titles"][:-1], title]}
    write_models(run, stage, target, job.save, facts, [*earlier, last])
    run.print_line(f"{title}: saved in {model}")
    return model


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


def _state(run: Run, stage: str, step: int) -> SavedState:
    """The checkpoint, verified."""
    folder = run.checkpoints(stage)
    steps = sorted({number_of(path) for path in numbered(folder)})
    if step and step not in steps:
        there = listed([str(number) for number in steps])
        raise CheckpointError(
            f"--step must be one whose checkpoint is in {folder}: {there}; got {step}."
        )
    if step:
        return load_state_of(folder, step, run.world)
    state, notes = load_state_before(folder, _BEYOND, run.world)
    for note in notes:
        run.print_line(note)
    if state is None:
        raise CheckpointError(f"{folder} must have a checkpoint that is whole; got none.")
    return state
