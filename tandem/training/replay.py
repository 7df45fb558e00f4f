"""`tandem replay`: repeat one step of a run without changing the run; show its tokens in a table.

A step depends only on the checkpoint before it, its rows and the seed, so the repeated one gives
the same metrics, on a CPU to the last bit. They are compared with the run's own record.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.config.recorded import with_found
from tandem.config.schema import RunConfig
from tandem.config.spellings import listed
from tandem.config.stages import stage_of
from tandem.data.tokenview import TokenPieces
from tandem.errors import ConfigError
from tandem.metrics.log import Record, read_metrics
from tandem.metrics.own import OWN_PREFIX
from tandem.parallel.world import World
from tandem.training.flight_recorder import Recorded
from tandem.training.own_folder import config_of_run, on_these_ranks, require_data
from tandem.training.run_folder import Run
from tandem.training.run_stages import prepared, tokenizer_sources
from tandem.training.stage_data import prepare_rows
from tandem.training.stage_loop import run_stage
from tandem.types import Experience, TokenRow

_WIDTH = 100
_NOT_COMPARED = (
    *("seconds", "reward_seconds", "tokens_per_", "samples_per_", "tflops", "peak_memory", "rank_"),
    OWN_PREFIX,  # of a program that does not run here
    "skipped",  # counted since the beginning of the run
)


_READ_EXACTLY = (
    "note: where the run had several ranks they gathered weights as int8 "
    "(parallel.zero_quantized_weights); one rank has them exactly, so its numbers are others"
)


def replay(folder: str, step: int, *, stage: str = "", rows: int = 3) -> int:
    """Repeat a step and print its metrics and tokens; 0 if the metrics are as recorded, else 1.

    Args:
        folder: the run's.
        stage: its name; empty: the last that has recorded the step.
        rows: how many sequences to show.
    Raises:
        CheckpointError: the folder is not a run's.
        ConfigError: there is no such step, or `rows` is negative.
    """
    if rows < 0:
        raise ConfigError(f"--rows must be >= 0; got {rows}.")
    config = config_of_run(folder)
    records = read_metrics(folder)
    recorded = {record.stage: record for record in records if record.step == step}
    stages = [stage] if stage else [name for name in config.stages if name in recorded][-1:]
    if step < 1 or not stages or stages[0] not in config.stages:
        raise ConfigError(_not_recorded(folder, step, stage, records, config))
    require_data(config, "repeated")
    found = on_these_ranks(with_found(config, Path(folder)), World())
    run = Run(found, print_line=print, writes=False)
    run.identity.named = config
    data = prepare_rows(run.config, *tokenizer_sources(run))
    run.note_data(data)
    reached = run_stage(run, stages[0], prepared(stages[0], run, data), until=step)
    assert reached is not None
    console = Console()
    if console.width < _WIDTH:  # one line per token, even if the terminal wraps it
        console = Console(width=_WIDTH)
    console.print(f"{stages[0]} step {step}, again", style="bold")
    is_same = _show_metrics(console, reached, recorded.get(stages[0]))
    if not is_same and config.parallel.zero_quantized_weights:
        console.print(_READ_EXACTLY, highlight=False)
    reads_pairs = stage_of(stages[0]).leaves == "reward model"
    tokenizer = data.reward_tokenizer if reads_pairs else data.tokenizer
    _show_rows(console, reached, TokenPieces(tokenizer), rows)
    return 0 if is_same else 1


def _not_recorded(
    folder: str, step: int, stage: str, records: Sequence[Record], config: RunConfig
) -> str:
    """Why a step cannot be repeated, and which ones can."""
    last: dict[str, int] = {}
    for record in records:
        last[record.stage] = max(record.step, last.get(record.stage, 0))
    if stage and stage not in {*last, *config.stages}:
        near = difflib.get_close_matches(stage, last, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        return f"--stage must be {listed(list(last))}, of {folder}; got {stage!r}.{meant}"
    if stage in last and stage not in config.stages:
        return (
            f"--stage must be one that {folder}/config.yaml runs, {listed(config.stages)}: those "
            f"are the knobs of the last command in this folder; got {stage}. Run the command of "
            f"{stage} there again, which changes nothing else, and then repeat the step."
        )
    steps = ", ".join(f"{name} 1 to {end}" for name, end in last.items() if end)
    return (
        f"--step must be a step that {folder} has recorded ({steps or 'none'}); got {step}"
        f"{f' of {stage}' if stage else ''}."
    )


def _show_metrics(console: Console, now: Recorded, then: Record | None) -> bool:
    """Print every metric now and as recorded; whether they are equal, except for timings."""
    table = Table("metric", "now", "recorded", "", box=box.SIMPLE)
    is_same = True
    values, recorded = now.values or {}, {} if then is None else then.values
    for name in dict.fromkeys((*values, *recorded)):
        if name.startswith(_NOT_COMPARED):
            continue
        pair = values.get(name), recorded.get(name)
        are_nan = all(value is not None and math.isnan(value) for value in pair)
        is_equal = then is None or pair[0] == pair[1] or are_nan
        is_same &= is_equal
        shown = ("" if value is None else f"{value:.9g}" for value in pair)
        table.add_row(name, *shown, "" if is_equal else "!")
    console.print(table)
    if then is None:
        console.print("the run has no record of this step")
    return is_same


def _show_rows(console: Console, recorded: Recorded, pieces: TokenPieces, rows: int) -> None:
    made = recorded.made
    if isinstance(made, Experience):
        for row in range(min(rows, len(made))):
            console.print(_answer_table(made, row, pieces))
        return
    for row in recorded.rows[:rows]:
        parts = (row,) if isinstance(row, TokenRow) else getattr(row, "sequences", ())
        for part in parts:
            console.print(_learned(part, pieces))


def _answer_table(made: Experience, row: int, pieces: TokenPieces) -> Table:
    """One answer by token: log-probs and KL in nats, the rest in reward units; the advantage as the
    update reads it, whitened or not."""
    source = made.rollout.prompts[row].source if len(made.rollout) == len(made) else None
    rewarded = not bool(made.scores.isnan().all())
    title = f"answer {row + 1}"
    if rewarded:
        title += f", score {float(made.scores[row]):.4g}"
    if source is not None:
        title += f", prompt from {source}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    reference = made.ref_logprobs
    columns = {
        "log-prob": made.old_logprobs,
        "reference": reference,
        "kl": None if reference is None else made.old_logprobs - reference,
        "value": made.values,
        "reward": made.rewards if rewarded else None,
        "advantage": made.advantages if rewarded else None,
        "return": made.returns,
    }
    shown = {name: numbers[row] for name, numbers in columns.items() if numbers is not None}
    for name in ("token", "text", *shown):
        table.add_column(name, justify="left" if name == "text" else "right", no_wrap=True)
    ids = made.batch.token_ids[row].tolist()
    texts = pieces(ids)
    for place in made.batch.response_mask[row].nonzero().flatten().tolist():
        numbers = (f"{float(column[place]):.4f}" for column in shown.values())
        table.add_row(str(ids[place]), Text(repr(texts[place])), *numbers)
    return table


def _learned(row: TokenRow, pieces: TokenPieces) -> Text:
    """A row's text, with the learned tokens in bold."""
    text = Text(f"{row.source}  ")
    for piece, is_learned in zip(pieces(row.token_ids), row.response_mask, strict=True):
        text.append(repr(piece)[1:-1], style="bold" if is_learned else "dim")
    return text
