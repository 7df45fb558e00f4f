"""What became of every row: a run saves it as data.json and shows it in its report.

For each data set, always: rows read = used + unused + dropped. A row counts once, however often its
weight repeats it. Unused rows are good ones without a place (no rejected answer in stage 2's
share); dropped ones could not be used at all, or were too long for their stage.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rich.table import Table
from rich.text import Text

from tandem.data.excerpt import excerpt
from tandem.data.rows import BadRow
from tandem.data.split import SHARES
from tandem.errors import DataError
from tandem.text import visible
from tandem.types import Source

FIRST_LINES = 3
"""Places kept per reason for dropping, and per note."""

_DUPLICATES = "same turns and answers as an earlier row"

USES = (*SHARES, "heldout", "ptx")
"""What a row is used for: the shares that stages train on, evaluation, mixture training."""


@dataclass
class Dropped:
    """Rows dropped for one reason: how many, where the first ones are, what the first one holds and
    what to do about it."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    example: str = ""

    def add(self, source: Source) -> None:
        """One more, at `source`."""
        self.count += 1
        if len(self.first) < FIRST_LINES:
            self.first.append(str(source))


@dataclass
class DatasetLedger:
    """One data set's account. All numbers are rows, except blank_lines and extra_copies.

    extra_copies: repeats by weight per use, as planned, before drops by length.
    shapes, notes: how many rows were read by each shape; what was skipped in rows that are used.
    noted_at: where the first rows of each note are.
    unread: how many of the rows that are a prompt alone, or with a chosen answer alone, have each
        column that no shape reads.
    lists: in how many of them it is a list or an object, which is no answer.
    numbers: in how many it is a list of numbers, one for each text or object of another list.
    fingerprint: SHA-256 over the usable rows' content in order.
    late: path to the line numbers of rows dropped after they had a use, so that none counts twice.
    """

    name: str
    path: str
    weight: float = 1.0
    rows: int = 0
    blank_lines: int = 0
    duplicates: int = 0
    used: Counter[str] = field(default_factory=Counter)
    extra_copies: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, Dropped] = field(default_factory=dict)
    shapes: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    noted_at: dict[str, list[str]] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)
    lists: Counter[str] = field(default_factory=Counter)
    numbers: Counter[str] = field(default_factory=Counter)
    late: dict[str, set[int]] = field(default_factory=dict)
    fingerprint: str = ""

    def blank(self) -> None:
        """A blank line was skipped."""
        self.blank_lines += 1

    def use(self, use: str, times: int = 1) -> None:
        """A row has a `use` (of USES), `times` per epoch."""
        self.used[use] += 1
        if times > 1:
            self.extra_copies[use] += times - 1

    def leave(self, reason: str) -> None:
        """A good row has no place, for `reason`."""
        self.unused[reason] += 1

    def note(self, note: str, source: Source) -> None:
        """Something is to be known of a row that is not dropped for it."""
        self.notes[note] += 1
        self._place(note, source)

    def duplicate(self, source: Source) -> None:
        """A row says what an earlier one does."""
        self.duplicates += 1
        self._place(_DUPLICATES, source)

    def _place(self, note: str, source: Source) -> None:
        places = self.noted_at.setdefault(note, [])
        if len(places) < FIRST_LINES:
            places.append(str(source))

    def bad(self, row: BadRow) -> None:
        """A row could not be used."""
        advice = f"Map them: {row.source.path}::{row.map}" if row.map else row.advice
        example = f"found {row.found}. {advice}".strip()
        self.dropped.setdefault(row.reason, Dropped(example=example)).add(row.source)

    @property
    def num_used(self) -> int:
        """Rows with a use."""
        return self.used.total()

    @property
    def num_dropped(self) -> int:
        """Rows that could not be used."""
        return sum(dropped.count for dropped in self.dropped.values())

    def balances(self) -> bool:
        """Whether every row read is used, unused or dropped."""
        return self.rows == self.num_used + self.unused.total() + self.num_dropped


