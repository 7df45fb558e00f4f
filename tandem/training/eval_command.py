"""Showing a comparison of models in the terminal: figures, then answers side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.config.load import load_config
from tandem.errors import CheckpointError
from tandem.metrics.folder import EVALUATION_FILE
from tandem.metrics.report import write_report
from tandem.text import visible, visible_lines
from tandem.training.best_of_n import frontier_table, measure_best_of
from tandem.training.calibration import reliability_table
from tandem.training.compare import compare
from tandem.training.run_folder import Run
from tandem.training.run_stages import tokenizer_sources
from tandem.training.stage_data import prepare_rows


def evaluate_run(path: str, num_prompts: int, best_of: int = 0) -> dict[str, Any]:
    """Measure a run's models anew and show the outcome.

    Args:
        num_prompts: held-out prompts to answer, just to look; 0 takes the run's own number and
            brings its evaluation.json and report up to date.
        best_of: samples per prompt for the best-of-n frontier; 0 leaves it out.
    Raises:
        CheckpointError: `path` is not a run's folder.
    """
    folder = Path(path)
    if not (folder / "config.yaml").exists():
        raise CheckpointError(f"{path} must be a run's folder (with config.yaml); it is not.")
    config = replace(load_config(folder / "config.yaml"), output_dir=path)
    if num_prompts:
        config = replace(config, ppo=replace(config.ppo, eval_prompts=num_prompts))
    run = Run(config)
    rows = prepare_rows(config, *tokenizer_sources(run))
    run.note_data(rows)
    evaluation = compare(run, rows, save=not num_prompts)
    if best_of:
        evaluation["best_of_n"] = measure_best_of(run, rows, best_of)
        if not num_prompts:
            run.write_json(EVALUATION_FILE, evaluation)
    show_comparison(evaluation)
    if not num_prompts:
        print(f"report: {write_report(folder)}")
    return evaluation


def show_comparison(evaluation: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the figures of every model, then the answers to some prompts with their scores."""
    console = console or Console()
    console.print(figures_table(evaluation["models"]))
    if evaluation.get("reliability"):
        console.print(reliability_table(evaluation["reliability"]))
    if evaluation.get("best_of_n"):
        console.print(frontier_table(evaluation["best_of_n"]))
    for shown in evaluation["answers"]:
        if shown["answers"]:
            console.print(answers_table(shown))


def figures_table(models: Mapping[str, Mapping[str, float]]) -> Table:
    """One row a metric, one column a model."""
    table = Table(title="On held-out rows", title_justify="left")
    table.add_column("metric", overflow="fold")  # a data set is told by the end of its name
    for label in models:
        table.add_column(label, justify="right")
    names: Sequence[str] = list(dict.fromkeys(name for m in models.values() for name in m))
    for name in names:
        values = [model.get(name) for model in models.values()]
        cells = ["" if value is None else f"{value:.4g}" for value in values]
        table.add_row(Text(visible(name)), *cells)
    return table


def answers_table(shown: Mapping[str, Any]) -> Table:
    """One prompt's answers by model, each with its score."""
    title = Text(visible_lines(shown["prompt"]), style="bold")
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("model")
    table.add_column("score", justify="right")
    table.add_column("answer", overflow="fold")
    for label, answer in shown["answers"].items():
        score = "" if answer["score"] is None else f"{answer['score']:+.2f}"
        text = Text(visible_lines(answer["text"]))
        table.add_row(label, score, text)
    return table
