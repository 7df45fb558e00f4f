"""`tandem data check`: what a run will train on, before it starts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.config.dataset import DataConfig
from tandem.config.stages import DEFAULT, leaving
from tandem.data.assign import ReadRow, assign
from tandem.data.dataset import read_all
from tandem.data.formats import OnBlank, Rows
from tandem.data.grades import Mode
from tandem.data.ledger import Ledger
from tandem.data.own_template import OwnTemplate, read_template
from tandem.data.progress import Progress
from tandem.data.sources import DataSpec, read_rows
from tandem.data.split import Split, opening, shares_among
from tandem.data.tokenview import render, token_text
from tandem.errors import DataError, ModelError
from tandem.message import answer_text
from tandem.text import counted, first_line, visible
from tandem.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tandem.data.render import Renderer

_QUANTILES = (0, 5, 25, 50, 75, 95, 99, 100)
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
        measured: rows whose tokens are counted, evenly spaced; 0: all.
        progress: says on stderr what takes long.
        stages: those of the run. grades: how the reward model's stage learns graded answers.
    Returns:
        The exit code: 1 if a row was bad (or cannot be rendered), else 0.
    Raises:
        ConfigError, DataError: as `load_data`, except for bad rows.
        ModelError: the tokenizer cannot be loaded, or its chat template not be used.
    """
    console, progress = console or Console(), progress or Progress()
    renderer, own = None, read_template(config.own_template)
    if tokenizer_path:
        progress.begin(f"loading the tokenizer {visible(tokenizer_path)}", at_once=True)
        tokenizer, renderer = _renderer_of(tokenizer_path, own)
    split = Split(config.split or shares_among(stages), 0.0 if eval_data else config.heldout)
    ledger = Ledger()
    read = read_all(
        replace(config, on_bad_row="drop"),
        data,
        sft_data,
        ledger,
        eval_data=eval_data,
        seed=seed,
        read=partial(_counted_rows, progress),
    )
    progress.begin(f"dividing {counted(len(read), 'row')}")
    lowest = config.lowest_imitated(scores=bool(leaving(stages, "reward model")))
    found = assign(read, split, ledger, seed=seed, stages=stages, grades=grades, lowest=lowest)
    if renderer is not None:
        progress.begin("looking for what the tokenizer reads otherwise")
        _note_rendering([row.sample for row in read], renderer, ledger)
    progress.clear()
    _print_account(console, ledger, stages)
    if renderer is not None:
        from tandem.data.unwritten import unwritten_lines

        for line in unwritten_lines(renderer, ledger):
            console.print(Text(line, style="red"))
    _print_characters(console, read)
    refused = 0
    if renderer is not None:
        some = _evenly(read, measured)
        refused = _check_tokens(console, progress, read, some, tokenizer, renderer, config, rows)
    else:
        for row in _first_rows(read, rows):
            _print_sample(console, row.sample)
    _print_bias(console, read)
    _print_labels(console, read)
    _print_grades(console, read, found.grades if leaving(stages, "reward model") else "")
    _print_shared(console, read)
    return 1 if ledger.num_dropped or refused else 0


def _print_characters(console: Console, read: Sequence[ReadRow]) -> None:
    lengths: dict[str, list[int]] = defaultdict(list)
    for row in read:
        for part, text in _parts(row.sample).items():
            lengths[part].append(len(text))
    _print_lengths(console, "characters", lengths)


