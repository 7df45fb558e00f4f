"""Data sets in, samples per stage out: reading, splitting, weighting; every row accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

from tandem.config.dataset import DataConfig
from tandem.config.stages import DEFAULT, in_order, leaving
from tandem.data.assign import (
    Dataset,
    ReadRow,
    assign,
    graded_below,
    note_imitated,
    skipped_by_weight,
)
from tandem.data.grades import Mode, below, lowest_imitated
from tandem.data.ledger import DatasetLedger, Ledger
from tandem.data.reading.sources import (
    DataSpec,
    declared_but_mixed,
    files_left,
    parse_columns,
    parse_spec,
    read_rows,
)
from tandem.data.rows import BadRow, RowProblem
from tandem.data.sampled import Read
from tandem.data.shapes.answer_lists import has_column
from tandem.data.shapes.shaping import Shaped, to_sample
from tandem.data.split import (
    DEFAULT_SHARES,
    Split,
    content_key,
    copies,
    shares_among,
    split_key,
)
from tandem.data.tools import without_nulls
from tandem.data.turns import inline_turns
from tandem.errors import ConfigError, DataError
from tandem.text import visible
from tandem.types import Message, Sample

_HOPELESS = 100_000
"""Rows of a data set after which reading stops if none can be used: 2 seconds."""


DependsOn = Literal["all", "unlabelled", ""]
"""Which rows' grades a run depends on."""
_INLINE = {
    False: "prompts of the form Human: ... Assistant:, each one turn of the user's "
    "(--dataset.inline-speakers reads the turns)",
    True: "prompts of the form Human: ... Assistant:, read as the turns that they show",
}
_TURNED = "the answers of an earlier pair the other way round"
_RELABELLED = "the answer of an earlier row, labelled the other way"


@dataclass(frozen=True)
class TextData:
    """Samples for mixture (ptx) training, and held-out ones to measure forgetting."""

    train: list[Sample]
    heldout: list[Sample]
    ledger: Ledger


def load_data(
    config: DataConfig,
    data: Sequence[str],
    sft_data: Sequence[str] = (),
    eval_data: Sequence[str] = (),
    *,
    seed: int,
    stages: Sequence[str] = DEFAULT,
    grades: Mode = "auto",
    read: Read = read_rows,
) -> Dataset:
    """Read all data sets and give each row to the one stage that may train on its prompt.

    The stage follows from the prompt's own text (see `split`). Rows of `sft_data` go to SFT, except
    those that are held out or whose prompt also occurs in `data`. Rows of `eval_data` are held out,
    in place of a share of the others, and so is a row that begins like one of them.

    Args:
        data, sft_data: data sets as FILE_OR_NAME[:weight][::role=column,...]; eval_data: the same
            without a weight.
        seed: the run's seed; the same seed, the same split.
        stages: those that run. Without configured shares they get all the rows.
        grades: how the reward model's stage learns graded answers.
        read: yields a data set's rows, all of them or a sample.
    Raises:
        ConfigError: a data set's name, a column map or the split is wrong.
        DataError: a file cannot be read, or a row is bad (unless on_bad_row is drop).
    """
    split = Split(config.split or shares_among(stages), 0.0 if eval_data else config.heldout)
    ledger = Ledger()
    scores = bool(leaving(stages, "reward model"))
    lowest = config.lowest_imitated(scores=scores)
    compares = any(stage.share == "pairs" for stage in in_order(stages))
    depends: DependsOn = "unlabelled" if compares or lowest != -inf else ""
    depends = "all" if scores else depends
    found = read_all(
        config, data, sft_data, ledger, eval_data=eval_data, seed=seed, grades=depends, read=read
    )
    return assign(found, split, ledger, seed=seed, stages=stages, grades=grades, lowest=lowest)


