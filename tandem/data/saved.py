"""Rows through the datasets package: folders that it saved, and data sets on the hub."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tandem.data.excerpt import describe, names
from tandem.data.formats import Rows, unconvertible
from tandem.data.rows import RawRow
from tandem.errors import DataError
from tandem.text import first_line, visible
from tandem.types import Source

_FORMAT_NAMES = {"csv", "json", "parquet", "text", "arrow", "pandas", "imagefolder"}


def rows_through_datasets(name: str, path: str, saved: Path | None) -> Rows:
    """Rows of a folder written by `save_to_disk` (`saved`), or of the hub's data set `path`.

    A row whose values cannot be converted is a bad row.

    Args:
        name: the data set's, for the rows' sources.
    Raises:
        DataError: the package or the data is missing, or `path` names a format.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"data set {visible(path)} must be read with the datasets package; "
            "got no such package. Run pip install datasets pyarrow"
        ) from None
    readers = getattr(datasets.packaged_modules, "_PACKAGED_DATASETS_MODULES", ())
    if saved is None and path in {*_FORMAT_NAMES, *readers}:
        # For the package these names are formats: it would read the current folder.
        raise DataError(
            f"data set {visible(path)} must be a file, a folder or a hub name; got the name of a "
            "format. Give the file itself."
        )
    try:
        loaded = datasets.load_from_disk(str(saved)) if saved else datasets.load_dataset(path)
    # The package and the network beneath it raise errors of many unrelated classes.
    except Exception as error:
        raise _unloadable(path, saved, error) from None
    yield from _convertible(_train_split(loaded, path), name, path, saved)


def _convertible(rows: Any, name: str, path: str, saved: Path | None) -> Rows:
    """Rows as they are converted; one that cannot be is a bad row, and the next is asked for."""
    number, rest = 0, iter(rows)
    while True:
        source = Source(name, path, number + 1)
        try:
            row = next(rest, None)
            if row is None:
                return
        except (ValueError, OverflowError, TypeError, KeyError) as error:
            yield unconvertible(error, source)
            more = range(number + 1, len(rows))
            rest = iter(rows.select(more) if more else ())
        except Exception as error:  # a column of pictures without its decoder, a file cut short
            raise _unloadable(path, saved, error) from None
        else:
            yield RawRow(row, source)
        number += 1


def _unloadable(path: str, saved: Path | None, error: Exception) -> DataError:
    cause = visible(first_line(error))[:200]
    what = "a folder saved by datasets" if saved else "a file, a folder or a reachable hub name"
    return DataError(
        f"data set {visible(path)} must be {what}; got {type(error).__name__}: {cause}. "
        "Check the path and the network, or give a local file."
    )


def _train_split(loaded: Any, path: str) -> Iterable[dict[str, Any]]:
    """The split named train, or the only one."""
    if not isinstance(loaded, dict):
        return loaded
    if "train" in loaded:
        return loaded["train"]
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    raise DataError(
        f"data set {visible(path)} must have a split named train, or one alone; "
        f"got {names(loaded) if loaded else describe(None)}. Save the split to use by itself."
    )
