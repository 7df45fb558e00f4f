"""Each usable row to the one stage that may train on its prompt, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from tandem.config.stages import in_order, leaving
from tandem.data.grades import (
    Mode,
    Ranked,
    answer_of,
    as_answer,
    below,
    chosen_mode,
    lowest_imitated,
    rank,
    with_grade,
)
from tandem.data.ledger import DatasetLedger, Ledger
from tandem.data.reading.sources import DataSpec
from tandem.data.split import SHARES, Place, Split, copies, first_of, share_of
from tandem.types import Sample

NO_REJECTED = "no rejected answer"
"""Why a row with one answer is no pair, as the ledger says it."""
_NUMBERS = {share: number for number, share in enumerate(SHARES, start=1)}


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A usable row before it has a place: its sample, its keys, and its data set.

    key: `split.split_key`; content: `split.content_key`. sft_only: it is from `sft_data`;
    eval_only: from `eval_data`. label_column, grade_column: the column that calls its answer good
    or bad, and that of its grade, or "".
    """

    sample: Sample
    key: bytes
    content: bytes
    spec: DataSpec
    sft_only: bool = False
    eval_only: bool = False
    label_column: str = ""
    grade_column: str = ""


@dataclass(frozen=True)
class Dataset:
    """The samples of each share, in reading order, repeated according to their data sets' weights.

    texts: samples with an answer or text. pairs: with a preferred and a rejected answer; with one
    answer and its grade, if the reward model learns grades by regression (`grades`). prompts: any.
    A share that no stage of the run trains on has its samples here too, but the ledger counts
    them as unused. heldout: samples of every kind, once each, that no stage trains on. No opening
    of a dialog is in two of these. ledger: what became of every row.
    """

    texts: list[Sample] = field(default_factory=list)
    pairs: list[Sample] = field(default_factory=list)
    prompts: list[Sample] = field(default_factory=list)
    heldout: list[Sample] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    grades: Literal["pairs", "regression"] = "pairs"

    def add(self, place: Place, sample: Sample, times: int, *, runs: bool) -> None:
        """Put `sample` into `place`, `times` per epoch; `runs`: whether a stage uses it there."""
        getattr(self, place).extend([sample] * times)
        for source in sample.sources:
            account = self.ledger.datasets[source.dataset]
            if runs or place == "heldout":
                account.use(place, times)
            else:
                stage = f"stage {_NUMBERS[place]} ({first_of(place)})"
                account.leave(f"kept for {stage}, which does not run")


def assign(
    rows: Sequence[ReadRow],
    split: Split,
    ledger: Ledger,
    *,
    seed: int,
    stages: Sequence[str],
    grades: Mode = "auto",
    lowest: float | None = None,
) -> Dataset:
    """Give each row to its stage, or count why it has none.

    Args:
        stages: those that run. grades: how the reward model's stage learns graded answers.
        lowest: the lowest grade that is imitated; None: the mean of each data set.
    """
    running = set(map(share_of, stages))
    labelled = any(stage.labelled for stage in in_order(stages))
    scores = bool(leaving(stages, "reward model"))
    bounds = lowest_imitated((row.sample for row in rows), lowest)
    placed: list[tuple[ReadRow, Place]] = []
    for row, place in _places(rows, split, ledger):
        if place in ("pairs", "heldout"):
            bad = place == "heldout" and below(row.sample, bounds)
            sample = with_grade(row.sample, labels_are_grades=scores and not labelled)
            if bad:  # as one that is labelled so: nothing measures how likely it is
                sample = replace(sample, chosen=None, rejected=answer_of(sample))
            elif place == "pairs" and sample.grade is not None:
                sample = as_answer(sample)
            row = replace(row, sample=sample)
        placed.append((row, place))
    made = rank({n: row.sample for n, (row, place) in enumerate(placed) if place == "pairs"})
    mode = _mode_of(grades, made, placed) if scores else "pairs"
    dataset = Dataset(ledger=ledger, grades=mode)
    for number, (row, place) in enumerate(placed):
        account, sample, key = ledger.datasets[row.spec.name], row.sample, row.content
        if place == "pairs" and sample.grade is not None:
            if mode == "pairs":
                if reason := made.left.get(number):
                    account.leave(f"{reason}, in the share of pairs")
                if number not in made.rankings:
                    continue  # counted with its ranking, or left
                sample, key = made.rankings[number], row.key
        elif reason := _unfit(row, place, bounds, labelled=labelled):
            account.leave(reason)
            continue
        times = 1 if place == "heldout" else copies(row.spec.weight, key, seed)
        if times == 0:
            for _ in sample.sources:
                account.leave(skipped_by_weight(row))
            continue
        dataset.add(place, sample, times, runs=place in running)
        if place == "texts" and place in running:
            note_imitated(row, bounds, account)
    if mode == "pairs":
        _note_ranked(made, ledger)
    return dataset