def load_text(
    specs: Sequence[str],
    config: DataConfig,
    *,
    seed: int,
    scores: bool = False,
    ledger: Ledger | None = None,
    read: Read = read_rows,
) -> TextData:
    """Read text or SFT rows for mixture training; rows are held out as in `load_data`.

    All others are trained on: these rows have no other stage. `ledger` counts them under `ptx`.

    Args:
        scores: whether the run trains a reward model.

    Raises:
        ConfigError, DataError: as `load_data`.
    """
    split = Split(DEFAULT_SHARES, config.heldout)
    ledger = ledger if ledger is not None else Ledger()
    text = TextData([], [], ledger)
    asked = config.lowest_imitated(scores=scores)
    depends: DependsOn = "" if asked == -inf else "unlabelled"
    rows = read_all(config, specs, (), ledger, seed=seed, grades=depends, read=read)
    lowest = lowest_imitated((row.sample for row in rows), asked)
    for row in rows:
        account = ledger.datasets[row.spec.name]
        if row.sample.label is False:
            account.leave(f"answer labelled bad (column {row.label_column}): not imitated")
        elif bound := below(row.sample, lowest):
            account.leave(f"{graded_below(row, bound)}: not imitated")
        elif row.sample.text is None and row.sample.chosen is None:
            account.leave("no text and no answer: not for mixture training")
        elif split.place_of(row.key) == "heldout":
            text.heldout.append(row.sample)
            account.use("heldout")
        elif times := copies(row.spec.weight, row.content, seed):
            text.train.extend([row.sample] * times)
            account.use("ptx", times)
            note_imitated(row, lowest, account)
        else:
            account.leave(skipped_by_weight(row))
    return text


def read_all(
    config: DataConfig,
    data: Sequence[str],
    sft_data: Sequence[str],
    ledger: Ledger,
    *,
    eval_data: Sequence[str] = (),
    seed: int,
    grades: DependsOn = "",
    read: Read = read_rows,
) -> list[ReadRow]:
    """Every usable row of all data sets, in order; others are in the ledger, or raise.

    Args:
        data, sft_data, eval_data: one of these at least.
        grades: which of them are part of the fingerprint. Those of eval_data are all: stages that
            run one by one build on the same held-out rows, whichever of them depend on grades.
    Raises:
        ConfigError, DataError: as `load_data`.
    """
    if not data and not sft_data and not eval_data:
        raise ConfigError(
            "data must name at least one data set; got none. Give --data FILE, or --data embedded."
        )
    columns = parse_columns(config.columns, "dataset.columns")
    specs = [parse_spec(text) for text in (*data, *sft_data, *eval_data)]
    first_eval = len(data) + len(sft_data)
    if weighted := [spec for spec in specs[first_eval:] if spec.weight != 1]:
        raise ConfigError(
            "eval_data must be without weights, as each of its rows counts once; got "
            f"{weighted[0].weight:g} for {visible(weighted[0].path)}. Remove the weight."
        )
    before = _Before()
    found: set[str] = set()
    rows = []
    for number, spec in enumerate(specs):
        spec = replace(spec, name=_free_name(spec.name, ledger))
        account = ledger.open(spec.name, spec.path, spec.weight)
        _note_files(spec, account)
        digest = hashlib.sha256()
        graded_in = ""
        for shaped in _samples(spec, config, columns, account, found, read):
            account.shapes[shaped.shape] += 1
            for note in shaped.notes:
                account.note(note, shaped.sample.source)
            account.unread.update(shaped.unread)
            account.lists.update(shaped.lists)
            account.numbers.update(shaped.numbers)
            sample = _with_speakers(shaped.sample, config, account)
            sample = _with_system(sample, config.system_prompt)
            if sample.grade is not None:
                graded_in = graded_in or shaped.grade_column
                sample = _of_one_column(sample, shaped.grade_column, graded_in, account)
            content, key = content_key(sample), split_key(sample, seed)
            _enter(sample, content, "all" if number >= first_eval else grades, digest)
            before.count(sample, content, key, account)
            rows.append(
                ReadRow(
                    sample, key, content, spec,
                    sft_only=len(data) <= number < first_eval,
                    eval_only=number >= first_eval,
                    label_column=shaped.label_column,
                    grade_column=shaped.grade_column,
                )
            )  # fmt: skip
        account.fingerprint = digest.hexdigest()
    missing = sorted(set(columns.values()) - found)
    # The map is of the data that is trained on: other rows to evaluate on may need none.
    if missing and (data or sft_data):
        raise DataError(
            f"dataset.columns must name columns of the data sets; got {', '.join(missing)}, which "
            "no data set without its own column map has. Correct the names."
        )
    return rows


def _note_files(spec: DataSpec, account: DatasetLedger) -> None:
    """Note which files of a folder are left, and what others are of."""
    of_splits, made = files_left(spec)
    for what, left in (("other splits than train", of_splits), ("runs and models", made)):
        if left:
            shown = ", ".join(map(visible, left[:3])) + ", ..." * (len(left) > 3)
            account.notes[f"files of {what}, not read ({shown})"] = len(left)
    if mixed := declared_but_mixed(spec):
        example = f"{spec.path}@{mixed[0]}"
        note = f"configurations of one folder, all read (one alone: {visible(example)})"
        account.notes[note] = len(mixed)


