"""`tandem data check`: what a run will train on, before it starts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from tandem.config.dataset import DataConfig
from tandem.config.spellings import listed
from tandem.config.stages import DEFAULT, in_order, leaving
from tandem.data.assign import Dataset, ReadRow, assign
from tandem.data.causes import why_none
from tandem.data.chat.own_template import OwnTemplate, read_template
from tandem.data.check_tokens import TokenCheck, first_rows, parts_of, print_lengths
from tandem.data.dataset import read_all
from tandem.data.grades import Mode
from tandem.data.ledger import Ledger
from tandem.data.progress import Progress
from tandem.data.reading.saved import hub_without_answer
from tandem.data.split import Split, opening, shares_among
from tandem.errors import ModelError
from tandem.files import folder_near
from tandem.message import answer_text
from tandem.text import counted, first_line, visible
from tandem.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tandem.data.render import Renderer

_SHOWN_CHARACTERS = 2000


def check(
    config: DataConfig,
    data: Sequence[str],
    sft_data: Sequence[str] = (),
    eval_data: Sequence[str] = (),
    *,
    seed: int,
    stages: Sequence[str] = DEFAULT,
    grades: Mode = "auto",
    tokenizer_path: str = "",
    rows: int = 3,
    measured: int = 0,
    progress: Progress | None = None,
    console: Console | None = None,
) -> int:
    """Print what the data sets hold and what each stage would get; bad rows never stop it.

    With a tokenizer it also counts tokens and shows `rows` samples of each data set by token:
    prompt dim, learned tokens green, stop tokens reversed. Characters that do not print are shown
    escaped, so nothing in the data acts on the terminal.

    Args:
        measured: rows whose tokens are counted, evenly spaced, besides the longest; 0: all.
        progress: says on stderr what takes long.
        stages: those of the run. grades: how the reward model's stage learns graded answers.
    Returns:
        The exit code: 1 if a row was bad (or cannot be rendered), else 0.
    Raises:
        ConfigError, DataError: as `load_data`, except for bad rows.
        ModelError: the tokenizer cannot be loaded, or its chat template not be used.
    """
    console, progress = console or Console(), progress or Progress()
    tokens, own = None, read_template(config.own_template)
    if tokenizer_path:
        progress.begin(f"loading the tokenizer {visible(tokenizer_path)}", at_once=True)
        tokens = TokenCheck(*_renderer_of(tokenizer_path, own), config)
    split = Split(config.split or shares_among(stages), 0.0 if eval_data else config.heldout)
    ledger = Ledger()
    read = read_all(
        replace(config, on_bad_row="drop"),
        data,
        sft_data,
        ledger,
        eval_data=eval_data,
        seed=seed,
        read=progress.rows_of,
    )
    progress.begin(f"dividing {counted(len(read), 'row')}")
    lowest = config.lowest_imitated(scores=bool(leaving(stages, "reward model")))
    found = assign(read, split, ledger, seed=seed, stages=stages, grades=grades, lowest=lowest)
    if tokens is not None:
        tokens.measure(read, measured, rows, ledger, progress)
    progress.clear()
    _print_account(console, ledger, stages, with_tokens=tokens is not None)
    _print_without_rows(console, found, stages)
    if tokens is not None:
        tokens.print_limits(console, found, stages)
        tokens.print_warnings(console, ledger)
    _print_characters(console, read)
    if tokens is not None:
        tokens.print_rows(console, rows)
    else:
        for row in first_rows(read, rows):
            _print_sample(console, row.sample)
    _print_bias(console, read)
    _print_labels(console, read)
    _print_grades(console, read, found.grades if leaving(stages, "reward model") else "")
    _print_shared(console, read)
    return 1 if ledger.num_dropped or (tokens is not None and tokens.num_refused) else 0


def _print_characters(console: Console, read: Sequence[ReadRow]) -> None:
    lengths: dict[str, list[int]] = defaultdict(list)
    for row in read:
        for part, text in parts_of(row.sample).items():
            lengths[part].append(len(text))
    print_lengths(console, "characters", lengths)


def _print_account(
    console: Console, ledger: Ledger, stages: Sequence[str], *, with_tokens: bool
) -> None:
    """What became of the rows, and how they were read."""
    console.print(ledger.table())
    console.print(
        f"used: in a run of {' '.join(stages)} (one stage alone, --stages {stages[0]}, uses all "
        "but the held-out rows), before the length limits (dataset.max_tokens, max_prompt_tokens)"
        f"{'' if with_tokens else ', which --tokenizer MODEL counts'}"
    )
    if ledger.num_dropped:
        console.print(
            "dropped: rows that cannot be used. `tandem train` stops at the first, and leaves them "
            "all out with --on-bad-row drop"
        )
    reasons = ledger.reasons()
    if reasons.row_count:
        console.print(reasons)
    for name, account in ledger.datasets.items():
        shapes = ", ".join(f"{shape} ({count})" for shape, count in account.shapes.items())
        console.print(Text(f"{visible(name)} was read as: {shapes or 'nothing usable'}"))


def _print_without_rows(console: Console, found: Dataset, stages: Sequence[str]) -> None:
    """The stages that no row is for, for which the run would be refused, and why."""
    without: dict[str, list[str]] = defaultdict(list)
    for stage in in_order(stages):
        if not getattr(found, stage.share):
            causes = why_none(found.ledger, stage.share, labelled=stage.labelled)
            without[". ".join(causes)].append(stage.name)
    for cause, names in without.items():
        run = f"a run of {' '.join(stages)} would be refused"
        told = f"{run}: no row for {listed(names, 'and')}. {cause}"
        console.print(Text(f"{told.rstrip('. ')}.", style="red"))


def _renderer_of(path: str, own: OwnTemplate | None) -> tuple[PreTrainedTokenizerBase, Renderer]:
    from tandem.data.chat.own_template import put_template
    from tandem.data.render import Renderer

    tokenizer = _load_tokenizer(path)
    return tokenizer, Renderer(tokenizer, own=put_template(tokenizer, own))


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """A folder's tokenizer, or the hub's; the cache's, where the hub, asked once, has no answer."""
    from transformers import AutoTokenizer

    folder = Path(expanduser(path))  # pathlib raises where there is no such user
    silent = "" if folder.is_dir() else hub_without_answer(path, of_model=True)
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=bool(silent))
    # The hub client and the tokenizer formats raise errors of many unrelated classes.
    except Exception as error:
        cause = f"{type(error).__name__}: {visible(first_line(error))[:200].rstrip('.')}"
        if silent:
            cause = f"no such folder, nothing in the hub's cache and no answer from {silent}"
        near = "" if folder.exists() else folder_near(folder)
        raise ModelError(
            f"tokenizer {visible(path)} must be a folder or hub name that loads; got {cause}. "
            f"{f'Did you mean {visible(near)}?' if near else 'Check the path.'}"
        ) from None


