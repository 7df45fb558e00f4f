"""Data sets in, samples per step out: reading, splitting, weighing; every row accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.config.schema import DataConfig
from tandem.config.stages import DEFAULT, in_order
from tandem.data.ledger import DatasetLedger, Ledger
from tandem.data.rows import BadRow, RowProblem
from tandem.data.shapes import Shaped, to_sample
from tandem.data.sources import DataSpec, parse_columns, parse_spec, read_rows
from tandem.data.split import (
    DEFAULT_SHARES,
    SHARES,
    Place,
    Split,
    content_key,
    copies,
    first_of,
    share_of,
    shares_among,
    split_key,
)
from tandem.errors import ConfigError, DataError
from tandem.text import visible
from tandem.types import Message, Sample

_HOPELESS = 100_000
"""Rows of a data set that are looked at if none of them can be used: 2 seconds."""
_NUMBERS = {share: number for number, share in enumerate(SHARES, start=1)}


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A usable row before it has a step: its sample, its keys, and the data set it came from.

    key: `split.split_key`; content: `split.content_key`. sft_only: it came as SFT-only data.
    """

    sample: Sample
    key: bytes
    content: bytes
    spec: DataSpec
    sft_only: bool


@dataclass(frozen=True)
class Dataset:
    """The samples of each share, in reading order, repeated as their data sets' weights say.

    texts: samples with an answer or text. pairs: with a preferred and a rejected answer. prompts:
    any. A share that no step of the run trains on has its samples here too, but the ledger calls
    them unused.
    heldout: samples of every kind, once each, that no step trains on. No opening of a dialog is
    in two of them. ledger: what became of every row.
    """

    texts: list[Sample] = field(default_factory=list)
    pairs: list[Sample] = field(default_factory=list)
    prompts: list[Sample] = field(default_factory=list)
    heldout: list[Sample] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)

    def add(self, place: Place, sample: Sample, times: int, *, runs: bool) -> None:
        """Put `sample` into `place`, `times` per epoch; `runs`: whether a step uses it there."""
        rows: dict[Place, list[Sample]] = {
            "texts": self.texts,
            "pairs": self.pairs,
            "prompts": self.prompts,
            "heldout": self.heldout,
        }
        rows[place].extend([sample] * times)
        account = self.ledger.datasets[sample.source.dataset]
        if runs or place == "heldout":
            account.use(place, times)
        else:
            step = f"step {_NUMBERS[place]} ({first_of(place)})"
            account.leave(f"kept for {step}, which does not run")


@dataclass(frozen=True)
class TextData:
    """Samples for mixture (ptx) training, and those held out to see forgetting with."""

    train: list[Sample]
    heldout: list[Sample]
    ledger: Ledger


def load_data(
    config: DataConfig,
    data: Sequence[str],
    sft_data: Sequence[str] = (),
    *,
    seed: int,
    steps: Sequence[str] = DEFAULT,
) -> Dataset:
    """Read all data sets and give each row to the one step that may train on its prompt.

    The step is drawn from the prompt's own text (see `split`). Rows of `sft_data` go to SFT, but
    one whose prompt also occurs in `data` follows the prompt, and one that is held out is so.

    Args:
        data, sft_data: data sets as FILE_OR_NAME[:weight][::role=column,...].
        seed: the run's seed; the same seed, the same split.
        steps: those that run. Without shares in the configuration they take all the rows.
    Raises:
        ConfigError: a data set's name, a column map or the split cannot be understood.
        DataError: a file cannot be read, or a row (the first bad one, unless config says drop).
    """
    split = Split(config.split or shares_among(steps), config.heldout)
    ledger = Ledger()
    read = read_all(config, data, sft_data, ledger, seed=seed)
    return assign(read, split, ledger, seed=seed, steps=steps)


def load_text(
    specs: Sequence[str], config: DataConfig, *, seed: int, ledger: Ledger | None = None
) -> TextData:
    """Read text or SFT rows for mixture training; the held-out share is drawn as in `load_data`.

    All that is not held out trains: these rows have no other step. With `ledger` the rows are
    accounted for there, under step `ptx`.

    Raises:
        ConfigError, DataError: as `load_data`.
    """
    split = Split(DEFAULT_SHARES, config.heldout)
    ledger = ledger if ledger is not None else Ledger()
    text = TextData([], [], ledger)
    for row in read_all(config, specs, (), ledger, seed=seed):
        account = ledger.datasets[row.spec.name]
        if row.sample.text is None and row.sample.chosen is None:
            account.leave("no text and no answer: not for mixture training")
        elif split.place_of(row.key) == "heldout":
            text.heldout.append(row.sample)
            account.use("heldout")
        elif times := copies(row.spec.weight, row.content, seed):
            text.train.extend([row.sample] * times)
            account.use("ptx", times)
        else:
            account.leave(f"left out by the weight {row.spec.weight:g}")
    return text


