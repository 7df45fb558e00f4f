"""Lines and their places."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.data.lines import decode_line, read_lines
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
    with pytest.raises(DataError, match="must be readable; got Is a directory"):
        list(read_lines(tmp_path))


def test_damaged_gzip(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(b"x\n") + b"garbage")
    with pytest.raises(DataError, match="must be a whole gzip file"):
        list(read_lines(tmp_path / "a"))
