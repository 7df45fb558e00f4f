"""The report's tables of evaluations on other data than the run's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.metrics.folder import RunFolder, list_or_empty, mapping_or_empty, number_or_none
from tandem.metrics.sections import Row, figures
from tandem.text import counted


def other_data_tables(folder: RunFolder) -> list[Row]:
    """The numbers of each such evaluation, a column per model, and on which rows they are."""
    tables = [
        {**figures(evaluation), "title": _title(evaluation), "note": _note(evaluation)}
        for evaluation in folder.evaluations
    ]
    return [table for table in tables if table["rows"]]


def _title(evaluation: Mapping[str, Any]) -> str:
    accounts = _accounts(evaluation)
    rows = counted(int(_sum(accounts, "rows")), "row")
    return f"On {rows} of {', '.join(str(account.get('path', '')) for account in accounts)}"


def _note(evaluation: Mapping[str, Any]) -> str:
    """How many rows gave which numbers, and which did not."""
    accounts = _accounts(evaluation)
    told = [
        f"{number_or_none(count) or 0:,.0f} {use}"
        for use, count in mapping_or_empty(evaluation.get("evaluated")).items()
    ]
    dropped = sum(_sum([mapping_or_empty(a.get("dropped"))], *mapping_or_empty(a.get("dropped")))
                  for a in accounts)  # fmt: skip
    further = {
        "could not be read": dropped,
        "gave no number": number_or_none(evaluation.get("without_number")) or 0,
    }
    for account in accounts:
        for note, count in mapping_or_empty(account.get("noted")).items():
            further[str(note)] = further.get(str(note), 0) + (number_or_none(count) or 0)
    told += [f"rows ({what}): {count:,.0f}" for what, count in further.items() if count]
    unknown = evaluation.get("trained_on_unknown")
    if unknown:
        told.append(f"not all rows that the run trained on are known: {unknown}")
    return f"Evaluated: {'; '.join(told)}."


def _accounts(evaluation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(map(mapping_or_empty, list_or_empty(evaluation.get("data"))))


def _sum(accounts: list[Mapping[str, Any]], *names: str) -> float:
    return sum(number_or_none(account.get(n)) or 0.0 for account in accounts for n in names)
