"""A grammar of damaged data files (R13): rows, written down in some format, then damaged.

`damaged_file(seed, folder)` is a pure function of its seed: a file or folder that a user might
really have, cut, flipped, mislabelled or made to do harm.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.battery.rows import Row, json_text, some_rows

Bytes = Callable[[bytes, Random], bytes]


def _jsonl(rows: list[Row], random: Random) -> bytes:
    return "".join(json_text(row, random) + "\n" for row in rows).encode()


def _json(rows: list[Row], random: Random) -> bytes:
    value: Any = rows
    if random.random() < 0.2:
        value = {"data": rows, "version": 1}
    return json_text(value, random).encode()


def _csv(rows: list[Row], random: Random) -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names] + [[row.get(name, "") for name in names] for row in rows]
    text = "".join(",".join(_cell(cell) for cell in line) + "\n" for line in lines)
    return text.encode("utf-8", errors="replace")


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',"\n\r') else text


def _txt(rows: list[Row], random: Random) -> bytes:
    paragraphs = [str(value) for row in rows for value in row.values()]
    return "\n\n".join(paragraphs).encode("utf-8", errors="replace")


def _parquet(rows: list[Row], random: Random) -> bytes:
    import pyarrow as arrow
    from pyarrow import parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        cells = [row.get(name) for row in rows]
        try:
            columns[name] = arrow.array(cells)
        except (arrow.ArrowException, ValueError, OverflowError, TypeError):
            columns[name] = _binary_as_text([repr(cell).encode() for cell in cells], random)
    out = io.BytesIO()
    try:
        parquet.write_table(arrow.table(columns), out)
    except (arrow.ArrowException, UnicodeError, RecursionError):
        return b"PAR1 this writer could not write it"
    return out.getvalue()


def _binary_as_text(cells: list[bytes], random: Random) -> Any:
    """A text column, some of whose cells are no UTF-8."""
    import pyarrow as arrow

    cells = [cell + b"\xff" * (random.random() < 0.3) for cell in cells]
    binary = arrow.array(cells, arrow.binary())
    return arrow.StringArray.from_buffers(len(cells), *binary.buffers()[1:])


WRITERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".txt": _txt, ".parquet": _parquet}


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _flip(data: bytes, random: Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(random.choice([1, 1, 5, 50])):
        if flipped:
            flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
    return bytes(flipped)


def _insert(what: bytes) -> Bytes:
    def insert(data: bytes, random: Random) -> bytes:
        at = random.randrange(len(data) + 1)
        return data[:at] + what + data[at:]

    return insert


def _lines(change: Callable[[list[bytes], Random], None]) -> Bytes:
    def damage(data: bytes, random: Random) -> bytes:
        lines = data.split(b"\n")
        change(lines, random)
        return b"\n".join(lines)

    return damage


def _blank_lines(lines: list[bytes], random: Random) -> None:
    for _ in range(random.randint(1, 5)):
        lines.insert(random.randrange(len(lines) + 1), random.choice([b"", b"  ", b"\r", b"\t"]))


def _foreign_line(lines: list[bytes], random: Random) -> None:
    foreign = [
        b"null", b"[]", b"3", b'"text"', b"// comment", b"# comment", b"a,b,c", b"{'text': 'x'}",
        b'{"text": "a", "text": "b"}', b'{"text": NaN}', b'{"text": "a",}', b"NaN", b"}{", b"\x00",
        b'{"text": ' + b"9" * 5000 + b"}", b"[" * 10_000, b'{"a":' * 600 + b"1" + b"}" * 600,
        b'{"text": "\\ud800"}', b'{"text": "\xc3\x28"}', b'{"text": "' + b"y" * 2_000_000 + b'"}',
        b'"unclosed', b"<html>404 Not Found</html>", b"version https://git-lfs.github.com/spec/v1",
    ]  # fmt: skip
    lines.insert(random.randrange(len(lines) + 1), random.choice(foreign))


def _joined_line(lines: list[bytes], random: Random) -> None:
    at = random.randrange(len(lines))
    lines[at : at + 2] = [b"".join(lines[at : at + 2])]


def _carriage_returns(data: bytes, random: Random) -> bytes:
    end = random.choice([b"\r\n", b"\r", b"\n\r", b"\r\r\n"])
    return b"".join(line + (end if random.random() < 0.7 else b"\n") for line in data.split(b"\n"))


def _encoded(data: bytes, random: Random) -> bytes:
    encoding = random.choice(["utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "utf-7"])
    return data.decode(errors="ignore").encode(encoding, errors="replace")


def _zip(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../evil.jsonl", data)
    return out.getvalue()


def _packed(data: bytes, random: Random) -> bytes:
    whole = gzip.compress(data)
    packers: list[Callable[[], bytes]] = [
        lambda: whole,
        lambda: _cut(whole, random),
        lambda: _flip(whole, random),
        lambda: whole + gzip.compress(data),
        lambda: whole + b"trailing",
        lambda: gzip.compress(whole),
        lambda: _zip(data),
        lambda: bz2.compress(data),
        lambda: lzma.compress(data),
        lambda: b"\x1f\x8b",
        lambda: gzip.compress(data + b"\0" * 3_000_000),
    ]
    return random.choice(packers)()


BYTE_DAMAGES: tuple[Bytes, ...] = (
    _cut, _flip, _encoded, _packed, _carriage_returns,
    _insert(b"\0"), _insert(b"\xff"), _insert(b"\xef\xbb\xbf"), _insert(b"\xed\xa0\x80"),
    _insert(b'"'), _insert(b"\x1b[31m"), _insert(b"\n"), _insert(b"}"), _insert(b"\\u12"),
    _lines(_blank_lines), _lines(_foreign_line), _lines(_foreign_line), _lines(_joined_line),
    lambda data, random: b"\xef\xbb\xbf" + data,
    lambda data, random: b"",
    lambda data, random: b"\n \n\r\n",
    lambda data, random: data + data,
    lambda data, random: data[::-1],
    lambda data, random: random.randbytes(random.randint(1, 3000)),
)  # fmt: skip


def damaged_file(seed: int, folder: Path) -> Path:
    """Write the damaged file (or folder) number `seed` under `folder`."""
    random = Random(seed)
    suffix = random.choice(list(WRITERS))
    data = WRITERS[suffix](some_rows(random), random)
    for _ in range(random.choice([0, 1, 1, 1, 2, 3])):
        data = random.choice(BYTE_DAMAGES)(data, random)
    if random.random() < 0.1:  # named for something else
        suffix = random.choice([*WRITERS, ".jsonl.gz", ".xlsx", "", ".JSONL"])
    path = folder / f"file{seed}{suffix}"
    if random.random() < 0.9:
        path.write_bytes(data)
        return path
    return random.choice(_PLACES)(path, data, random)


def _is_folder(path: Path, data: bytes, random: Random) -> Path:
    path.mkdir()
    for name in random.sample(["a.jsonl", "b.csv", "c.txt", "d.json", "README.md", ".x.jsonl"], 3):
        (path / name).write_bytes(data)
    return path


def _is_link(path: Path, data: bytes, random: Random) -> Path:
    path.symlink_to(random.choice([path.name, "nowhere", "/dev/zero", "/dev/null", "."]))
    return path


def _holds_links(path: Path, data: bytes, random: Random) -> Path:
    path.mkdir()
    (path / "a.jsonl").write_bytes(data)
    (path / "loop").symlink_to(".")
    (path / "b.jsonl").symlink_to(random.choice(["b.jsonl", "nowhere", "a.jsonl", "/dev/zero"]))
    return path


def _is_pipe(path: Path, data: bytes, random: Random) -> Path:
    os.mkfifo(path)
    return path


def _saved_dataset(path: Path, data: bytes, random: Random) -> Path:
    import datasets

    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(5)]
    datasets.Dataset.from_list(rows).save_to_disk(path)
    victim = random.choice(sorted(path.iterdir()))
    victim.write_bytes(random.choice(BYTE_DAMAGES)(victim.read_bytes(), random))
    return path


_PLACES = (_is_folder, _is_link, _holds_links, _is_pipe, _saved_dataset, _saved_dataset)
