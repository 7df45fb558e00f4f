"""What `tandem data check` does with a tokenizer: rows by token, their lengths and the limits."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.config.dataset import DataConfig
from tandem.config.stages import in_order
from tandem.data.assign import Dataset, ReadRow
from tandem.data.ledger import Ledger
from tandem.data.loader import evenly
from tandem.data.progress import Progress
from tandem.data.tokenview import render, token_text
from tandem.errors import DataError
from tandem.message import answer_text
from tandem.text import counted, visible
from tandem.types import Sample, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tandem.data.render import Renderer

_QUANTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_LONGEST = 100
"""Rows with the most characters, which are measured besides evenly spaced ones."""
_REFUSED = 3
"""Rows that cannot be rendered of which the error is shown."""


@dataclass
class _Measured:
    """Rows that can be rendered, with the tokens of each part, and why others cannot."""

    lengths: list[tuple[ReadRow, dict[str, int]]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lengths) + len(self.refused)

    def by_part(self) -> dict[str, list[int]]:
        """Token lengths by part."""
        found: dict[str, list[int]] = defaultdict(list)
        for _, lengths in self.lengths:
            for part, length in lengths.items():
                found[part].append(length)
        return found


class TokenCheck:
    """What a tokenizer makes of the rows."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, renderer: Renderer, config: DataConfig
    ) -> None:
        self._tokenizer, self._renderer = tokenizer, renderer
        self._limits = {name: getattr(config, name) for name in ("max_tokens", "max_prompt_tokens")}
        self._even = self._longest = self._first = _Measured()
        self._num_rows = 0

    @property
    def num_refused(self) -> int:
        """Rows measured that cannot be rendered."""
        return len(self._even.refused) + len(self._longest.refused)

    def measure(
        self, read: Sequence[ReadRow], number: int, shown: int, ledger: Ledger, progress: Progress
    ) -> None:
        """Render some rows, and note in the ledger what the tokenizer reads otherwise in any.

        Args:
            number: evenly spaced rows that are measured, besides the longest; 0: all. shown: rows
                of each data set that will be shown.
        """
        from tandem.data.spelled import note_spelled
        from tandem.data.unshown import note_unshown
        from tandem.data.unwritten import note_unwritten

        progress.begin("looking for what the tokenizer reads otherwise")
        samples = [row.sample for row in read]
        for note in (note_spelled, note_unshown, note_unwritten):
            note(samples, self._renderer, ledger)
        progress.begin("rendering")
        self._num_rows = len(read)
        is_all = not 0 < number < len(read)
        some = read if is_all else evenly(read, number)
        known = {id(row) for row in some}
        others = [] if is_all else [row for row in read if id(row) not in known]
        longest = heapq.nlargest(_LONGEST, others, key=_characters)
        self._even = self._measured(progress.over(some, len(some)))
        self._longest = self._measured(longest)
        self._first = self._even if is_all else self._measured(first_rows(read, shown))

    def print_limits(self, console: Console, found: Dataset, stages: Sequence[str]) -> None:
        """How many rows a run would drop for their length, or because they cannot be rendered."""
        shares = {stage.share for stage in in_order(stages)}
        uses = {
            source: share
            for share in sorted(shares)
            for sample in getattr(found, share)
            for source in sample.sources
        }
        over, longer = (self._over(part, uses) for part in (self._even, self._longest))
        limits = f" {'or' if over or longer else 'and'} ".join(
            f"{knob} {self._limits[knob]:,}" for knob in sorted({*map(_knob, shares)})
        )
        measured = f"{len(self._even):,} {'' if self._is_all else 'evenly spaced '}rows"
        others = f"the {len(self._longest):,} longest others"
        if over or longer:
            told = f"{len(over):,} of {measured} ({len(over) / len(self._even):.1%})"
            told += "" if self._is_all else f", and {len(longer):,} of {others},"
            first = visible(str((over + longer)[0]))
            told += f" are longer than {limits} (--dataset.on-long-row); the first: {first}"
        else:
            told = f"{measured}{'' if self._is_all else f' and {others}'} are within {limits}"
        console.print(Text(f"limits: {told}"))
        refused = self._even.refused + self._longest.refused
        for message in refused[:_REFUSED]:
            console.print(Text(f"cannot be rendered: {visible(message)}", style="red"))
        if refused:
            number = len(self._even) + len(self._longest)
            line = f"rows that cannot be rendered: {len(refused):,} of {number:,} measured, which"
            line += " are counted as used above. `tandem train` stops at the first, and leaves them"
            console.print(Text(f"{line} all out with --on-bad-row drop", style="red"))

    def print_warnings(self, console: Console, ledger: Ledger) -> None:
        """What many rows, or all by their template, have that the tokenizer cannot write."""
        from tandem.data.unwritten import unwritten_lines

        for line in unwritten_lines(self._renderer, ledger):
            console.print(Text(line, style="red"))

    def print_rows(self, console: Console, shown: int) -> None:
        """The first rows of each data set by token, and the token lengths of those measured."""
        for row in first_rows([row for row, _ in self._first.lengths], shown):
            rendered = render(self._renderer, row.sample)
            for part, tokens in rendered.items():
                if part == "prompt" and len(rendered) > 1:
                    continue  # the answers show it
                learned = sum(tokens.response_mask)
                head = f"{visible(str(row.sample.source))} {part}: {len(tokens)} tokens"
                console.print(Text(f"\n{head}, {learned} learned", style="bold"))
                console.print(token_text(tokens, self._tokenizer, self._renderer.stop_token_ids))
        lengths, longest = self._even.by_part(), self._longest.by_part()
        largest = {part: max(values) for part, values in longest.items()}
        print_lengths(console, "tokens (answers with their prompt)", lengths, largest)
        if not self._is_all:
            console.print(
                f"Tokens are those of {len(self._even):,} evenly spaced rows of "
                f"{self._num_rows:,}, but max is also of the {counted(len(self._longest), 'row')} "
                "with the most characters among the others; --measured 0 counts all."
            )
        for part, values in lengths.items():
            knob = "max_prompt_tokens" if part == "prompt" else "max_tokens"
            if over := sum(value > self._limits[knob] for value in values):
                share = f"{over} of {len(values)} ({over / len(values):.1%})"
                line = f"{part}: {share} are longer than {knob} {self._limits[knob]}."
                console.print(Text(line))

    @property
    def _is_all(self) -> bool:
        return len(self._even) == self._num_rows

    def _measured(self, rows: Iterable[ReadRow]) -> _Measured:
        found = _Measured()
        for row in rows:
            try:
                rendered = render(self._renderer, row.sample)
            except DataError as error:
                found.refused.append(str(error))
                continue
            found.lengths.append((row, {part: len(tokens) for part, tokens in rendered.items()}))
        return found

    def _over(self, measured: _Measured, uses: Mapping[Source, str]) -> list[Source]:
        """Rows that are too long for their use."""
        found = []
        for row, lengths in measured.lengths:
            source = row.sample.source
            if (use := uses.get(source)) is None:  # held out or unused
                continue
            parts = [n for part, n in lengths.items() if (part == "prompt") == (use == "prompts")]
            if any(length > self._limits[_knob(use)] for length in parts):
                found.append(source)
        return found


