"""A comparison of models in the terminal: metrics, then answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.config.recorded import base_gone, is_gone, with_found
from tandem.config.schema import rl_section
from tandem.errors import CheckpointError, ModelError
from tandem.metrics.folder import EVALUATION_FILE
from tandem.metrics.names import metric_or_unknown, title_of
from tandem.metrics.report import REPORT_FILE, write_report
from tandem.metrics.text import with_unit
from tandem.parallel.world import World
from tandem.text import visible, visible_lines
from tandem.training.calibration import reliability_table
from tandem.training.comparing.beside import compare_beside
from tandem.training.comparing.best_of_n import frontier_table, measure_best_of
from tandem.training.comparing.compare import compare
from tandem.training.comparing.implicit import ImplicitRewards
from tandem.training.comparing.other_data import read_other
from tandem.training.own_folder import config_of_run, on_these_ranks, require_data
from tandem.training.run_folder import Run
from tandem.training.run_stages import tokenizer_sources
from tandem.training.stage_data import StepRows, prepare_rows

_OWN = "On held-out rows"


def evaluate_run(
    path: str,
    num_prompts: int,
    best_of: int = 0,
    *,
    base: str = "",
    data: Sequence[str] = (),
    models: Sequence[str] = (),
    reward_model: str = "",
    on_bad_row: str = "",
) -> dict[str, Any]:
    """Evaluate a run's models again, on its held-out rows or on other data, and print the results.

    Args:
        num_prompts: prompts to answer, without writing anything; 0: the run's own number, or all of
            the other data's, and the record (evaluation.json; of other data a file of its own) and
            the report are updated.
        best_of: samples per prompt for the best-of-n frontier; 0: no frontier.
        base: where the run's base model is, if it was moved.
        data: data sets, as `--data` of a run names them without weights, to evaluate on in place of
            the run's held-out rows.
        models: folders or hub names of further policies, or of adapters, to compare; reward_model:
            of one that scores in place of the run's. With either nothing is written.
        on_bad_row: of `data`: "error" or "drop", as the knob; empty: the run's.
    Raises:
        CheckpointError: `path` is not a run's folder, or the figures, which have been printed,
            cannot be written.
        ConfigError, DataError: `data` cannot be read, or no model of the run could be evaluated on
            them.
        ModelError: the run's base model is gone.
    """
    config = config_of_run(path)
    if not data:
        require_data(config, "evaluated")
    found = on_these_ranks(with_found(config, Path(path)), World())
    if is_gone(found.actor_model) and not base:
        told = base_gone(visible(path), found.actor_model)
        raise ModelError(f"{told}. Say where it is now: --base MODEL.")
    found = replace(found, actor_model=base or found.actor_model)
    run = Run(found)
    run.identity.named = config
    compare_beside(run, models, reward_model)
    if data:
        other = read_other(run, data, on_bad_row)
        rows, file, title = other.rows, other.file, f"On {other.title}"
        most = num_prompts or len(rows.heldout_prompts)
        which, implicit = f"of {other.title}", ImplicitRewards(run, rows)
        evaluation = compare(
            run, rows, num_prompts=most, which=which, save=False, implicit=implicit
        )
        evaluation |= other.facts
    else:
        rows, file, title = _own_rows(run), EVALUATION_FILE, _OWN
        most = num_prompts or rl_section(found).eval_prompts
        implicit = ImplicitRewards(run, rows)
        evaluation = compare(run, rows, num_prompts=most, save=False, implicit=implicit)
    if best_of:
        evaluation["best_of_n"] = measure_best_of(run, rows, best_of, most)
    show_comparison(evaluation, title=title)
    if not (num_prompts or models or reward_model):
        _write(run, file, evaluation)
    return evaluation


def _own_rows(run: Run) -> StepRows:
    """The run's held-out rows."""
    finished = bool(run.judge)
    rows = prepare_rows(
        run.config, *tokenizer_sources(run), trains=False, reward_is_finished=finished
    )
    run.note_data(rows)
    return rows


def _write(run: Run, file: str, evaluation: Mapping[str, Any]) -> None:
    """Write an evaluation into a file of the run's folder, and the report.

    Raises:
        CheckpointError: they cannot be.
    """
    try:
        (run.path / file).parent.mkdir(exist_ok=True)
        run.write_json(file, evaluation)
        if file != EVALUATION_FILE:
            print(f"record: {run.path / file}")
        print(f"report: {write_report(run.path)}")
    except OSError as error:
        raise CheckpointError(
            f"the figures above must be written to {run.path / file} and {REPORT_FILE}; "
            f"got: {error.strerror}. Make the folder writable, or give --prompts N, which writes "
            "nothing."
        ) from None


def show_comparison(
    evaluation: Mapping[str, Any], console: Console | None = None, *, title: str = _OWN
) -> None:
    """Print the metrics of every model, then the answers to some prompts with their scores.

    Args:
        title: on which rows.
    """
    console = console or Console()
    if not any(evaluation["models"].values()):
        console.print("nothing was measured: no row is held out. Give --data FILE.", soft_wrap=True)
        return
    console.print(figures_table(evaluation["models"], title))
    if evaluation.get("reliability"):
        console.print(reliability_table(evaluation["reliability"]))
    if evaluation.get("best_of_n"):
        console.print(frontier_table(evaluation["best_of_n"]))
    for shown in evaluation["answers"]:
        if shown["answers"]:
            console.print(answers_table(shown))


def figures_table(models: Mapping[str, Mapping[str, float]], title: str = _OWN) -> Table:
    """One row per metric, one column per model."""
    table = Table(title=Text(title), title_justify="left")
    table.add_column("metric", overflow="fold")  # a data set's name is at the end
    for label in models:
        table.add_column(Text(visible(label)), justify="right")
    names: Sequence[str] = list(dict.fromkeys(name for m in models.values() for name in m))
    for name in names:
        metric, values = metric_or_unknown(name), [model.get(name) for model in models.values()]
        cells = ["" if n is None else with_unit(n, metric.unit, digits=4) for n in values]
        unit = "" if metric.unit in ("", "share", "ratio") else f" ({metric.unit})"
        table.add_row(Text(visible(title_of(name) + unit)), *cells)
    return table


def answers_table(shown: Mapping[str, Any]) -> Table:
    """One prompt's answers by model, each with its score where any has one."""
    title = Text(visible_lines(shown["prompt"]), style="bold")
    table = Table(title=title, title_justify="left", show_lines=True)
    has_scores = any(answer["score"] is not None for answer in shown["answers"].values())
    table.add_column("model")
    if has_scores:
        table.add_column("score", justify="right")
    table.add_column("answer", overflow="fold")
    for label, answer in shown["answers"].items():
        score = "" if answer["score"] is None else f"{answer['score']:+.2f}"
        text = Text(visible_lines(answer["text"]))
        table.add_row(Text(visible(label)), *[score] * has_scores, text)
    return table
