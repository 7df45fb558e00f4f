"""Rows through the datasets package: folders that it saved or that a card describes, and data sets
on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.data.reading.formats import Rows, unconvertible
from tandem.data.reading.parts import Part, unknown
from tandem.data.rows import RawRow
from tandem.errors import DataError
from tandem.text import cause_of, first_line, visible
from tandem.types import Source

_FORMAT_NAMES = {"csv", "json", "parquet", "text", "arrow", "pandas", "imagefolder"}
_HUB_TIMEOUT_SECONDS = 10.0
_NO_CONFIGURATION = re.compile(
    r"Config name is missing|BuilderConfig .* not found|for config '|configurations in the cache"
)
"""What the package says where a configuration must be named, or is not there (the latter two: in
its cache, without a network). It has no class of errors for them."""
_LISTED = re.compile(r"\[([^\[\]]*)\]|configurations in the cache: ([^\n]*)")
_UNNAMED = re.compile(r"default-[0-9a-f]{16}")
"""What a folder of a data set is called in the cache."""


def rows_through_datasets(name: str, part: Part, folder: Path | None) -> Rows:
    """Rows of a folder written by `save_to_disk` or with a card that declares what `part` names, or
    of the hub's data set `part.base`.

    A row whose values cannot be converted is a bad row.

    Args:
        name: the data set's, for the rows' sources.
        part: the configuration is none of the folder's folders, of the hub's it may be one.
        folder: where the data set is; None: on the hub.
    Raises:
        DataError: the package or the data is missing, or `part` names a format, no configuration
            where it must, or something that there is not.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"data set {visible(part.text)} must be read with the datasets package; "
            "got no such package. Run pip install datasets pyarrow"
        ) from None
    readers = getattr(datasets.packaged_modules, "_PACKAGED_DATASETS_MODULES", ())
    if folder is None and part.base in {*_FORMAT_NAMES, *readers}:
        # For the package these names are formats: it would read the current folder.
        raise DataError(
            f"data set {visible(part.text)} must be a file, a folder or a hub name; got the name "
            "of a format. Give the file itself."
        )
    is_saved = folder is not None and is_saved_dataset(folder)
    try:
        if is_saved:
            loaded = datasets.load_from_disk(str(folder))
        elif folder is not None:
            loaded = _configured(datasets, part, str(folder))
        else:
            loaded = _from_hub(datasets, part)
    except DataError:
        raise
    # The package and the network beneath it raise errors of many unrelated classes.
    except Exception as error:
        raise _unloadable(part, is_saved, error) from None
    rows = _split(loaded, part)
    _leave_files(getattr(getattr(rows, "info", None), "features", None))
    yield from _convertible(rows, name, part, is_saved)


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` wrote it."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _from_hub(datasets: Any, part: Part) -> Any:
    """A data set of the hub, or of the package's cache where the hub does not answer.

    The hub is asked once first: the package would ask an unreachable one six times, for half a
    minute, before it looks into its cache.
    """
    no_answer = "" if datasets.config.HF_HUB_OFFLINE else hub_without_answer(part.base)
    if not no_answer:
        return _configured(datasets, part, part.base)
    try:
        with _offline(datasets):
            return _configured(datasets, part, part.base)
    except ConnectionError:
        raise DataError(
            f"data set {visible(part.text)} must be a file, a folder or a reachable hub name; got "
            f"no such path, nothing in the cache and no answer from {no_answer}. Check the "
            "spelling and the network, or give a local file."
        ) from None


def hub_without_answer(name: str, *, of_model: bool = False) -> str:
    """The hub that cannot be asked for a data set (or a model), and why; empty if it answers, even
    an error."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    hub = HfApi()
    try:
        (hub.model_info if of_model else hub.dataset_info)(name, timeout=_HUB_TIMEOUT_SECONDS)
    except (HfHubHTTPError, ValueError):  # ValueError: no name of the hub's, or no answer of a hub
        return ""
    except Exception as error:  # the client raises many kinds of errors
        return f"{visible(hub.endpoint)} ({cause_of(error)})"
    return ""


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Within: the package reads its cache alone."""
    before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _configured(datasets: Any, part: Part, source: str) -> Any:
    """A data set by its configuration: one that it declares, or else one of its folders."""
    try:
        if part.config:
            return datasets.load_dataset(source, part.config)
        return datasets.load_dataset(source)
    except Exception as error:
        if not _NO_CONFIGURATION.search(str(error)):
            raise
        known = _listed(error)
    if part.config:
        try:
            return datasets.load_dataset(source, data_dir=part.config)
        except Exception as error:
            known += _listed(error) if _NO_CONFIGURATION.search(str(error)) else []
    raise unknown(part, "configuration", part.config, known)


def _listed(error: Exception) -> list[str]:
    """The names that an error lists, with or without quotes; empty where it lists none."""
    found = _LISTED.search(str(error))
    names = (found[1] or found[2] or "").split(", ") if found else []
    names = [name.strip(" '\"") for name in names]
    return [name for name in names if name and not _UNNAMED.fullmatch(name)]


def _leave_files(feature: Any) -> None:
    """Let pictures, sounds and other files in a data set's rows stay bytes and path, as in Parquet:
    what they decode to is another object each time, and may need another package."""
    if isinstance(feature, Mapping):
        feature = list(feature.values())
    for part in feature if isinstance(feature, list) else [getattr(feature, "feature", None)]:
        if part is not None:
            _leave_files(part)
    if getattr(feature, "decode", False) and type(feature).__name__ != "Json":
        feature.decode = False


def _convertible(rows: Any, name: str, part: Part, is_saved: bool) -> Rows:
    """Rows as they are converted; one that cannot be is a bad row, and the next is asked for."""
    number, rest = 0, iter(rows)
    while True:
        source = Source(name, part.text, number + 1)
        try:
            row = next(rest, None)
            if row is None:
                return
        except (ValueError, OverflowError, TypeError, KeyError) as error:
            yield unconvertible(error, source)
            more = range(number + 1, len(rows))
            rest = iter(rows.select(more) if more else ())
        except Exception as error:  # a column of pictures without its decoder, a file cut short
            raise _unloadable(part, is_saved, error) from None
        else:
            yield RawRow(row, source, is_of_table=True)
        number += 1


def _unloadable(part: Part, is_saved: bool, error: Exception) -> DataError:
    cause = visible(first_line(error))[:200].rstrip(".")
    what = "a folder saved by datasets" if is_saved else "a file, a folder or a reachable hub name"
    return DataError(
        f"data set {visible(part.text)} must be {what}; got {type(error).__name__}: {cause}. "
        "Check the path and the network, or give a local file."
    )


def _split(loaded: Any, part: Part) -> Iterable[dict[str, Any]]:
    """The split that is named; else the one named train, or the only one."""
    if not isinstance(loaded, dict):
        if part.split:
            raise unknown(part, "split", part.split, ())
        return loaded
    if part.split in loaded:
        return loaded[part.split]
    if not part.split and "train" in loaded:
        return loaded["train"]
    if not part.split and len(loaded) == 1:
        return next(iter(loaded.values()))
    raise unknown(part, "split", part.split, loaded)