def _samples(
    spec: DataSpec,
    config: DataConfig,
    columns: Mapping[str, str],
    account: DatasetLedger,
    found: set[str],
    read: Read,
) -> Iterator[Shaped]:
    """The data set's usable rows; adds to `found` the columns of the general map that it has.

    A data set with its own map uses only that. For the others, the general map applies to rows that
    have any of its columns, so that a run can also use files that need no map.
    """
    for item in read(spec, on_blank=account.blank):
        account.rows += 1
        if isinstance(item, BadRow):
            _refuse(item, config, account)
            continue
        general = () if spec.columns else columns.values()
        own = {column for column in general if has_column(item.columns, column)}
        found |= own
        mapped = columns if own else spec.columns
        row = item.columns
        if item.is_of_table:
            row = without_nulls(row, mapped.get("tools", "tools"))
        try:
            yield to_sample(row, item.source, mapped)
        except RowProblem as problem:
            _refuse(problem.at(item.source), config, account)


def _refuse(row: BadRow, config: DataConfig, account: DatasetLedger) -> None:
    if config.on_bad_row == "error":
        raise row.error()
    account.bad(row)
    if account.rows == _HOPELESS == account.num_dropped:
        raise DataError(
            f"data set {visible(account.path)} must have usable rows; got none in the first "
            f"{_HOPELESS:,}. {visible(str(row.source))}: {row.reason}; found {row.found}. "
            f"{row.advice or 'Give the file that holds the data.'}"
        )


def _of_one_column(sample: Sample, column: str, first: str, account: DatasetLedger) -> Sample:
    """The sample, without its grade if the data set's first grade is in another column."""
    if column == first:
        return sample
    note = f"graded in column {column}, and rows before in {first}: not read as a grade"
    account.note(note, sample.source)
    return replace(sample, grade=None)


@dataclass
class _Before:
    """The rows that were read before, by their contents and openings."""

    contents: set[bytes] = field(default_factory=set)
    openings: set[bytes] = field(default_factory=set)

    def count(self, sample: Sample, content: bytes, key: bytes, account: DatasetLedger) -> None:
        """Count a row that says what an earlier one does, or the contrary; and remember it."""
        if content in self.contents:
            account.duplicate(sample.source)
        # Few rows begin as an earlier one does; the others need no second key.
        if key in self.openings and (sample.is_pair or sample.label is not None):
            turned = replace(sample, chosen=sample.rejected, rejected=sample.chosen)
            if content_key(turned) in self.contents:
                account.note(_TURNED if sample.is_pair else _RELABELLED, sample.source)
        self.contents.add(content)
        self.openings.add(key)


def _enter(sample: Sample, content: bytes, grades: DependsOn, digest: Any) -> None:
    """Add what the run depends on in a sample to the data set's digest."""
    digest.update(content)
    digest.update(repr(sample.columns).encode(errors="surrogatepass"))
    if sample.label is not None or sample.ranking:
        digest.update(repr((sample.label, sample.ranking)).encode(errors="surrogatepass"))
    if sample.grade is not None and (grades == "all" or (grades and sample.label is None)):
        digest.update(repr(sample.grade).encode())
    if unlearned := [i for i, turn in enumerate(sample.prompt) if not turn.learned]:
        digest.update(repr(unlearned).encode())


def _free_name(name: str, ledger: Ledger) -> str:
    """`name`, or with -2, -3, ... if it is taken."""
    free, number = name, 2
    while free in ledger.datasets:
        free, number = f"{name}-{number}", number + 1
    return free


def _with_speakers(sample: Sample, config: DataConfig, account: DatasetLedger) -> Sample:
    """The sample; the turns that its prompt shows inline are read as such if the run asks for it,
    else noted."""
    *before, asked = sample.prompt or (Message("user", ""),)
    turns = inline_turns(asked.content) if asked.role == "user" else ()
    if not turns or any(turn.role != "system" for turn in before):
        return sample
    account.note(_INLINE[config.inline_speakers], sample.source)
    return replace(sample, prompt=(*before, *turns)) if config.inline_speakers else sample


def _with_system(sample: Sample, system_prompt: str) -> Sample:
    if not system_prompt or not sample.prompt or any(t.role == "system" for t in sample.prompt):
        return sample
    return replace(sample, prompt=(Message("system", system_prompt), *sample.prompt))
