"""One reader per file format: a file in, its rows out, in order.

A row that cannot be read becomes a BadRow and the reader continues after it; what makes a whole
file unreadable (cut compression, another encoding, a broken JSON array) is a DataError.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tandem.data.excerpt import describe, excerpt, names
from tandem.data.reading.lines import (
    LONGEST_LINE,
    decode_line,
    most_bytes,
    read_lines,
    require_regular,
    swollen,
)
from tandem.data.rows import BadRow, RawRow
from tandem.errors import DataError
from tandem.text import first_line, named_line, visible
from tandem.types import Source

OnBlank = Callable[[], None]
Rows = Iterator[RawRow | BadRow]

_LARGEST_JSON = 2 * 2**30
"""Bytes of a JSON file with one value, which is held in memory several times over."""
_DEEPEST = 100
"""Levels within a row. Python's own limit depends on its version and on the call stack."""
_NEST = f"nest at most {_DEEPEST} levels deep"
_ARRAY = "A file that is one JSON array is named .json; in .jsonl each row is on a line of its own."
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_INDEX = "Unnamed: 0"
"""The first column of a CSV file that has no name: pandas writes its index so, and reads it as."""
_PARQUET_ROWS = 64
"""Rows unpacked at a time, since dictionary encoding can expand enormously."""


def read_jsonl(path: Path, dataset: str, on_blank: OnBlank) -> Rows:
    """One JSON object per line; the row's number is the line's."""
    for number, offset, raw in read_lines(path):
        source = Source(dataset, str(path), number)
        if not raw.strip():
            on_blank()
            continue
        text = decode_line(raw, offset, source)
        yield text if isinstance(text, BadRow) else _parse_row(text, source)


def read_json(path: Path, dataset: str, on_blank: OnBlank) -> Rows:
    """An array of objects, or an object with one list of them; counted from 1 along the list.

    A file named .json with one object per line, or with a single row, is read as JSONL.
    """
    text = _whole_text(path)
    if not text.strip():
        return
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise DataError(
            f"{visible(str(path))} must nest at most {_DEEPEST} levels deep; got more. Flatten its "
            "rows."
        ) from None
    except ValueError as error:
        if text.lstrip().startswith("{") and str(error).startswith("Extra data"):
            yield from read_jsonl(path, dataset, on_blank)
            return
        raise DataError(
            f"{visible(str(path))} must be whole JSON; got {visible(str(error))}. "
            "Write the file again, or save its rows one per line as .jsonl."
        ) from None
    for number, row in enumerate(_row_list(value, path), 1):
        yield _checked_row(row, Source(dataset, str(path), number))


_LONE_CR = "new-line character seen in unquoted field"
"""Of csv's own message."""


def read_csv(path: Path, dataset: str, on_blank: OnBlank) -> Rows:
    """Comma-separated cells under a line of column names; the row's number is its first line's."""
    return _read_cells(path, dataset, on_blank, ",")


def read_tsv(path: Path, dataset: str, on_blank: OnBlank) -> Rows:
    """As `read_csv`, with tabs. A cell with a tab, a line break or a quote at its beginning is in
    quotes, as Excel, pandas and Python's csv write it."""
    return _read_cells(path, dataset, on_blank, "\t")


