"""The characterization sweep: one run per case, one after another, each in its own processes.

    DIR/start/                          the stages before the swept ones, run once
    DIR/STEP/CASE/config.yaml log.txt result.json run/
    DIR/table.txt table.csv report.html over all, updated after every case

The same command continues a stopped sweep: cases with a result are not run again, others start
over.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import yaml

from tandem.config.load import dump_config, plain_values
from tandem.config.schema import RunConfig
from tandem.config.stages import in_order, stage_of
from tandem.errors import CheckpointError, ConfigError, Stopped
from tandem.files import lock
from tandem.plan.cases import Axes, Case, Skipped, skip_reasons, sweep_cases
from tandem.plan.knobs import with_knobs
from tandem.plan.processes import run_command
from tandem.plan.results import Result, read_result, result_of, write_result
from tandem.plan.sweep_table import summary_line, write_tables
from tandem.text import counted

START = "start"
_LOCK = ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to sweep.

    config: what the cases have in common; its stages are swept. ranks: of every case.
    only: run only cases with one of these texts in STAGE/NAME; empty: all.
    keep_models: keep the cases' weights in their folders.
    """

    config: RunConfig
    folder: Path
    ranks: int = 1
    axes: Axes = field(default_factory=Axes)
    only: tuple[str, ...] = ()
    retry_failed: bool = False
    keep_models: bool = False


def planned(sweep: Sweep) -> tuple[list[Case], list[Skipped]]:
    """The cases to run, in order, and those skipped with their reasons."""
    cases, skipped = sweep_cases(sweep.config, sweep.config.stages, sweep.ranks, sweep.axes)

    def wanted(case: Case | Skipped) -> bool:
        where = f"{case.stage}/{case.name}"
        return not sweep.only or any(text in where for text in sweep.only)

    return [c for c in cases if wanted(c)], [c for c in skipped if wanted(c)]


def run_sweep(sweep: Sweep, print_line: Callable[[str], None] = print) -> list[Result]:
    """Run every case that has no result yet, and write the tables.

    A failed case is recorded with its error, and the sweep continues.

    Returns:
        the results of all cases in order, earlier ones included.
    Raises:
        ConfigError: nothing to run, or the stages before the sweep failed.
        CheckpointError: the folder has results of other knobs, or another sweep is running in it.
    """
    cases, skipped = planned(sweep)
    for line in skip_reasons(skipped):
        print_line(line)
    if not cases:
        raise ConfigError(
            "a sweep must have at least one case; got none. See the reasons above, --sweep-only "
            "and --stages."
        )
    sweep.folder.mkdir(parents=True, exist_ok=True)
    with _hold(sweep.folder) as held:
        return _run_all(sweep, cases, skipped, held, print_line)


def _hold(folder: Path) -> BinaryIO:
    """Lock the sweep's folder until the file is closed here and in the cases that get it.

    Raises:
        CheckpointError: another sweep has it, or a case of one that was killed.
    """
    held = lock(folder / _LOCK, inherited=True)
    if held is None:
        raise CheckpointError(
            f"{folder} must be written by one sweep at a time; got another that is running in it, "
            "or a case of one that was killed, which is ending. Wait until it ends, or use another "
            "--sweep-dir."
        )
    return held


def _run_all(
    sweep: Sweep,
    cases: Sequence[Case],
    skipped: Sequence[Skipped],
    held: BinaryIO,
    print_line: Callable[[str], None],
) -> list[Result]:
    for case in cases:  # refuse results of other knobs before anything runs
        _finished(sweep, case)
    base = _after_start(sweep, cases, held, print_line)
    results: list[Result] = []
    for number, case in enumerate(cases, start=1):
        where = f"{case.stage}/{case.name} ({number} of {len(cases)})"
        result = _finished(sweep, case)
        if result is not None and not (result.exit_code and sweep.retry_failed):
            print_line(f"{where}: already done: {summary_line(result)}")
        else:
            print_line(f"{where}: running")
            try:
                result = _run(sweep, case, base, held)
            except (KeyboardInterrupt, Stopped):
                print_line(f"{where}: stopped; the same command runs it again")
                raise
            print_line(f"{where}: {summary_line(result)}")
        results.append(result)
        write_tables(results, skipped, sweep.folder)
    if failed := sum(result.exit_code != 0 for result in results):
        print_line(f"{counted(failed, 'case')} failed; --retry-failed runs such cases again")
    print_line(f"table: {sweep.folder / 'table.txt'}   report: {sweep.folder / 'report.html'}")
    return results


