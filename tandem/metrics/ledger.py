"""The report's data ledger and alarms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.metrics.folder import RunFolder, list_or_empty, mapping_or_empty, number_or_none
from tandem.metrics.text import short_number, trimmed


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One data set's account: what became of every row.

    used: (count, step). left: (count, reason, places) of rows that no step uses. notes: (count,
    what) of rows that are in those numbers, or that are no rows (blank lines).
    """

    name: str
    path: str
    read: str
    used: tuple[tuple[str, str], ...]
    left: tuple[tuple[str, str, str], ...]
    notes: tuple[tuple[str, str], ...]


def dataset_rows(folder: RunFolder) -> list[DatasetRow]:
    """The data ledger, a row per data set."""
    entries = list_or_empty(folder.data.get("datasets"))
    return [_dataset_row(entry) for entry in map(mapping_or_empty, entries) if entry]


def _dataset_row(entry: Mapping[str, Any]) -> DatasetRow:
    left = []
    for reason, dropped in mapping_or_empty(entry.get("dropped")).items():
        detail = mapping_or_empty(dropped)
        places = [str(p) for p in list_or_empty(detail.get("first", detail.get("lines")))]
        more = ", …" if len(places) > _PLACES else ""
        where = ", ".join(places[:_PLACES]) + more
        left.append((_count(detail.get("count", dropped)), f"dropped: {reason}", where))
    left += [(count, f"unused: {reason}", "") for count, reason in _counts(entry.get("unused"))]
    notes = [
        (_count(entry[key]), title)
        for key, title in _NOTES.items()
        if number_or_none(entry.get(key))
    ]
    copies = _counts(entry.get("extra_copies"))
    notes += [(count, f"extra copies by weight in {step}") for count, step in copies]
    notes += _counts(entry.get("notes"))
    return DatasetRow(
        name=str(entry.get("name", "")),
        path=str(entry.get("path", "")),
        read=_count(entry.get("rows", entry.get("read"))),
        used=tuple(_counts(entry.get("used"))),
        left=tuple(left),
        notes=tuple(notes),
    )


_NOTES = {
    "duplicates": "duplicates",
    "blank_lines": "blank lines",
    "blank": "blank lines",
}
_PLACES = 10
"""Places shown per reason for dropping."""


def _counts(counts: Any) -> list[tuple[str, str]]:
    """(count, name) of a mapping's entries that are not zero."""
    named = mapping_or_empty(counts).items()
    return [(_count(value), str(name)) for name, value in named if number_or_none(value)]


def _count(value: Any) -> str:
    number = number_or_none(value)
    return "" if number is None else f"{number:,.0f}"


def alarm_rows(folder: RunFolder) -> list[dict[str, str]]:
    """Alarms in the order raised, as text."""
    return [
        {
            "name": str(line.get("alarm", "")),
            "at": f"{line.get('stage', '')} step {line.get('step', '')}".strip(),
            "value": _number_text(line.get("value")),
            "threshold": _number_text(line.get("threshold")),
            "advice": str(line.get("advice", "")),
        }
        for line in folder.alarms
    ]


def _number_text(value: Any) -> str:
    number = number_or_none(value)
    return "" if number is None else trimmed(short_number(number))