def _read_cells(path: Path, dataset: str, on_blank: OnBlank, separator: str) -> Rows:
    csv.field_size_limit(LONGEST_LINE)  # the module's own limit of 131,072 refuses real answers
    bad: list[BadRow] = []
    reader = csv.reader(_csv_lines(path, dataset, bad), delimiter=separator, strict=True)
    try:
        header = next(reader, [])
    except csv.Error as error:
        if _LONE_CR in str(error):
            raise DataError(
                f"{visible(str(path))} must have lines that end in LF or CRLF; got CR alone, as "
                "old Macs wrote them. Save it with other line ends (in Excel as CSV UTF-8)."
            ) from None
        raise DataError(
            f"{visible(str(path))} must begin with column names; got {error}. Close its quotes."
        ) from None
    if bad:
        raise DataError(
            f"{visible(str(bad[0].source))}: column names must {bad[0].expected}; got "
            f"{bad[0].found}. "
            "Save the file as UTF-8 text."
        )
    others = [mark for mark in _SEPARATORS if mark != separator]
    if len(header) == 1 and (mark := next((m for m in others if m in header[0]), "")):
        advice = {",": "Rename it to .csv", "\t": "Rename it to .tsv"}.get(
            mark, f"Save the file with {_SEPARATORS[separator]}"
        )
        raise DataError(
            f"{visible(str(path))}:1: column names must be separated by {_SEPARATORS[separator]}; "
            f"got {excerpt(header[0])}, separated by {_SEPARATORS[mark]}. {advice}, or save its "
            "rows as .jsonl."
        )
    if len(header) > 1 and not header[0].strip() and _INDEX not in header:
        header[0] = _INDEX
    if wide := [name for name in header if name.strip() and name != name.strip()]:
        raise DataError(
            f"{visible(str(path))}:1: column names must not begin or end with white space; got "
            f"{names(wide)}. Remove it, in all rows where it is behind each separator."
        )
    if header:  # an empty file is refused by the caller
        _check_names(header, f"{visible(str(path))}:1")
    while True:
        source = Source(dataset, str(path), reader.line_num + 1)
        bad.clear()
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield BadRow(source, "", str(error), "be CSV with closed quotes")
            continue
        if cells is None:
            return
        if bad:
            yield bad[0]
        elif len(cells) < 2 and not any(cell.strip() for cell in cells):
            on_blank()
        elif len(cells) != len(header):
            expected = f"have {len(header)} cells, one per column name"
            yield BadRow(source, "", f"{len(cells)} cells", expected)
        else:
            yield RawRow(dict(zip(header, cells, strict=True)), source)


def read_parquet(path: Path, dataset: str, on_blank: OnBlank) -> Rows:
    """The rows of a Parquet file, counted from 1. Needs pyarrow."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{visible(str(path))} must be read with pyarrow; got no such package. "
            "Run pip install datasets pyarrow"
        ) from None
    number, unpacked = 0, 0
    try:
        require_regular(path)
        most = most_bytes(path)
        with parquet.ParquetFile(path) as file:
            _check_names(file.schema_arrow.names, visible(str(path)))
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                unpacked += batch.nbytes
                if unpacked > most:
                    raise swollen(path)
                for row in _batch_rows(batch):
                    number += 1
                    source = Source(dataset, str(path), number)
                    yield (
                        unconvertible(row, source)
                        if isinstance(row, Exception)
                        else RawRow(row, source, is_of_table=True)
                    )
    except (arrow.ArrowException, OSError) as error:
        found = visible(first_line(error))[:200].rstrip(".")
        raise DataError(
            f"{visible(str(path))} must be a whole Parquet file; got {found}. Write it again."
        ) from None


def unconvertible(error: Exception, source: Source) -> BadRow:
    """A row with values that Python cannot hold: text that is not UTF-8, a date in year 30000."""
    found = visible(named_line(error))[:200]
    return BadRow(source, "", found, "have values that Python can hold")


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | Exception]:
    """The rows of an Arrow batch; an error in place of one that cannot be converted."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError, KeyError, TypeError):
        pass  # find the rows
    else:
        yield from rows
        return
    for i in range(batch.num_rows):
        try:
            yield batch.slice(i, 1).to_pylist()[0]
        except (ValueError, OverflowError, KeyError, TypeError) as error:
            yield error


def _whole_text(path: Path) -> str:
    lines = []
    for number, offset, raw in read_lines(path, _LARGEST_JSON):
        text = decode_line(raw, offset, Source("", str(path), number), _LARGEST_JSON)
        if isinstance(text, BadRow):
            # One array is one JSON value: no single row can be dropped.
            raise DataError(
                f"{visible(str(text.source))}: the file must {text.expected}; got {text.found}. "
                "Fix it, or save its rows one per line as .jsonl."
            )
        if offset > _LARGEST_JSON:
            raise DataError(
                f"{visible(str(path))} must be at most {_LARGEST_JSON} bytes of JSON; got more. "
                "Save its rows one per line as .jsonl."
            )
        lines.append(text)
    return "\n".join(lines)


class _RepeatedKey(dict[str, Any]):
    """A JSON object with `key` twice; json itself silently keeps the last value."""

    key = ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) == len(pairs):
        return row
    marked = _RepeatedKey(row)
    marked.key = Counter(key for key, _ in pairs).most_common(1)[0][0]
    return marked