def read_all(
    config: DataConfig, data: Sequence[str], sft_data: Sequence[str], ledger: Ledger, *, seed: int
) -> list[ReadRow]:
    """Every usable row of all data sets, in order; the others are in the ledger or raised.

    Raises:
        ConfigError, DataError: as `load_data`.
    """
    if not data and not sft_data:
        raise ConfigError(
            "data must name at least one data set; got none. Give --data FILE, or --data embedded."
        )
    columns = parse_columns(config.columns, "dataset.columns")
    specs = [parse_spec(text) for text in (*data, *sft_data)]
    seen: set[bytes] = set()
    found: set[str] = set()
    rows = []
    for number, spec in enumerate(specs):
        spec = replace(spec, name=_free_name(spec.name, ledger))
        account = ledger.open(spec.name, spec.path, spec.weight)
        digest = hashlib.sha256()
        for shaped in _samples(spec, config, columns, account, found):
            account.shapes[shaped.shape] += 1
            if shaped.note:
                account.notes[shaped.note] += 1
            sample = _with_system(shaped.sample, config.system_prompt)
            content = content_key(sample)
            digest.update(content)
            digest.update(repr(sample.columns).encode(errors="surrogatepass"))
            if sample.label is not None or sample.ranking:
                digest.update(repr((sample.label, sample.ranking)).encode(errors="surrogatepass"))
            account.duplicates += content in seen
            seen.add(content)
            key = split_key(sample, seed)
            rows.append(ReadRow(sample, key, content, spec, sft_only=number >= len(data)))
        account.fingerprint = digest.hexdigest()
    if missing := sorted(set(columns.values()) - found):
        raise DataError(
            f"dataset.columns must name columns that some data set has; got {', '.join(missing)}, "
            "in none that has no column map of its own. Correct the names."
        )
    return rows


def assign(
    rows: Sequence[ReadRow], split: Split, ledger: Ledger, *, seed: int, steps: Sequence[str]
) -> Dataset:
    """Give each row to its step, or count why it has none. `steps`: those that run."""
    running = set(map(share_of, steps))
    labelled = any(stage.labelled for stage in in_order(steps))
    dataset = Dataset(ledger=ledger)
    shared = {row.key for row in rows if not row.sft_only}
    for row in rows:
        account = ledger.datasets[row.spec.name]
        place = split.place_of(row.key)
        if row.sft_only and place != "heldout":
            if row.key in shared and place != "texts":
                account.leave(f"prompt belongs to step {_NUMBERS[place]}")
                continue
            place = "texts"
        if reason := _unfit(row.sample, place, labelled=labelled):
            account.leave(reason)
            continue
        times = 1 if place == "heldout" else copies(row.spec.weight, row.content, seed)
        if times == 0:
            account.leave(f"left out by the weight {row.spec.weight:g}")
            continue
        dataset.add(place, row.sample, times, runs=place in running)
    return dataset


def _samples(
    spec: DataSpec,
    config: DataConfig,
    columns: Mapping[str, str],
    account: DatasetLedger,
    found: set[str],
) -> Iterator[Shaped]:
    """The data set's usable rows; adds to `found` the columns of the general map that it has.

    A data set's own map is for it alone. The general one is for the rows of the others that have
    any of its columns: a run may blend files of other shapes with files that need no map.
    """
    for item in read_rows(spec, on_blank=account.blank):
        account.rows += 1
        if isinstance(item, BadRow):
            _refuse(item, config, account)
            continue
        own = set() if spec.columns else {c for c in columns.values() if c in item.columns}
        found |= own
        try:
            yield to_sample(item.columns, item.source, columns if own else spec.columns)
        except RowProblem as problem:
            _refuse(problem.at(item.source), config, account)


def _refuse(row: BadRow, config: DataConfig, account: DatasetLedger) -> None:
    if config.on_bad_row == "error":
        raise row.error()
    account.bad(row)
    if account.rows == _HOPELESS == account.num_dropped:
        raise DataError(
            f"data set {visible(account.path)} must hold rows that can be used; got {_HOPELESS:,} "
            f"of which none can. {visible(str(row.source))}: {row.reason}; found {row.found}. "
            f"{row.advice or 'Give the file that holds the data.'}"
        )


def _free_name(name: str, ledger: Ledger) -> str:
    """`name`, or with -2, -3, ... where data sets share one."""
    free, number = name, 2
    while free in ledger.datasets:
        free, number = f"{name}-{number}", number + 1
    return free


def _with_system(sample: Sample, system_prompt: str) -> Sample:
    if not system_prompt or not sample.prompt or any(t.role == "system" for t in sample.prompt):
        return sample
    return replace(sample, prompt=(Message("system", system_prompt), *sample.prompt))


def _unfit(sample: Sample, place: Place, *, labelled: bool) -> str:
    """Why `sample` cannot be used in `place`; "" if it can. `labelled`: a stage that runs trains on
    single answers that are called good or bad."""
    if labelled and place == "pairs" and sample.label is not None:
        return ""
    if place == "heldout":
        return ""
    number = f"not for step {_NUMBERS[place]}"
    if sample.text is not None:
        return "" if place == "texts" else f"plain text: {number}"
    if place in ("texts", "pairs") and sample.chosen is None:
        return f"no answer to learn: {number}"
    if place == "pairs" and sample.rejected is None:
        return f"no rejected answer: {number}"
    return ""
