"""How what a stage is made from differs from what is recorded of it, as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.data.ledger import DatasetLedger, Ledger
from tandem.errors import DataError
from tandem.text import counted, visible

ROWS = "the rows of "
KnownRows = Mapping[str, DatasetLedger]
"""Accounts of data sets by their fingerprints, of the run before and of now."""
_SHOWN = 60
"""Characters of a value, beyond which only the part that differs is shown."""
_AROUND = 20


def known_rows(recorded: Path, ledger: Ledger) -> dict[str, DatasetLedger]:
    """The accounts in a run's data.json, if it can be read, and those of a ledger."""
    try:
        before = Ledger.from_json(recorded.read_text("utf-8"))
    except (OSError, ValueError, DataError):
        before = Ledger()
    accounts = (*before.datasets.values(), *ledger.datasets.values())
    return {account.fingerprint: account for account in accounts}


def difference(name: str, before: Any, now: Any, known: KnownRows | None = None) -> str:
    """How a fact differs from the one recorded: both values of a knob, the names of files, or how
    many rows there were and are."""
    if name.startswith(ROWS):
        return f"{name}: {_of_rows(before or (), now or (), known or {})}"
    if not isinstance(before, dict) and not isinstance(now, dict):
        return f"{name} {' -> '.join(_both(json.dumps(before), json.dumps(now)))}"
    if name.endswith(" stage") and not now:
        return f"{name} (its folder is gone)"
    before, now = before or {}, now or {}
    files = [file for file in sorted({*before, *now}) if before.get(file) != now.get(file)]
    more = f" and {len(files) - 3} more" if files[3:] else ""
    return f"{name} ({', '.join(files[:3])}{more})"


def _of_rows(before: Sequence[str], now: Sequence[str], known: KnownRows) -> str:
    """What has become of data sets, which are compared by fingerprint and position."""
    if len(before) != len(now):
        return f"{counted(len(before), 'data set')} before, {counted(len(now), 'data set')} now"
    told = []
    for old, new in zip(before, now, strict=True):
        if old == new:
            continue
        was, is_now = known.get(old), known.get(new)
        name = visible(Path(is_now.path).name) if is_now else "a data set"
        if was is None or is_now is None:
            told.append(f"{name} has changed")
        elif was.path != is_now.path:
            old_name = visible(Path(was.path).name)
            told.append(
                f"{old_name} ({counted(was.rows, 'row')}) before, "
                f"{name} ({counted(is_now.rows, 'row')}) now"
            )
        elif was.rows == is_now.rows:
            rows = counted(is_now.rows, "row")
            told.append(
                f"{name} has changed ({rows} as before, of other contents or read otherwise)"
            )
        else:
            count = counted(was.rows, "row")
            told.append(f"{name} has changed ({count} before, {is_now.rows:,} now)")
    return "; ".join(told)


def _both(before: str, now: str) -> tuple[str, str]:
    """Two values, whole if they are short, else where they differ."""
    if max(len(before), len(now)) <= _SHOWN:
        return before, now
    start = _num_alike(before, now)
    same = _num_alike(before[start:][::-1], now[start:][::-1])
    return _around(before, start, same), _around(now, start, same)


def _num_alike(one: str, other: str) -> int:
    """At how many characters from their beginning two texts are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _around(text: str, start: int, same: int) -> str:
    """The part between the first `start` and the last `same` characters, with some beside it."""
    first = max(0, start - _AROUND)
    end = len(text) - same
    last = min(len(text), max(min(end, start + _SHOWN), start) + _AROUND)
    return "..." * (first > 0) + text[first:last] + "..." * (last < len(text))