def _trouble(row: dict[str, Any]) -> tuple[str, str] | None:
    """(found, expected) for a row that repeats a key or nests too deeply."""
    stack: list[tuple[Any, int]] = [(row, 1)]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, _RepeatedKey):
            return f"{excerpt(value.key)} twice", "name each key once"
        if depth > _DEEPEST:
            return f"more than {_DEEPEST} levels", _NEST
        inner = value.values() if isinstance(value, dict) else value
        stack += [(item, depth + 1) for item in inner if isinstance(item, dict | list)]
    return None


def _parse_row(text: str, source: Source) -> RawRow | BadRow:
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        return BadRow(source, "", excerpt(text), _NEST)
    except ValueError as error:
        found = f"{excerpt(text)} ({visible(str(error))})"
        advice = _ARRAY if text.strip() in ("[", "{", "[{") else ""
        if "\r" in text.strip() and str(error).startswith("Extra data"):
            advice = "A file whose lines end in CR alone is saved again with LF."
        return BadRow(source, "", found, "be one whole JSON object", advice)
    return _checked_row(value, source)


def _checked_row(value: Any, source: Source) -> RawRow | BadRow:
    if not isinstance(value, dict):
        advice = _ARRAY if isinstance(value, list) else ""
        return BadRow(source, "", describe(value), "be one JSON object", advice)
    if trouble := _trouble(value):
        return BadRow(source, "", *trouble)
    return RawRow(value, source)


# Columns whose value may be a list in a single row.
_LIST_COLUMNS = {
    *("messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected")
}


def _row_list(value: Any, path: Path) -> list[Any]:
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise DataError(
            f"{visible(str(path))} must be an array of rows, or an object with one; "
            f"got {describe(value)}. Save the rows one per line as .jsonl."
        )
    _refuse_columns(value, path)
    if _LIST_COLUMNS & set(value):
        return [value]
    lists = {key: rows for key, rows in value.items() if isinstance(rows, list)}
    if not lists:
        return [value]
    if len(lists) > 1:
        raise DataError(
            f"{visible(str(path))} must hold one list of rows; got lists under {names(lists)}. "
            "Save the one to train on as a separate file."
        )
    return next(iter(lists.values()))


def _refuse_columns(value: dict[str, Any], path: Path) -> None:
    """Refuse a table by its columns, each a list of texts or an object from row to cell."""
    cells = list(value.values())
    as_lists = len(cells) > 1 and all(
        isinstance(c, list) and c and all(isinstance(t, str) for t in c) for c in cells
    )
    if _is_split(value) or _is_by_row(value):
        raise DataError(
            f"{visible(str(path))} must hold its rows in one list; got {names(value)}, as pandas "
            f"writes them with orient='{'split' if _is_split(value) else 'index'}'. Write them "
            "with to_json(path, orient='records', lines=True), named .jsonl."
        )
    as_objects = all(isinstance(c, dict) and c and all(k.isdecimal() for k in c) for c in cells)
    if value and (as_lists or as_objects) and len({len(c) for c in cells}) == 1:
        raise DataError(
            f"{visible(str(path))} must hold its data row by row; got column by column "
            f"({names(value)}). In pandas, write it with to_json(path, orient='records', "
            "lines=True), named .jsonl."
        )


def _is_split(value: dict[str, Any]) -> bool:
    return value.keys() == {"columns", "index", "data"}


def _is_by_row(value: dict[str, Any]) -> bool:
    """Whether an object holds rows under their numbers."""
    rows = list(value.values())
    is_table = bool(rows) and all(isinstance(row, dict) for row in rows)
    return is_table and all(name.isdecimal() for name in value)


def _csv_lines(path: Path, dataset: str, bad: list[BadRow]) -> Iterator[str]:
    for number, offset, raw in read_lines(path):
        text = decode_line(raw, offset, Source(dataset, str(path), number))
        if isinstance(text, BadRow):
            bad.append(text)
            # Keep the quotes, so that the reader still finds the end of the row.
            text = raw.decode("utf-8", errors="replace").replace("\0", "?").rstrip("\r\n")
        yield text + "\n"


def _check_names(header: list[str], where: str) -> None:
    blank = any(not name.strip() for name in header)
    if blank or len(set(header)) != len(header):
        raise DataError(
            f"{where}: column names must be different and not blank; got {names(header)}. "
            "Give every column its own name."
        )
