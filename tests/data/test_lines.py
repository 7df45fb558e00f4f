"""Lines and their places."""

from __future__ import annotations

import gzip
import os
import time
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.data.reading import lines as lines_module
from tandem.data.reading.lines import decode_line, read_lines
from tandem.data.rows import BadRow
from tandem.errors import DataError
from tandem.types import Source


@given(st.lists(st.binary().map(lambda b: b.replace(b"\n", b"")), min_size=1), st.booleans())
def test_offsets_point_at_the_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], packed: bool
) -> None:
    content = b"# " + b"\n".join(lines)  # the first bytes decide, so no case begins like gzip
    path = tmp_path_factory.mktemp("lines") / "a"
    path.write_bytes(gzip.compress(content) if packed else content)
    found = list(read_lines(path))
    assert b"".join(raw for _, _, raw in found) == content
    assert [number for number, _, _ in found] == list(range(1, len(found) + 1))
    assert all(content[offset:].startswith(raw) for _, offset, raw in found)


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("a\u2028b\x85c\x0bd\re\r\nf".encode())
    texts = [decode_line(raw, 0, Source("", "a", n)) for n, _, raw in read_lines(tmp_path / "a")]
    assert texts == ["a\u2028b\x85c\x0bd\re", "f"]


@pytest.mark.parametrize("bom", [b"\xff\xfe", b"\xfe\xff"])
def test_utf16_is_refused(bom: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bom + b"x\0")
    with pytest.raises(DataError, match="must be UTF-8; got a UTF-16 file"):
        list(read_lines(tmp_path / "a"))


def test_what_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a file; got a folder"):
        list(read_lines(tmp_path))


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(b"x\n") + b"garbage")
    with pytest.raises(DataError, match="must be a whole gzip file"):
        list(read_lines(tmp_path / "a"))


def test_a_line_too_long_is_refused_and_the_next_has_its_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\n" + b"x" * 1000 + b"\nthree\n" + b"y" * 77)
    found = list(read_lines(tmp_path / "a", longest=10))
    places = [(number, offset) for number, offset, _ in found]
    assert places == [(1, 0), (2, 4), (3, 1005), (4, 1011)]
    assert max(len(raw) for _, _, raw in found) == 11
    bad = decode_line(found[1][2], 4, Source("", "a", 2), longest=10)
    assert isinstance(bad, BadRow)
    assert bad.expected == "be a line of at most 10 bytes"


@pytest.mark.parametrize("content", [b"\0" * 3_000_000, b"a\n" * 1_500_000])
def test_a_gzip_bomb_is_left_early(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "_SWOLLEN", 1_000_000)
    (tmp_path / "a").write_bytes(gzip.compress(content))
    found = read_lines(tmp_path / "a", longest=1000)
    with pytest.raises(DataError, match="must unpack to at most 100 times its size"):
        deque(found, maxlen=0)
    (tmp_path / "b").write_bytes(content)  # as large, but not packed
    assert sum(1 for _ in read_lines(tmp_path / "b", longest=1000)) > 0


def test_a_few_kilobytes_cost_a_few_seconds(tmp_path: Path) -> None:
    """Each of these was read for minutes: what is packed may be a thousand times its size."""
    for name, content in (
        ("blank", b"\n" * 8_000_000),
        ("spaces", b" \r\n" * 2_500_000),
        ("zeros", b"0" * 100_000_000),
    ):
        path = tmp_path / name
        path.write_bytes(gzip.compress(content))
        assert path.stat().st_size < 100_000
        start = time.process_time()
        with pytest.raises(
            DataError, match=r"blank lines in a row|at most 100 times its size, or 8"
        ):
            deque(read_lines(path), maxlen=0)
        assert time.process_time() - start < 15


def test_blank_lines_between_rows_are_no_bomb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "_MOST_BLANK", 10)
    (tmp_path / "a").write_bytes((b"\n" * 10 + b"x\n") * 20)
    assert sum(1 for _ in read_lines(tmp_path / "a")) == 220
    (tmp_path / "b").write_bytes(b"x\n" + b"\n" * 11)
    with pytest.raises(DataError, match="b:12: a file must have at most 10 blank lines in a row"):
        list(read_lines(tmp_path / "b"))


@pytest.mark.parametrize(
    ("magic", "found"),
    [
        (gzip.compress(b"x", mtime=0), "gzip within gzip"),
        (b"PK\x03\x04", "a zip archive"),
        (b"\x28\xb5\x2f\xfd", "a zstd file"),
        (b"BZh91AY&SY", "a bzip2 file"),
        (b"\xfd7zXZ\0", "an xz file"),
        (b"PAR1\x15\x04", "a Parquet file"),
        (b"ARROW1\0\0", "an Arrow file"),
    ],
)
def test_other_formats_are_named(magic: bytes, found: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(magic))
    with pytest.raises(DataError, match=f"must be UTF-8; got {found}"):
        list(read_lines(tmp_path / "a"))


def test_what_never_ends_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "gone").symlink_to("nowhere")
    for name, found in (("pipe", "a pipe"), ("zero", "a pipe or a dev"), ("gone", "a broken link")):
        with pytest.raises(DataError, match=f"must be a file; got {found}"):
            list(read_lines(tmp_path / name))
