"""The lines of a file, plain or gzip, with their positions; every text format is read from these.

Compression is detected by the file's first bytes, not by its name. Only a line feed ends a line
(with a carriage return before it); U+2028 and the like are text.

No file can block a reader or fill its memory: pipes and devices are not opened, lines are read up
to LONGEST_LINE bytes, and files of blank lines or that unpack to far more than text does are
refused. Reading costs time in proportion to the file's size.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from tandem.data.rows import BadRow
from tandem.errors import DataError
from tandem.text import visible
from tandem.types import Source

LONGEST_LINE = 32 * 2**20
"""Longest line in bytes, more than any model's context."""
_SWOLLEN = 8 * 2**20
_LARGEST_RATIO = 100
"""Above _SWOLLEN bytes a file may unpack to this many times its size. Text reaches 20, rows that
all repeat one long system prompt 80."""
_MOST_BLANK = 1_000_000
"""Consecutive blank lines that are skipped: 1.5 seconds."""

_BOM = b"\xef\xbb\xbf"
_FOREIGN = {
    b"\xff\xfe": "a UTF-16 file. Save it as UTF-8",
    b"\xfe\xff": "a UTF-16 file. Save it as UTF-8",
    b"\x1f\x8b": "gzip within gzip. Unpack it once",
    b"PK\x03\x04": "a zip archive. Unpack it",
    b"\x28\xb5\x2f\xfd": "a zstd file. Unpack it",
    b"BZh91AY&SY": "a bzip2 file. Unpack it",
    b"\xfd7zXZ\0": "an xz file. Unpack it",
    b"PAR1\x15": "a Parquet file. Name it .parquet",
    b"ARROW1\0\0": "an Arrow file. Save it as Parquet",
}


def read_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[tuple[int, int, bytes]]:
    """Each line as (number from 1, byte offset in the unpacked file, bytes with their line end).

    A line that is too long is cut to `longest` + 1 bytes, which `decode_line` refuses.

    Raises:
        DataError: the file cannot be opened, is not text, or its compression is damaged.
    """
    number, offset, blank = 0, 0, 0
    try:
        with _open(path) as file:
            most = most_bytes(path)
            while raw := file.readline(longest + 1):
                number += 1
                rest = 0 if raw.endswith(b"\n") else _skip_line(file, longest, most)
                if number == 1:
                    _refuse_foreign(raw, path)
                    skip = len(_BOM) if raw.startswith(_BOM) else 0
                    yield number, skip, raw[skip:]
                else:
                    yield number, offset, raw
                offset += len(raw) + rest
                if offset > most:
                    raise swollen(path)
                blank = blank + 1 if raw.isspace() else 0
                if blank > _MOST_BLANK:
                    raise DataError(
                        f"{visible(str(path))}:{number}: a file must have at most {_MOST_BLANK:,} "
                        "blank lines in a row; got more. Remove them."
                    )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{visible(str(path))} must be a whole gzip file; got {visible(str(error))} after line "
            f"{number}. Fetch it again."
        ) from None
    except OSError as error:
        raise DataError(
            f"{visible(str(path))} must be readable; got {error.strerror or error}. "
            "Check the file and its permissions."
        ) from None


def decode_line(
    raw: bytes, offset: int, source: Source, longest: int = LONGEST_LINE
) -> str | BadRow:
    """The line's text without its line end, or why it is not text."""
    if len(raw) > longest:
        found = f"a line of more than {longest} bytes"
        return BadRow(source, "", found, f"be a line of at most {longest} bytes")
    if (nul := raw.find(b"\0")) >= 0:
        return BadRow(source, "", f"a NUL byte at byte {offset + nul}", "hold no NUL byte")
    try:
        return raw.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at byte {offset + error.start}"
        return BadRow(source, "", found, "be UTF-8")


def require_regular(path: Path) -> None:
    """Refuse pipes, devices and sockets, which may never end.

    Raises:
        DataError: it is one of these, or a broken link.
        OSError: its type cannot be read.
    """
    if not path.is_file():
        found = "a folder" if path.is_dir() else "a pipe or a device"
        found = found if path.exists() else "a broken link"
        raise DataError(
            f"{visible(str(path))} must be a file; got {found}. Write the rows to a file first."
        )


def _open(path: Path) -> BinaryIO:
    require_regular(path)
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path)) if packed else path.open("rb")


def most_bytes(path: Path) -> int:
    """The most bytes a file may unpack to; a plain file never reaches it."""
    return max(_SWOLLEN, _LARGEST_RATIO * path.stat().st_size)


def swollen(path: Path) -> DataError:
    """The error for a file that unpacks to more than `most_bytes`."""
    return DataError(
        f"{visible(str(path))} must unpack to at most {_LARGEST_RATIO} times its size, or "
        f"{_SWOLLEN // 2**20} MiB; got more. If that is right, unpack it to a plain file."
    )


def _skip_line(file: BinaryIO, step: int, most: int) -> int:
    """Skip to the line's end (or just over `most` bytes); returns how many bytes."""
    skipped = 0
    while skipped <= most and (raw := file.readline(step)):
        skipped += len(raw)
        if raw.endswith(b"\n"):
            break
    return skipped


def _refuse_foreign(raw: bytes, path: Path) -> None:
    found = next((what for magic, what in _FOREIGN.items() if raw.startswith(magic)), None)
    if found is not None:
        raise DataError(f"{visible(str(path))} must be UTF-8; got {found}.")
