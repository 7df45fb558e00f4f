"""Where rows come from: a file, a folder of files, a saved data set, the hub, or the built-in set.

Formats are listed in docs/data.md. `read_rows` reads them all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from tandem.data import gym
from tandem.data.excerpt import excerpt
from tandem.data.formats import (
    OnBlank,
    Rows,
    read_csv,
    read_json,
    read_jsonl,
    read_parquet,
)
from tandem.data.plaintext import read_text
from tandem.data.rows import BadRow, RawRow
from tandem.data.saved import rows_through_datasets
from tandem.errors import ConfigError, DataError
from tandem.text import visible
from tandem.types import Source

__all__ = [
    "ROLES",
    "BadRow",
    "DataSpec",
    "RawRow",
    "files_left",
    "parse_columns",
    "parse_spec",
    "read_rows",
]

ROLES = (
    *("prompt", "chosen", "rejected", "completion", "messages", "text", "system"),
    *("label", "margin", "ranking", "answers", "ranks"),
)
"""The roles of a column map."""

_READERS: dict[str, Callable[[Path, str, OnBlank], Rows]] = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".csv": read_csv,
    ".txt": read_text,
    ".parquet": read_parquet,
}
_FORMATS = ", ".join(_READERS)
_RENAME = "Rename it according to its content."
_ADVICE = {
    ".tsv": "Save it with commas, as .csv.",
    ".tab": "Save it with commas, as .csv.",
    ".xlsx": "Export it as .csv.",
    ".arrow": "Save it as .parquet.",
    **dict.fromkeys([".xz", ".zst", ".bz2", ".zip", ".tar", ".tgz"], "Unpack it."),
}
"""Advice for files with another extension."""
_METADATA = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
"""Words in a file's name or folder that name its split, as for Hugging Face's hub."""
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_MOST_WEIGHT = 1000
"""Every row comes so many times an epoch, and each copy is held: a typo would fill the memory."""
_WEIGHT = re.compile(r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|nan|inf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DataSpec:
    """One data set, as named on the command line.

    name: short, for reports (`politeness` for prefs/politeness.jsonl.gz; full hub names).
    path: file, folder or hub name. weight: passes over its rows per epoch, finite and above 0.
    columns: role to column, for this data set only.
    """

    name: str
    path: str
    weight: float = 1.0
    columns: Mapping[str, str] = field(default_factory=dict)


def parse_spec(text: str) -> DataSpec:
    """Read `FILE_OR_NAME[:weight][::role=column,...]`.

    Only a trailing number is a weight; drive letters and other colons belong to the path.
    Example: parse_spec("C:/a.jsonl:2::prompt=question") has weight 2 and path "C:/a.jsonl".

    Raises: ConfigError: no path or not UTF-8, a weight that is not positive and finite, or a wrong
        column
            map.
    """
    path, mark, tail = text.rpartition("::")
    columns = {}
    if mark and "=" in tail:
        columns = parse_columns(tail.split(","), f"the column map of data set {excerpt(text)}")
    else:
        path = text
    weight = 1.0
    head, colon, number = path.rpartition(":")
    if colon and _WEIGHT.fullmatch(number):
        path, weight = head, float(number)
        if not 0 < weight <= _MOST_WEIGHT:
            raise ConfigError(
                f"the weight of data set {excerpt(text)} must be above 0 and at most "
                f"{_MOST_WEIGHT:,}; got {number}. To give it no weight, remove the data set."
            )
    if re.search("[\ud800-\udfff]", text):  # how bytes that are not UTF-8 arrive
        raise ConfigError(
            f"data set {excerpt(text)} must have a name in UTF-8; got other bytes. Rename the file."
        )
    if not path.strip():
        raise ConfigError(
            f"data set {excerpt(text)} must name a file, folder or hub name; got none. "
            "Write FILE_OR_NAME[:weight]."
        )
    return DataSpec(_short_name(path), path, weight, columns)


def parse_columns(items: Iterable[str], where: str) -> dict[str, str]:
    """A column map from `role=column` items, as {role: column}.

    Raises:
        ConfigError: an item without `=`, an unknown role, a role mapped twice; begins with `where`.
    """
    columns: dict[str, str] = {}
    for item in items:
        role, mark, column = (part.strip() for part in item.partition("="))
        if not (role and mark and column):
            raise ConfigError(
                f"{where} must hold role=column items; got {excerpt(item)}. "
                "Write for example prompt=question,completion=answer."
            )
        if role not in ROLES:
            near = get_close_matches(role, ROLES, 1)
            advice = f"Did you mean {near[0]}?" if near else "Use one of them."
            raise ConfigError(
                f"{where} must map one of {', '.join(ROLES)}; got {excerpt(role)}. {advice}"
            )
        if role in columns:
            raise ConfigError(
                f"{where} must map each role once; got {role} twice. Remove one of them."
            )
        columns[role] = column
    return columns


def read_rows(spec: DataSpec, *, on_blank: OnBlank = lambda: None) -> Iterator[RawRow | BadRow]:
    """Every row of a data set, in order; `on_blank` is called for each blank line skipped.

    `embedded` is the built-in data set (write ./embedded for a folder of that name), and
    `reasoning-gym:TASK?size=N&seed=N` is made by the package of that name. A path that does not
    exist and looks like a hub name is loaded from the hub.

    Raises:
        DataError: it does not exist, has an unknown format or no rows, or is damaged.
    """
    path = _local(spec.path)
    if spec.path == "embedded":
        rows = _embedded(spec)
    elif spec.path.startswith(gym.PREFIX):
        rows = _generated(spec)
    elif _is_saved_dataset(path):
        rows = rows_through_datasets(spec.name, spec.path, path)
    elif path.is_dir():
        rows = _folder(path, spec.name, on_blank)
    elif path.exists():
        rows = _file(path, spec.name, on_blank)
    else:
        if path.is_symlink():
            raise DataError(
                f"data set {visible(spec.path)} must be an existing file or folder; got a link to "
                f"{visible(os.readlink(path))}, which does not exist. Mend the link."
            )
        near = _nearest(path, spec.path)
        if near or not _looks_like_hub_name(spec.path):
            raise DataError(
                f"data set {visible(spec.path)} must be an existing file or folder, or a hub name; "
                f"got neither. {f'Did you mean {visible(near)}?' if near else 'Check the path.'}"
            )
        rows = rows_through_datasets(spec.name, spec.path, None)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(
            f"{visible(spec.path)} must hold at least one row; got none. Remove it, or add rows."
        )


def _local(path: str) -> Path:
    """`path` on this machine; DataError if no file can have that name."""
    try:
        local = Path(path).expanduser()
        local.exists()
    except (RuntimeError, OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise DataError(
            f"data set {excerpt(path)} must be a valid path; got {cause}. Check its spelling."
        ) from None
    return local


def _short_name(path: str) -> str:
    if path.startswith(gym.PREFIX):
        return path.removeprefix(gym.PREFIX).partition("?")[0]
    if _looks_like_hub_name(path) and not os.path.exists(path):
        return path
    # Both separators on every machine, so that a shared config gives the same names.
    name = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return re.sub(r"(\.\w{2,8})?(\.gz)?$", "", name) or name or path


def _format_of(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _looks_like_hub_name(text: str) -> bool:
    return bool(_HUB_NAME.fullmatch(text)) and _format_of(Path(text)) not in _READERS


def _nearest(path: Path, text: str) -> str:
    """An existing file or folder whose name is close to a missing path; "" if none.

    A hub name may look like a file's: it counts as a typo only if it has an extension, or its first
    part is an existing folder.
    """
    if _looks_like_hub_name(text) and not (path.suffix[1:].isalpha() or "/" in text):
        return ""
    try:
        here = os.listdir(path.parent)
    except OSError:
        return ""
    near = get_close_matches(path.name, here, 1, cutoff=0.8)
    return str(path.parent / near[0]) if near else ""


def _is_saved_dataset(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _file(path: Path, dataset: str, on_blank: OnBlank) -> Rows:
    reader = _READERS.get(_format_of(path))
    if reader is None:
        raise DataError(
            f"{visible(str(path))} must end in one of {_FORMATS} (or one of them with .gz); "
            f"got {excerpt(path.name)}. {_ADVICE.get(path.suffix.lower(), _RENAME)}"
        )
    return reader(path, dataset, on_blank)


def files_left(spec: DataSpec) -> list[str]:
    """The files of a folder that `read_rows` leaves, within the folder: they are of splits to
    measure on, beside one to train on.

    Raises:
        DataError: no folder can have that name.
    """
    path = _local(spec.path)
    if spec.path == "embedded" or not path.is_dir() or _is_saved_dataset(path):
        return []
    return [str(file.relative_to(path)) for file in _data_files(path)[1]]


def _folder(path: Path, dataset: str, on_blank: OnBlank) -> Rows:
    files, _ = _data_files(path)
    if not files:
        raise DataError(
            f"folder {visible(str(path))} must hold files that end in one of {_FORMATS}; got none. "
            "Give the folder with the data."
        )
    for file in files:
        yield from _file(file, dataset, on_blank)


def _data_files(path: Path) -> tuple[list[Path], list[Path]]:
    """(to read, to leave): the data files under a folder, by name, without hidden and metadata
    files. Where some are of a train split, those of test and validation splits are left."""
    files = [
        file
        for file in sorted(path.rglob("*"))
        if not file.is_dir()  # a pipe or a broken link is refused by its reader, not skipped
        and _format_of(file) in _READERS
        and file.name not in _METADATA
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    splits = {file: _split_of(file.relative_to(path)) for file in files}
    if "train" not in splits.values():
        return files, []
    read = [file for file in files if splits[file] in ("train", "")]
    return read, [file for file in files if file not in read]


def _split_of(file: Path) -> str:
    """The split that a file's name names, else its innermost folder's that does; "" for none or
    several."""
    for part in reversed(file.parts):
        # test.jsonl, test-00000-of-00002.parquet, test_prefs, squad_test; not unit_test_generation.
        words = re.split(r"[^a-z0-9]+", re.sub(r"(\.[a-z]+)+$", "", part.lower()))
        words = [word for word in words if not re.fullmatch(r"\d+|of", word)]
        if named := {_SPLITS[word] for word in (words[:1] + words[-1:]) if word in _SPLITS}:
            return named.pop() if len(named) == 1 else ""
    return ""


def _generated(spec: DataSpec) -> Rows:
    for number, row in enumerate(gym.rows(spec.path.removeprefix(gym.PREFIX)), 1):
        yield RawRow(row, Source(spec.name, spec.path, number))


def _embedded(spec: DataSpec) -> Rows:
    from tandem.data import embedded

    for number, row in enumerate(embedded.rows(), 1):
        yield RawRow(row, Source(spec.name, "embedded", number))