def _print_bias(console: Console, read: Sequence[ReadRow]) -> None:
    """How well length alone predicts the chosen answer, which a reward model may learn instead."""
    pairs = [
        (len(answer_text(row.sample.chosen)), len(answer_text(row.sample.rejected)))
        for row in read
        if row.sample.chosen is not None and row.sample.rejected is not None
    ]
    if pairs:
        longer = sum(chosen > rejected for chosen, rejected in pairs) / len(pairs)
        equal = sum(chosen == rejected for chosen, rejected in pairs) / len(pairs)
        line = f"chosen is longer in {longer:.1%} of {len(pairs)} pairs (equal in {equal:.1%})"
        console.print(Text(f"Length bias: {line}."))


def _print_labels(console: Console, read: Sequence[ReadRow]) -> None:
    """How many single answers are called good and bad, and how long the rankings are."""
    labels = Counter(row.sample.label for row in read)
    if labels[True] or labels[False]:
        both = labels[True] + labels[False]
        console.print(
            Text(
                f"Labels: {labels[True]} good and {labels[False]} bad answers "
                f"({labels[True] / both:.1%} good), which a stage on labelled answers trains on, "
                "or the reward model, as grades 1 and 0."
            )
        )
    rankings = Counter(len(row.sample.ranking) for row in read if row.sample.ranking)
    if rankings:
        sizes = ", ".join(f"{count} of {size} answers" for size, count in sorted(rankings.items()))
        console.print(Text(f"Rankings: {sizes}."))


def _print_grades(console: Console, read: Sequence[ReadRow], mode: str) -> None:
    """The grades of each data set, and how the reward model's stage would learn them."""
    grades: dict[str, list[float]] = defaultdict(list)
    columns: dict[str, str] = {}
    for row in read:
        if row.sample.grade is not None:
            grades[row.spec.name].append(row.sample.grade)
            columns[row.spec.name] = row.grade_column
    for name, values in grades.items():
        line = f"Grades of {visible(name)} (column {visible(columns[name])}): {len(values)} answers"
        spread = f"from {min(values):g} to {max(values):g}, mean {np.mean(values):.4g}"
        console.print(Text(f"{line} {spread}, sd {np.std(values):.4g}."))
    if grades and mode:
        how = {"pairs": "as pairs of one prompt's answers", "regression": "by regression"}[mode]
        console.print(Text(f"The reward model would learn them {how}; --grades says otherwise."))


def _print_shared(console: Console, read: Sequence[ReadRow]) -> None:
    """Openings that occur in several data sets; the split keeps each in one place."""
    where: dict[bytes, dict[str, ReadRow]] = defaultdict(dict)
    for row in read:
        where[row.key].setdefault(row.spec.name, row)
    groups: dict[tuple[str, ...], list[ReadRow]] = defaultdict(list)
    for rows in where.values():
        if len(rows) > 1:
            groups[tuple(rows)].append(next(iter(rows.values())))
    if len({row.spec.name for row in read}) > 1 and not groups:
        console.print(Text("Prompts shared between data sets: none."))
    for sets, firsts in groups.items():
        names = " and ".join(map(visible, sets))
        start = visible(opening(firsts[0].sample)[:80])
        console.print(Text(f"Prompts shared between {names}: {len(firsts)}, such as '{start}'."))


def _print_sample(console: Console, sample: Sample) -> None:
    console.print(Text(f"\n{visible(str(sample.source))}", style="bold"))
    if sample.tools:
        console.print(Text(f"  tools: {_shown(sample.tools)}", style="dim"))
    for turn in sample.prompt:
        console.print(Text(f"  {turn.role}: {_shown(answer_text(turn))}", style="dim"))
    if sample.grade is not None:
        console.print(Text(f"  grade: {sample.grade:g}", style="dim"))
    for part in ("chosen", "rejected", "text"):
        if (answer := getattr(sample, part)) is not None:
            style = "red" if part == "rejected" else "green"
            console.print(Text(f"  {part}: {_shown(answer_text(answer))}", style=style))


def _shown(text: str) -> str:
    cut = text[:_SHOWN_CHARACTERS]
    return visible(cut) + ("..." if len(text) > len(cut) else "")
