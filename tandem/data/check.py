"""`tandem data check`: what will be trained on, before anything is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.config.schema import DataConfig
from tandem.config.stages import DEFAULT
from tandem.data.dataset import ReadRow, assign, read_all
from tandem.data.ledger import Ledger
from tandem.data.split import Split, opening, shares_among
from tandem.data.tokenview import render, token_text
from tandem.errors import DataError, ModelError
from tandem.text import first_line, visible
from tandem.types import Sample, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tandem.data.render import Renderer

_QUANTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_SHOWN_CHARACTERS = 2000


def check(
    config: DataConfig,
    data: Sequence[str],
    sft_data: Sequence[str] = (),
    *,
    seed: int,
    steps: Sequence[str] = DEFAULT,
    tokenizer_path: str = "",
    rows: int = 3,
    console: Console | None = None,
) -> int:
    """Print what the data sets hold and what each step would get; bad rows never stop it.

    With a tokenizer it counts tokens too and shows `rows` samples of each data set by token:
    prompt dim, learned tokens green, stop tokens reversed. Nothing in the data acts on the
    terminal: what does not print is shown as its escape.

    Args:
        steps: those of the run that would read the data.
    Returns:
        The exit code: 1 if a row was bad (or cannot be rendered), else 0.
    Raises:
        ConfigError, DataError: as `load_data`, but for bad rows.
        ModelError: the tokenizer cannot be loaded.
    """
    console = console or Console()
    tokenizer = _load_tokenizer(tokenizer_path) if tokenizer_path else None
    split = Split(config.split or shares_among(steps), config.heldout)
    ledger = Ledger()
    dropping = replace(config, on_bad_row="drop")
    read = read_all(dropping, data, sft_data, ledger, seed=seed)
    assign(read, split, ledger, seed=seed, steps=steps)
    console.print(ledger.table())
    console.print(
        f"used: by a run of {' '.join(steps)} (one step alone, --steps {steps[0]}, takes all but "
        "the held-out rows), before its limits of length (dataset.max_tokens, max_prompt_tokens)"
    )
    if ledger.num_dropped:
        console.print("dropped: `tandem train` stops at the first of them, or --on-bad-row drop")
    reasons = ledger.reasons()
    if reasons.row_count:
        console.print(reasons)
    _print_shapes(console, ledger)
    _print_lengths(console, "characters", _characters(read))
    refused = 0
    if tokenizer is not None:
        refused = _print_tokens(console, read, tokenizer, config, rows)
    else:
        _print_samples(console, read, rows)
    _print_bias(console, read)
    _print_labels(console, read)
    _print_shared(console, read)
    return 1 if ledger.num_dropped or refused else 0


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    # The hub client and the tokenizer formats raise errors of many unrelated classes.
    except Exception as error:
        cause = visible(first_line(error))[:200]
        raise ModelError(
            f"tokenizer {visible(path)} must be a folder or hub name that loads; "
            f"got {type(error).__name__}: {cause}. Check the path."
        ) from None


def _parts(sample: Sample) -> dict[str, str]:
    """A sample's texts by the name they are reported under."""
    prompt = "".join(turn.content for turn in sample.prompt)
    named = {"prompt": prompt or None, "chosen": sample.chosen, "rejected": sample.rejected}
    return {k: v for k, v in {**named, "text": sample.text}.items() if v is not None}


def _characters(read: Sequence[ReadRow]) -> dict[str, list[int]]:
    lengths: dict[str, list[int]] = defaultdict(list)
    for row in read:
        for part, text in _parts(row.sample).items():
            lengths[part].append(len(text))
    return lengths


def _print_shapes(console: Console, ledger: Ledger) -> None:
    for name, account in ledger.datasets.items():
        shapes = ", ".join(f"{shape} ({count})" for shape, count in account.shapes.items())
        console.print(Text(f"{visible(name)} was read as: {shapes or 'nothing usable'}"))


def _print_lengths(console: Console, unit: str, lengths: Mapping[str, Sequence[int]]) -> None:
    table = Table(title=f"Lengths in {unit}, by percentile of the rows", title_justify="left")
    table.add_column("part")
    for head in (
        "rows",
        *("min" if q == 0 else "max" if q == 100 else f"{q}%" for q in _QUANTILES),
    ):
        table.add_column(head, justify="right")
    for part, values in lengths.items():
        numbers = np.percentile(values, _QUANTILES, method="nearest").astype(int)
        table.add_row(part, str(len(values)), *map(str, numbers))
    console.print(table)