def first_rows(read: Iterable[ReadRow], rows: int) -> Iterable[ReadRow]:
    """The first `rows` of each data set."""
    shown: Counter[str] = Counter()
    for row in read:
        shown[row.spec.name] += 1
        if shown[row.spec.name] <= rows:
            yield row


def parts_of(sample: Sample) -> dict[str, str]:
    """A sample's texts by name."""
    prompt = sample.tools + "".join(map(answer_text, sample.prompt))
    answers = {"chosen": sample.chosen, "rejected": sample.rejected}
    said = {name: answer_text(answer) for name, answer in answers.items() if answer is not None}
    named = {"prompt": prompt or None, **said, "text": sample.text}
    return {name: text for name, text in named.items() if text is not None}


def print_lengths(
    console: Console,
    unit: str,
    lengths: Mapping[str, Sequence[int]],
    largest: Mapping[str, int] | None = None,
) -> None:
    """A table of lengths by part; nothing where there are none. A narrow terminal has a column of
    each part in place of a row.

    Args:
        largest: of further rows the largest length by part, for the last column alone.
    """
    if not lengths:
        return
    table = Table(title=f"Lengths in {unit}, by percentile of the rows", title_justify="left")
    heads = [f"{q}%" for q in _QUANTILES[1:-1]]
    lines: list[tuple[str, ...]] = [("part", "rows", "min", *heads, "max")]
    for part, values in lengths.items():
        numbers = np.percentile(values, _QUANTILES, method="nearest").astype(int)
        numbers[-1] = max(numbers[-1], (largest or {}).get(part, 0))
        lines.append((part, str(len(values)), *map(str, numbers)))
    if 1 + sum(3 + max(map(len, column)) for column in zip(*lines, strict=True)) > console.width:
        lines = list(zip(*lines, strict=True))
    for number, head in enumerate(lines[0]):
        table.add_column(head, justify="right" if number else "left")
    for line in lines[1:]:
        table.add_row(*line)
    console.print(table)


def _characters(row: ReadRow) -> int:
    return sum(map(len, parts_of(row.sample).values()))


def _knob(share: str) -> str:
    """The limit of the rows of a share."""
    return "max_prompt_tokens" if share == "prompts" else "max_tokens"