def _print_account(console: Console, ledger: Ledger, stages: Sequence[str]) -> None:
    """What became of the rows, and how they were read."""
    console.print(ledger.table())
    console.print(
        f"used: in a run of {' '.join(stages)} (one stage alone, --stages {stages[0]}, uses all "
        "but the held-out rows), before the length limits (dataset.max_tokens, max_prompt_tokens)"
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


def _note_rendering(samples: Sequence[Sample], renderer: Renderer, ledger: Ledger) -> None:
    from tandem.data.spelled import note_spelled
    from tandem.data.unshown import note_unshown
    from tandem.data.unwritten import note_unwritten

    note_spelled(samples, renderer, ledger)
    note_unshown(samples, renderer, ledger)
    note_unwritten(samples, renderer, ledger)


def _renderer_of(path: str, own: OwnTemplate | None) -> tuple[PreTrainedTokenizerBase, Renderer]:
    from tandem.data.own_template import put_template
    from tandem.data.render import Renderer

    tokenizer = _load_tokenizer(path)
    put_template(tokenizer, own)
    return tokenizer, Renderer(tokenizer, own=own)


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    # The hub client and the tokenizer formats raise errors of many unrelated classes.
    except Exception as error:
        cause = visible(first_line(error))[:200].rstrip(".")
        raise ModelError(
            f"tokenizer {visible(path)} must be a folder or hub name that loads; "
            f"got {type(error).__name__}: {cause}. Check the path."
        ) from None


def _parts(sample: Sample) -> dict[str, str]:
    """A sample's texts by name."""
    prompt = sample.tools + "".join(map(answer_text, sample.prompt))
    answers = {"chosen": sample.chosen, "rejected": sample.rejected}
    said = {name: answer_text(answer) for name, answer in answers.items() if answer is not None}
    named = {"prompt": prompt or None, **said, "text": sample.text}
    return {name: text for name, text in named.items() if text is not None}


def _print_lengths(console: Console, unit: str, lengths: Mapping[str, Sequence[int]]) -> None:
    table = Table(title=f"Lengths in {unit}, by percentile of the rows", title_justify="left")
    table.add_column("part")
    heads = [f"{q}%" for q in _QUANTILES[1:-1]]
    for head in ("rows", "min", *heads, "max"):
        table.add_column(head, justify="right")
    for part, values in lengths.items():
        numbers = np.percentile(values, _QUANTILES, method="nearest").astype(int)
        table.add_row(part, str(len(values)), *map(str, numbers))
    console.print(table)


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


def _first_rows(read: Iterable[ReadRow], rows: int) -> Iterable[ReadRow]:
    """The first `rows` of each data set."""
    shown: Counter[str] = Counter()
    for row in read:
        shown[row.spec.name] += 1
        if shown[row.spec.name] <= rows:
            yield row


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


@dataclass
class _Measured:
    """Token lengths by part, the rows that have them, and why others cannot be rendered."""

    lengths: dict[str, list[int]]
    renderable: list[ReadRow]
    refused: list[str]


def _evenly(read: Sequence[ReadRow], number: int) -> Sequence[ReadRow]:
    """So many of the rows, evenly spaced; all of them if they are not more or `number` is 0."""
    if not 0 < number < len(read):
        return read
    return [read[place * len(read) // number] for place in range(number)]


def _measure(read: Iterable[ReadRow], renderer: Renderer) -> _Measured:
    found = _Measured(defaultdict(list), [], [])
    for row in read:
        try:
            rendered = render(renderer, row.sample)
        except DataError as error:
            found.refused.append(str(error))
            continue
        found.renderable.append(row)
        for part, tokens in rendered.items():
            found.lengths[part].append(len(tokens))
    return found


def _check_tokens(
    console: Console,
    progress: Progress,
    read: Sequence[ReadRow],
    some: Sequence[ReadRow],
    tokenizer: PreTrainedTokenizerBase,
    renderer: Renderer,
    config: DataConfig,
    rows: int,
) -> int:
    """Print the first rows by token and the lengths of `some`; how many cannot be rendered."""
    progress.begin("rendering")
    measures = first = _measure(progress.over(some, len(some)), renderer)
    progress.clear()
    if len(some) < len(read):
        first = _measure(_first_rows(read, rows), renderer)
    _print_tokens(console, _first_rows(first.renderable, rows), tokenizer, renderer)
    _print_token_lengths(console, measures, config, len(read))
    return len(measures.refused)


def _print_tokens(
    console: Console,
    shown: Iterable[ReadRow],
    tokenizer: PreTrainedTokenizerBase,
    renderer: Renderer,
) -> None:
    """Samples by token."""
    for row in shown:
        rendered = render(renderer, row.sample)
        for part, tokens in rendered.items():
            if part == "prompt" and len(rendered) > 1:
                continue  # the answers show it
            learned = sum(tokens.response_mask)
            head = f"{visible(str(row.sample.source))} {part}: {len(tokens)} tokens"
            console.print(Text(f"\n{head}, {learned} learned", style="bold"))
            console.print(token_text(tokens, tokenizer, renderer.stop_token_ids))


def _print_token_lengths(
    console: Console, measured: _Measured, config: DataConfig, num_rows: int
) -> None:
    """Token lengths, rows over the limits, and rows that cannot be rendered."""
    lengths, refused = measured.lengths, measured.refused
    num_tried = len(measured.renderable) + len(refused)
    _print_lengths(console, "tokens (answers with their prompt)", lengths)
    if num_tried < num_rows:
        share = f"{num_tried:,} evenly spaced rows of {num_rows:,}"
        console.print(Text(f"Tokens are those of {share}; --measured 0 counts all."))
    for part, values in lengths.items():
        knob = "max_prompt_tokens" if part == "prompt" else "max_tokens"
        limit = getattr(config, knob)
        if over := sum(value > limit for value in values):
            share = f"{over} of {len(values)} ({over / len(values):.1%})"
            console.print(Text(f"{part}: {share} are longer than {knob} {limit}."))
    for message in refused[:3]:
        console.print(Text(f"cannot be rendered: {visible(message)}", style="red"))
    if refused:
        console.print(Text(f"rows that cannot be rendered: {len(refused)}", style="red"))


def _counted_rows(progress: Progress, spec: DataSpec, *, on_blank: OnBlank) -> Rows:
    """A data set's rows, counted as they are read."""
    progress.begin(f"reading {visible(spec.path)}")
    return progress.over(read_rows(spec, on_blank=on_blank))
