"""The lines of a file, plain or gzip, with their place: what every text format is read from.

Compression is told by the file's first bytes, never by its name. Lines end at a line feed alone
(a carriage return before it belongs to the line end); U+2028 and its like are text.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from tandem.data.rows import BadRow
from tandem.errors import DataError
from tandem.types import Source

_BOM = b"\xef\xbb\xbf"
_FOREIGN_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def read_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Each line as (number from 1, byte offset in the unpacked file, bytes with their line end).

    Raises:
        DataError: the file cannot be opened, is UTF-16, or its compression is damaged.
    """
    number, offset = 0, 0
    try:
        with _open(path) as file:
            for raw in file:
                number += 1
                if number == 1:
                    _refuse_foreign_bom(raw, path)
                    skip = len(_BOM) if raw.startswith(_BOM) else 0
                    yield number, skip, raw[skip:]
                else:
                    yield number, offset, raw
                offset += len(raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} must be a whole gzip file; got {error} after line {number}. Fetch it again."
        ) from None
    except OSError as error:
        raise DataError(f"{path} must be readable; got {error.strerror or error}.") from None


def decode_line(raw: bytes, offset: int, source: Source) -> str | BadRow:
    """The line's text without its line end, or why it is no text."""
    if (nul := raw.find(b"\0")) >= 0:
        return BadRow(source, "", f"a NUL byte at byte {offset + nul}", "hold no NUL byte")
    try:
        return raw.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at byte {offset + error.start}"
        return BadRow(source, "", found, "be UTF-8")


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path)) if packed else path.open("rb")


def _refuse_foreign_bom(raw: bytes, path: Path) -> None:
    if encoding := _FOREIGN_BOMS.get(raw[:2]):
        raise DataError(f"{path} must be UTF-8; got a {encoding} file. Save it as UTF-8.")
