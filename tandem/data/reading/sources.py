"""Where rows come from: a file, a folder of files, a saved data set, the hub, or the built-in set.

Formats are listed in docs/data.md. `read_rows` reads them all.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tandem.data.excerpt import excerpt
from tandem.data.reading import gym
from tandem.data.reading.folder_files import FolderFiles, files_of_folder
from tandem.data.reading.formats import (
    OnBlank,
    Rows,
    read_csv,
    read_json,
    read_jsonl,
    read_parquet,
    read_tsv,
)
from tandem.data.reading.parts import (
    EMBEDDED,
    ENDINGS,
    Part,
    declared,
    format_of,
    looks_like_hub_name,
    of_split,
    part_of,
    unknown,
)
from tandem.data.reading.plaintext import read_text
from tandem.data.reading.saved import is_saved_dataset, rows_through_datasets
from tandem.data.rows import BadRow, RawRow
from tandem.errors import ConfigError, DataError
from tandem.files import file_near
from tandem.text import counted, is_unicode, visible
from tandem.types import Source

ROLES = (
    *("prompt", "chosen", "rejected", "completion", "messages", "text", "system", "tools"),
    *("label", "grade", "margin", "ranking", "answers", "ranks", "scores"),
    *("answer_a", "answer_b", "preferred"),
)
"""The roles of a column map."""

_READERS: dict[str, Callable[[Path, str, OnBlank], Rows]] = dict(
    zip(
        ENDINGS,
        (read_json, read_jsonl, read_jsonl, read_csv, read_tsv, read_text, read_parquet),
        strict=True,
    )
)
_FORMATS = ", ".join(ENDINGS)
_RENAME = "Rename it according to its content."
_MAP = re.compile(r":\w+=[^/]*$")
"""A column map behind one colon, which is no part of a data set's name."""
_LINK = re.compile(
    r"(?:https?://(?:huggingface\.co|hf\.co)/|hf://)datasets/(?P<hub>[\w.-]+/[\w.-]+)/?$|\w+://"
)
"""A link, and what it names on the hub if it is the page of a data set there."""
_ADVICE = {
    ".tab": "Rename it to .tsv.",
    ".xlsx": "Export it as .csv.",
    ".arrow": "Save it as .parquet.",
    **dict.fromkeys([".xz", ".zst", ".bz2", ".zip", ".tar", ".tgz"], "Unpack it."),
}
"""Advice for files with another extension."""
_OTHER_FILES = {
    *(".md", ".html", ".htm", ".xml", ".yaml", ".yml", ".toml", ".pdf", ".doc", ".docx", ".xls"),
    *(".ods", ".pkl", ".npy", ".npz", ".h5", ".feather", ".orc", ".avro", ".db", ".sqlite"),
    *(".log", ".py", ".ipynb", ".bin", ".pt", ".gz"),
}
"""Further extensions of files that a user may take for data."""
_MOST_WEIGHT = 1000
"""Most copies of a row in an epoch. Each is held, so that a typo would fill the memory."""
_WEIGHT = re.compile(r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|nan|inf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DataSpec:
    """One data set, as named on the command line.

    name: short, for reports (`politeness` for prefs/politeness.jsonl.gz; full hub names).
    path: file, folder or hub name, maybe with the part to read (see `parts`). weight: passes over
    its rows per epoch, finite and above 0.
    columns: role to column, for this data set only.
    """

    name: str
    path: str
    weight: float = 1.0
    columns: Mapping[str, str] = field(default_factory=dict)


def parse_spec(text: str) -> DataSpec:
    """Read `FILE_OR_NAME[@CONFIGURATION/SPLIT][:weight][::role=column,...]` (see `parts`).

    Only a trailing number is a weight; drive letters and other colons belong to the path.
    Example: parse_spec("C:/a.jsonl:2::prompt=question") has weight 2 and path "C:/a.jsonl".

    Raises:
        ConfigError: no path or not UTF-8, a weight that is not positive and finite, or a wrong
            column map.
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
    if not is_unicode(text):
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
    part = part_of(spec.path)
    path, is_declared = _place(part)
    if part.base == EMBEDDED:
        from tandem.data import embedded

        rows = _numbered(embedded.rows(), spec)
    elif part.base.startswith(gym.PREFIX):
        rows = _numbered(gym.rows(part.base.removeprefix(gym.PREFIX)), spec)
    elif is_declared or is_saved_dataset(path):
        rows = rows_through_datasets(spec.name, part, path)
    elif path.is_dir():
        rows = _folder(path, part, spec.name, on_blank)
    elif path.exists():
        rows = _file(path, spec.name, on_blank)
    else:
        _require_hub_name(part, path)
        rows = rows_through_datasets(spec.name, part, None)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(
            f"{visible(spec.path)} must hold at least one row; got none. Remove it, or add rows."
        )


def _place(part: Part) -> tuple[Path, bool]:
    """Where a local data set is, or the folder of it that is the configuration; and whether its
    card declares what `part` names.

    Raises:
        DataError: there is neither, or the data set cannot have parts.
    """
    path = _local(part.base)
    if part.is_whole or not (path.exists() or part.base == EMBEDDED):
        return path, False
    if part.base == EMBEDDED or not path.is_dir():
        found = "the built-in one" if part.base == EMBEDDED else "a file"
        raise DataError(
            f"data set {visible(part.text)} must be a folder or a hub name, which may have "
            f"configurations and splits; got {found}. Write {visible(part.base)}."
        )
    known = declared(path)
    if not part.config:
        return path, bool(known)
    if part.config in known:
        return path, True
    inside = _local(str(path / part.config))
    if not inside.is_dir() or ".." in Path(part.config).parts:
        folders = sorted(p.name for p in path.iterdir() if p.is_dir() and p.name[0] != ".")
        raise unknown(part, "configuration", part.config, [*known, *folders])
    return inside, False


def _require_hub_name(part: Part, path: Path) -> None:
    """Refuse a data set that is neither here nor, by its name, on the hub."""
    if path.is_symlink():
        raise DataError(
            f"data set {visible(part.text)} must be an existing file or folder; got a link to "
            f"{visible(os.readlink(path))}, which does not exist. Fix the link."
        )
    if glob.has_magic(part.base):
        raise DataError(
            f"data set {visible(part.text)} must be one file or folder; got a pattern. Give the "
            "folder, or write the pattern without quotes: the shell makes the files' names of it."
        )
    if found := _MAP.search(part.base):
        raise DataError(
            f"data set {visible(part.text)} must have two colons before its column map; got one. "
            f"Write {visible(f'{part.base[: found.start()]}:{part.base[found.start() :]}')}."
        )
    if link := _LINK.match(part.base):
        name = link["hub"]
        raise DataError(
            f"data set {visible(part.text)} must be a file, a folder or a hub name; got a link. "
            f"{f'Write {visible(name)}.' if name else 'Download it, and give the file.'}"
        )
    near = _nearest(path, part.base)
    if near or not looks_like_hub_name(part.base):
        raise DataError(
            f"data set {visible(part.text)} must be an existing file or folder, or a hub name; "
            f"got neither. {f'Did you mean {visible(near)}?' if near else 'Check the path.'}"
        )
    if _looks_like_file(part.base):
        advice = _ADVICE.get(path.suffix.lower())
        unread = f" {visible(path.suffix)} files are not read. {advice}" if advice else ""
        raise DataError(
            f"data set {visible(part.text)} must be an existing file, by its name (files read end "
            f"in {_FORMATS}, or one of them with .gz); got no such file.{unread} Check the path."
        )


def _looks_like_file(text: str) -> bool:
    """Whether a name ends as files do, and as names on the hub hardly ever do."""
    ending = format_of(Path(text))
    if ending in {*_ADVICE, *_OTHER_FILES} or get_close_matches(ending, ENDINGS, 1, cutoff=0.75):
        return True
    return "/" not in text and ending[1:].isalpha()


def _local(path: str) -> Path:
    """`path` on this machine; DataError if no file can have that name."""
    try:
        local = Path(path).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            local.stat()  # `exists` says nothing of other errors from Python 3.14 on
    except (RuntimeError, OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise DataError(
            f"data set {excerpt(path)} must be a valid path; got {cause}. Check its spelling."
        ) from None
    return local


def _short_name(path: str) -> str:
    if path.startswith(gym.PREFIX):
        return path.removeprefix(gym.PREFIX).partition("?")[0]
    part = part_of(path)
    if not part.is_whole:
        return _short_name(part.base) + path.removeprefix(part.base)
    if looks_like_hub_name(path) and not os.path.exists(path):
        return path
    # Both separators on every machine, so that a shared config gives the same names.
    name = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return re.sub(r"(\.\w{2,8})?(\.gz)?$", "", name) or name or path


def _nearest(path: Path, text: str) -> str:
    """An existing file or folder whose name is close to a missing path; "" if none.

    A hub name may look like a file's: it counts as a typo only if it has an extension, or its first
    part is an existing folder.
    """
    if looks_like_hub_name(text) and not (path.suffix[1:].isalpha() or "/" in text):
        return ""
    return file_near(path)


def _file(path: Path, dataset: str, on_blank: OnBlank) -> Rows:
    reader = _READERS.get(format_of(path))
    if reader is None:
        raise DataError(
            f"{visible(str(path))} must end in one of {_FORMATS} (or one of them with .gz); "
            f"got {excerpt(path.name)}. {_ADVICE.get(path.suffix.lower(), _RENAME)}"
        )
    return reader(path, dataset, on_blank)


def files_left(spec: DataSpec) -> tuple[list[str], list[str]]:
    """The files of a folder that `read_rows` leaves, within the folder: those of splits to measure
    on, beside one to train on, and those of runs and models.

    Raises:
        DataError: as `read_rows`, of a name that leads nowhere.
    """
    part = part_of(spec.path)
    path, is_declared = _place(part)
    if is_declared or part.base == EMBEDDED or not path.is_dir() or is_saved_dataset(path):
        return [], []
    files = files_of_folder(path)
    made = [str(file.relative_to(path)) for file in files.made]
    if part.split:
        return [], made
    return [str(file.relative_to(path)) for file in files.other_splits], made


def declared_but_mixed(spec: DataSpec) -> list[str]:
    """The configurations that the card of a folder declares, where `read_rows` reads the files of
    several.

    Raises:
        DataError: as `read_rows`, of a name that leads nowhere.
    """
    part = part_of(spec.path)
    path, _ = _place(part)
    found = declared(path) if part.is_whole and not is_saved_dataset(path) else []
    return found if len(found) > 1 else []


def _folder(path: Path, part: Part, dataset: str, on_blank: OnBlank) -> Rows:
    found_there = files_of_folder(path)
    files = found_there.read
    if part.split:
        inside = [file.relative_to(path) for file in (*files, *found_there.other_splits)]
        found, splits = of_split(inside, part.split)
        if not found and inside:
            raise unknown(part, "split", part.split, splits)
        files = sorted(path / file for file in found)
    if not files:
        raise DataError(
            f"folder {visible(str(path))} must hold files that end in one of {_FORMATS}; got "
            f"{_only_made(found_there)}. Give the folder with the data."
        )
    for file in files:
        yield from _file(file, dataset, on_blank)


def _only_made(found: FolderFiles) -> str:
    """What a folder without data holds."""
    return f"only {counted(len(found.made), 'file')} of a run or a model" if found.made else "none"


def _numbered(rows: Iterable[dict[str, Any]], spec: DataSpec) -> Rows:
    """Rows that are made, not read."""
    for number, row in enumerate(rows, 1):
        yield RawRow(row, Source(spec.name, spec.path, number))