def _print_bias(console: Console, read: Sequence[ReadRow]) -> None:
    """How far length alone tells the chosen answer: what a lazy reward model would learn."""
    pairs = [
        (len(row.sample.chosen), len(row.sample.rejected))
        for row in read
        if row.sample.chosen is not None and row.sample.rejected is not None
    ]
    if not pairs:
        return
    longer = sum(chosen > rejected for chosen, rejected in pairs)
    equal = sum(chosen == rejected for chosen, rejected in pairs)
    console.print(
        Text(
            f"Length bias: chosen is longer in {longer / len(pairs):.1%} of {len(pairs)} pairs "
            f"(equal in {equal / len(pairs):.1%})."
        )
    )


def _print_labels(console: Console, read: Sequence[ReadRow]) -> None:
    """How many single answers are called good and bad, and how long the rankings are."""
    labels = Counter(row.sample.label for row in read)
    if labels[True] or labels[False]:
        both = labels[True] + labels[False]
        console.print(
            Text(
                f"Labels: {labels[True]} good and {labels[False]} bad answers "
                f"({labels[True] / both:.1%} good), which a stage on labelled answers trains on."
            )
        )
    rankings = Counter(len(row.sample.ranking) for row in read if row.sample.ranking)
    if rankings:
        sizes = ", ".join(f"{count} of {size} answers" for size, count in sorted(rankings.items()))
        console.print(Text(f"Rankings: {sizes}."))


def _print_shared(console: Console, read: Sequence[ReadRow]) -> None:
    """Openings that occur in several data sets; the split keeps each of them on one side."""
    where: dict[bytes, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    example: dict[tuple[str, ...], str] = {}
    groups: dict[tuple[str, ...], int] = defaultdict(int)
    for row in read:
        where[row.key][row.spec.name] += 1
    shared = {key: tuple(sets) for key, sets in where.items() if len(sets) > 1}
    for sets in shared.values():
        groups[sets] += 1
    for row in read:
        if row.key in shared:
            example.setdefault(shared[row.key], opening(row.sample))
    if len({row.spec.name for row in read}) > 1 and not groups:
        console.print(Text("Prompts shared between data sets: none."))
    for sets, count in groups.items():
        names = " and ".join(map(visible, sets))
        start = visible(example[sets][:80])
        console.print(Text(f"Prompts shared between {names}: {count}, such as '{start}'."))


def _print_samples(console: Console, read: Sequence[ReadRow], rows: int) -> None:
    shown: Counter[str] = Counter()
    for row in read:
        shown[row.spec.name] += 1
        if shown[row.spec.name] > rows:
            continue
        console.print(Text(f"\n{visible(str(row.sample.source))}", style="bold"))
        for turn in row.sample.prompt:
            console.print(Text(f"  {turn.role}: {_shown(turn.content)}", style="dim"))
        for part in ("chosen", "rejected", "text"):
            if (answer := getattr(row.sample, part)) is not None:
                style = "red" if part == "rejected" else "green"
                console.print(Text(f"  {part}: {_shown(answer)}", style=style))


def _shown(text: str) -> str:
    cut = text[:_SHOWN_CHARACTERS]
    return visible(cut) + ("..." if len(text) > len(cut) else "")


def _print_tokens(
    console: Console,
    read: Sequence[ReadRow],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    rows: int,
) -> int:
    """Token lengths, what is over the limits, and samples by token; returns rows refused."""
    from tandem.data.render import Renderer

    renderer = Renderer(tokenizer)
    lengths: dict[str, list[int]] = defaultdict(list)
    refused: list[str] = []
    shown: Counter[str] = Counter()
    for row in read:
        try:
            rendered = render(renderer, row.sample)
        except DataError as error:
            refused.append(str(error))
            continue
        for part, tokens in rendered.items():
            lengths[part].append(len(tokens))
        shown[row.spec.name] += 1
        if shown[row.spec.name] <= rows:
            _print_rendered(console, row.sample, rendered, renderer, tokenizer)
    _print_lengths(console, "tokens (answers with their prompt)", lengths)
    for part, values in lengths.items():
        limit = config.max_prompt_tokens if part == "prompt" else config.max_tokens
        knob = "max_prompt_tokens" if part == "prompt" else "max_tokens"
        over = sum(value > limit for value in values)
        if over:
            share = f"{over} of {len(values)} ({over / len(values):.1%})"
            console.print(Text(f"{part}: {share} are longer than {knob} {limit}."))
    for message in refused[:3]:
        console.print(Text(f"cannot be rendered: {visible(message)}", style="red"))
    if refused:
        console.print(Text(f"rows that cannot be rendered: {len(refused)}", style="red"))
    return len(refused)


def _print_rendered(
    console: Console,
    sample: Sample,
    rendered: Mapping[str, TokenRow],
    renderer: Renderer,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    for part, row in rendered.items():
        if part == "prompt" and len(rendered) > 1:
            continue  # the answers show it
        learned = sum(row.response_mask)
        head = f"{visible(str(sample.source))} {part}: {len(row)} tokens, {learned} learned"
        console.print(Text(f"\n{head}", style="bold"))
        console.print(token_text(row, tokenizer, renderer.stop_token_ids))
