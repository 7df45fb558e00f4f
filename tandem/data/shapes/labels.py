"""What a row says about its answers: KTO's `label` (or LLaMA-Factory's `kto_tag`), a `margin`."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

from tandem.data.excerpt import describe
from tandem.data.grades import MOST, number_of
from tandem.data.rows import Row, RowProblem
from tandem.types import Sample

_LABELS = {
    **dict.fromkeys(("true", "1", "1.0"), True),
    **dict.fromkeys(("false", "0", "0.0", "-1", "-1.0"), False),
}
"""What a label says: a bool, 1, 0 or -1, or the same as text."""


def is_verdict(value: Any) -> bool:
    """Whether a column's value can be read as good or bad."""
    return _word(value) in _LABELS


def verdict(value: Any) -> bool:
    """What a label says: whether the answer is good.

    Raises:
        RowProblem: neither true nor false, in no spelling.
    """
    label = _LABELS.get(_word(value))
    if label is None:
        raise RowProblem("label", describe(value), "be true or false, or 1 or 0 (or -1)")
    return label


def is_labelled(row: Row) -> bool:
    """Whether a row's label was read by `verdict`, or is a bool."""
    return isinstance(row.get("label"), bool)


def labelled(sample: Sample, row: Row) -> Sample:
    """An answer labelled as bad (KTO's `label` false) becomes a rejected one."""
    if not is_labelled(row):
        return sample
    if row["label"]:
        return replace(sample, label=True)
    return replace(sample, chosen=None, rejected=sample.chosen, label=False)


def margin_of(row: Row) -> float:
    """How much better the chosen answer is, where the row has a column `margin`; else 0.

    Raises:
        RowProblem: it is no finite number, or one whose loss would not be finite.
    """
    margin = row.get("margin")
    if margin is None or margin == "":
        return 0.0
    value = None if isinstance(margin, bool) else number_of(margin)
    if isinstance(margin, Decimal):
        value = number_of(float(margin))
    if value is None:
        is_large = isinstance(margin, int | float) and abs(margin) > MOST
        rule = f"be at most {MOST:g} in size" if is_large else "be a finite number"
        raise RowProblem("margin", describe(margin), rule)
    return value


def _word(value: Any) -> str:
    return str(value).strip().lower()