def _case_config(sweep: Sweep, case: Case, base: dict[str, str]) -> RunConfig:
    """base: models by the stage that made them; the case uses those that it starts from."""
    common = {
        "stages": [case.stage],
        "output_dir": str(_folder(sweep, case) / "run"),
        "save_every": 0,
        "log.tensorboard": False,
        "log.wandb": "",
    }
    given: dict[str, object] = {}
    for name in stage_of(case.stage).after:
        if name in base:
            given.setdefault(stage_of(name).given, base[name])
    return with_knobs(sweep.config, {**given, **common, **case.knobs})


def _run(sweep: Sweep, case: Case, base: dict[str, str], held: BinaryIO) -> Result:
    folder = _folder(sweep, case)
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted or failed case left
    folder.mkdir(parents=True)
    config = folder / "config.yaml"
    config.write_text(dump_config(_case_config(sweep, case, base)), encoding="utf-8")
    ended = run_command(_arguments(case.stage, config, case.ranks), folder / "log.txt", held)
    result = result_of(case, _digest(sweep, case), ended, folder / "run", _device(sweep))
    if not sweep.keep_models:
        shutil.rmtree(folder / "run" / case.stage, ignore_errors=True)
        shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
    write_result(result, folder)
    return result


def _finished(sweep: Sweep, case: Case) -> Result | None:
    """The case's earlier result; refuses one of other knobs."""
    folder = _folder(sweep, case)
    result = read_result(folder)
    if result is not None and result.digest != _digest(sweep, case):
        raise CheckpointError(
            f"{folder} must have a result of the same knobs; got others. Use another --sweep-dir "
            "or remove that folder."
        )
    return result


def _after_start(
    sweep: Sweep, cases: Sequence[Case], held: BinaryIO, print_line: Callable[[str], None]
) -> dict[str, str]:
    """Run once, as configured, the stages that the swept ones start from; returns their models."""
    taken = {name for case in cases for name in stage_of(case.stage).after}
    stages = in_order(taken & set(sweep.config.stages))
    needed = [stage.name for stage in stages]
    if not needed:
        return {}
    folder = sweep.folder / START
    made = folder / "run"
    case = Case("train", START, {}, sweep.ranks)
    result = read_result(folder)
    config = with_knobs(
        sweep.config,
        {"stages": needed, "output_dir": str(made), "log.tensorboard": False, "log.wandb": ""},
    )
    digest = _digest_of(config, sweep.ranks)
    if result is None or result.exit_code or result.digest != digest:
        print_line(f"start: {' '.join(needed)}, which the swept stages start from")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        arguments = _arguments("train", folder / "config.yaml", sweep.ranks)
        ended = run_command(arguments, folder / "log.txt", held)
        if ended.exit_code:
            why = ended.error.rstrip(".")
            raise ConfigError(
                f"the stages that the sweep starts from must run; got: {why}. See "
                f"{folder / 'log.txt'}."
            )
        write_result(result_of(case, digest, ended, made, _device(sweep)), folder)
    return {stage.name: str(made / stage.model_folder) for stage in stages}


def _arguments(command: str, config: Path, ranks: int) -> list[str]:
    return [command, "--config", str(config), *(["--num-gpus", str(ranks)] if ranks > 1 else [])]


def _folder(sweep: Sweep, case: Case) -> Path:
    return sweep.folder / case.stage / case.name


def _device(sweep: Sweep) -> str:
    from tandem.devices import resolve_device  # imports torch

    return resolve_device(sweep.config.device).type


def _digest(sweep: Sweep, case: Case) -> str:
    return _digest_of(_case_config(sweep, case, {}), case.ranks)


def _digest_of(config: RunConfig, ranks: int) -> str:
    """The digest of knobs and ranks, without the folder."""
    values = plain_values(with_knobs(config, {"output_dir": "run"}))
    # Not `dump_config`: where long texts are folded may differ between versions of its writer.
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=False)
    return hashlib.sha256(f"{ranks} ranks\n{text}".encode()).hexdigest()