def _places(
    rows: Sequence[ReadRow], split: Split, ledger: Ledger
) -> Iterator[tuple[ReadRow, Place]]:
    """The place of each row that has one by its prompt; others are counted."""
    shared = {row.key for row in rows if not row.sft_only and not row.eval_only}
    evaluated = {row.key for row in rows if row.eval_only}
    for row in rows:
        account = ledger.datasets[row.spec.name]
        if row.key in evaluated and not row.eval_only:
            account.leave("begins like a row of eval_data")
            continue
        place = "heldout" if row.eval_only else split.place_of(row.key)
        if row.sft_only and place != "heldout":
            if row.key in shared and place != "texts":
                account.leave(f"prompt belongs to the share of {place}")
                continue
            place = "texts"
        yield row, place


def _mode_of(
    grades: Mode, made: Ranked, placed: Sequence[tuple[ReadRow, Place]]
) -> Literal["pairs", "regression"]:
    """How the reward model learns the graded answers in the share of pairs."""
    samples = [row.sample for row, place in placed if place == "pairs"]
    graded = sum(sample.grade is not None for sample in samples)
    others = sum(sample.is_pair for sample in samples)
    return chosen_mode(grades, made, graded, others)


def _note_ranked(made: Ranked, ledger: Ledger) -> None:
    """Note what was made of graded answers."""
    compared = "pairs of graded answers to one prompt"
    again = "graded answers that an earlier row has too, ranked by their mean grade"
    for name, count in made.pairs.items():
        notes = ledger.datasets[name].notes
        notes[compared] = count
        if ties := made.ties[name]:
            notes[f"{compared} not compared, of equal grade"] = ties
        if repeats := made.again[name]:
            notes[again] = repeats


def skipped_by_weight(row: ReadRow) -> str:
    """Why a row that its data set's weight leaves out is unused."""
    return f"skipped by the weight {row.spec.weight:g}"


def graded_below(row: ReadRow, bound: str) -> str:
    """Why a graded answer is not imitated, which needs a grade of `bound`."""
    return f"answer graded below {bound} (column {row.grade_column})"


def note_imitated(
    row: ReadRow, bounds: Mapping[str, tuple[float, bool]], account: DatasetLedger
) -> None:
    """Note a graded answer that is imitated although nobody asked how it was graded."""
    bound, _ = bounds.get(row.spec.name, (-inf, False))
    if row.sample.grade is not None and row.sample.label is None and bound == -inf:
        note = f"imitated whatever its grade (column {row.grade_column})"
        account.note(note, row.sample.source)


def _unfit(
    row: ReadRow, place: Place, bounds: Mapping[str, tuple[float, bool]], *, labelled: bool
) -> str:
    """Why a row cannot be used in `place`; "" if it can. `labelled`: a stage that runs trains on
    single answers that are called good or bad."""
    sample = row.sample
    if labelled and place == "pairs" and sample.label is not None:
        return ""
    if place == "heldout":
        return ""
    share = f"in the share of {place}"
    if sample.text is not None:
        return "" if place == "texts" else f"plain text, {share}"
    if place in ("texts", "pairs") and sample.label is False:
        return f"answer labelled bad (column {row.label_column}), {share}"
    if place == "texts" and (bound := below(sample, bounds)):
        return f"{graded_below(row, bound)}, {share}"
    if place in ("texts", "pairs") and sample.chosen is None:
        return f"no answer to learn, {share}"
    if place == "pairs" and sample.rejected is None:
        return f"{NO_REJECTED}, {share}"
    return ""