@dataclass
class Ledger:
    """The accounts of all data sets, by name."""

    datasets: dict[str, DatasetLedger] = field(default_factory=dict)

    def open(self, name: str, path: str, weight: float = 1.0) -> DatasetLedger:
        """A new account; DataError if the name is taken."""
        if name in self.datasets:
            raise DataError(
                f"data set names must differ within a ledger; got {excerpt(name)} twice. "
                "Open it under another name."
            )
        self.datasets[name] = DatasetLedger(name, path, weight)
        return self.datasets[name]

    def drop(self, source: Source, use: str, reason: str) -> None:
        """Move a row from used to dropped, for its length, say.

        Only once: further calls for the same row (its copies, a restart from a saved ledger) change
        nothing.

        Raises:
            DataError: the data set is not in this ledger, or the use has no row left.
        """
        account = self.datasets.get(source.dataset)
        if account is not None and source.line in account.late.get(source.path, ()):
            return
        if account is None or account.used[use] == 0:
            raise DataError(
                f"a row dropped from {use} must be one that the ledger counts there; "
                f"got {source} of {excerpt(source.dataset)}. Use the ledger that came with it."
            )
        account.late.setdefault(source.path, set()).add(source.line)
        account.used[use] -= 1
        account.dropped.setdefault(f"{reason} ({use})", Dropped()).add(source)

    @property
    def num_dropped(self) -> int:
        """Rows of all data sets that could not be used."""
        return sum(account.num_dropped for account in self.datasets.values())

    def to_json(self) -> str:
        """The ledger as JSON text, in the order the data sets were read."""
        entries = []
        for account in self.datasets.values():
            entry = {f.name: getattr(account, f.name) for f in fields(account)}
            entry["dropped"] = {reason: asdict(d) for reason, d in account.dropped.items()}
            entry["late"] = {path: sorted(lines) for path, lines in account.late.items()}
            entries.append(entry)
        return json.dumps({"datasets": entries}, indent=1)

    @staticmethod
    def from_json(text: str) -> Ledger:
        """Read what `to_json` wrote.

        Raises:
            DataError: it is not a ledger, or its rows do not add up.
        """
        try:
            accounts = [_account(entry) for entry in json.loads(text)["datasets"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"a data ledger must be the JSON that Tandem wrote; got {type(error).__name__}: "
                f"{visible(str(error))}. Delete data.json to have it written again."
            ) from None
        for account in accounts:
            if not account.balances():
                raise DataError(
                    f"the ledger of {excerpt(account.name)} must have rows = used + unused + "
                    f"dropped; got {account.rows} = {account.num_used} + {account.unused.total()} "
                    f"+ {account.num_dropped}. Delete data.json to have it written again."
                )
        return Ledger({account.name: account for account in accounts})

    def table(self) -> Table:
        """Rows per data set and what became of them, with totals, for a terminal of 80 columns."""
        accounts = list(self.datasets.values())
        uses = [u for u in USES if u != "ptx" or any(a.used["ptx"] for a in accounts)]
        title = "Rows: read = used + unused + dropped"
        table = Table(title=title, title_justify="left", padding=(0, 0, 0, 1))
        table.add_column("data set", overflow="fold")
        heads = ["read", *(u.replace("heldout", "held out") for u in uses), "unused", "dropped"]
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        total: Counter[int] = Counter()
        for account in accounts:
            used = [account.used[use] for use in uses]
            numbers = [account.rows, *used, account.unused.total(), account.num_dropped]
            total.update(dict(enumerate(numbers)))
            table.add_row(Text(visible(account.name)), *map(str, numbers))
        if len(accounts) > 1:
            table.add_section()
            table.add_row("all", *(str(total[i]) for i in range(len(heads))))
        return table

    def reasons(self) -> Table:
        """Why rows are unused or dropped, and notes, for a terminal."""
        table = Table(title="Reasons and notes", title_justify="left")
        for head in ("data set", "rows", "what became of them", "first at"):
            table.add_column(head, justify="right" if head == "rows" else "left", overflow="fold")
        for name, account in self.datasets.items():
            lines = [
                (d.count, f"dropped: {r}" + f" (the first: {d.example})" * bool(d.example), d.first)
                for r, d in account.dropped.items()
            ]
            lines += [(n, f"unused: {reason}", []) for reason, n in account.unused.items()]
            notes = {
                **account.notes,
                _DUPLICATES: account.duplicates,
                "copies by weight, beyond one per row": account.extra_copies.total(),
                "blank lines skipped": account.blank_lines,
            }
            places = account.noted_at
            lines += [(n, f"note: {note}", places.get(note, [])) for note, n in notes.items() if n]
            for count, what, first in lines:
                cells = (visible(what), "\n".join(map(visible, first)))
                table.add_row(Text(visible(name)), str(count), *map(Text, cells))
        return table


def _account(entry: dict[str, Any]) -> DatasetLedger:
    known = {f.name for f in fields(DatasetLedger)}
    if unknown := set(entry) - known:
        raise ValueError(f"unknown entry {sorted(unknown)[0]}")
    counters = ("used", "extra_copies", "unused", "shapes", "notes")
    entry = dict(entry, **{name: Counter(entry[name]) for name in counters})
    for name in ("unread", "lists", "numbers"):  # not in those of earlier versions
        entry[name] = Counter(entry.get(name, {}))
    entry["noted_at"] = {note: [*places] for note, places in entry.get("noted_at", {}).items()}
    entry["dropped"] = {reason: Dropped(**d) for reason, d in entry["dropped"].items()}
    entry["late"] = {path: set(lines) for path, lines in entry["late"].items()}
    return DatasetLedger(**entry)
