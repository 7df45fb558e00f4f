"""What files get wrong, one case each: a bad row is named, a bad file is refused."""

from __future__ import annotations

import csv as csv_module
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.data.reading.formats import read_csv, read_json, read_jsonl, read_parquet, read_tsv
from tandem.data.rows import BadRow, RawRow
from tandem.errors import DataError
from tandem.types import Source

DEEP = b"[" * 200_000


def ignore() -> None:
    """Blank lines are of no interest here."""


def jsonl(tmp_path: Path, content: bytes) -> list[RawRow | BadRow]:
    (tmp_path / "a.jsonl").write_bytes(content)
    return list(read_jsonl(tmp_path / "a.jsonl", "a", ignore))


def csv(tmp_path: Path, content: bytes) -> list[RawRow | BadRow]:
    (tmp_path / "a.csv").write_bytes(content)
    return list(read_csv(tmp_path / "a.csv", "a", ignore))


def json_file(tmp_path: Path, content: bytes) -> list[RawRow | BadRow]:
    (tmp_path / "a.json").write_bytes(content)
    return list(read_json(tmp_path / "a.json", "a", ignore))


@pytest.mark.parametrize(
    ("line", "found", "expected"),
    [
        (b'{"text": "cut', "Unterminated string", "be one whole JSON object"),
        (b"prompt,chosen,rejected", "'prompt,chosen,rejected' (Expecting value", "JSON object"),
        (b"[1, 2]", "a list of 2", "be one JSON object"),
        (b'"words"', "'words'", "be one JSON object"),
        (b"null", "null", "be one JSON object"),
        (b"3.5", "the number 3.5", "be one JSON object"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' twice", "name each key once"),
        (b'{"m": [{"role": "x", "role": "y"}]}', "'role' twice", "name each key once"),
        (b'{"text": "caf\xe9"}', "byte 0xe9 at byte 28", "be UTF-8"),
        (b'{"text": "a\0b"}', "a NUL byte at byte 26", "hold no NUL byte"),
        (b'{"a": ' + DEEP, '\'{"a": [[[', "nest at most 100 levels deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "Exceeds the limit", "be one whole JSON object"),
        (b"\x1b[2J\x07", r"'\x1b[2J\x07'", "be one whole JSON object"),
    ],
)
def test_bad_jsonl_rows(line: bytes, found: str, expected: str, tmp_path: Path) -> None:
    _, bad, after = jsonl(tmp_path, b'{"text": "ok"}\n' + line + b'\n{"text": "on"}\n')
    assert isinstance(bad, BadRow)
    assert isinstance(after, RawRow)
    assert bad.source.line == 2
    assert found in bad.found
    assert expected in bad.expected
    assert len(bad.found) < 250
    assert bad.found.isprintable()


def test_lines_that_end_in_cr_alone_are_named(tmp_path: Path) -> None:
    (bad,) = jsonl(tmp_path, b'{"text": "a"}\r{"text": "b"}\r')
    assert isinstance(bad, BadRow)
    assert bad.advice == "A file whose lines end in CR alone is saved again with LF."


def test_the_byte_offset_counts_the_bom(tmp_path: Path) -> None:
    (bad,) = jsonl(tmp_path, b"\xef\xbb\xbf\xff")
    assert isinstance(bad, BadRow)
    assert bad.found == "byte 0xff at byte 3"


def test_very_long_lines_are_read(tmp_path: Path) -> None:
    text = "x" * 5_000_000
    (row,) = jsonl(tmp_path, json.dumps({"text": text}).encode())
    assert isinstance(row, RawRow)
    assert row.columns["text"] == text
    (cell,) = csv(tmp_path, f"text\n{text}\n".encode())
    assert isinstance(cell, RawRow)
    assert cell.columns["text"] == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1}, {"a": ', "must be whole JSON; got Expecting value"),
        (b'[{"a": 1}] x', "must be whole JSON; got Extra data"),
        (b'"text"', "must be an array of rows, or an object with one; got 'text'"),
        (b'{"columns": ["a"], "index": [0], "data": [["b"]]}', "with orient='split'. Write them"),
        (b'{"0": {"a": "b"}, "1": {"a": "c"}}', "got columns 0, 1, as pandas writes them with or"),
        (b'{"train": [], "test": []}', "must hold one list of rows; got lists under columns train"),
        (DEEP, "must nest at most 100 levels deep"),
        (b'[\n{"a": "\xff"}]', "a.json:2: the file must be UTF-8; got byte 0xff at byte 9"),
        (b"[\0]", "a.json:1: the file must hold no NUL byte"),
        (b"\xff\xfe[\0", "must be UTF-8; got a UTF-16 file"),
    ],
)
def test_bad_json_files(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        json_file(tmp_path, content)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_json_rows_count_along_the_list(tmp_path: Path) -> None:
    rows = json_file(tmp_path, b'{"train": [{"a": 1}, 7,\n {"a": 1, "a": 2}, {"a": 3}]}')
    assert [row.source.line for row in rows] == [1, 2, 3, 4]
    assert [isinstance(row, BadRow) for row in rows] == [False, True, True, False]


@pytest.mark.parametrize(
    "row", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}, {"prompt": ["x"]}]
)
def test_a_json_file_may_be_one_row(row: dict[str, object], tmp_path: Path) -> None:
    (found,) = json_file(tmp_path, json.dumps(row).encode())
    assert isinstance(found, RawRow)
    assert found.columns == row


@pytest.mark.parametrize(
    ("content", "place", "found", "expected"),
    [
        (b"a,b\n1,2\n3\n4,5\n", 3, "1 cells", "have 2 cells"),
        (b"a,b\n1,2\n3,4,5\n6,7\n", 3, "3 cells", "have 2 cells"),
        (b'a,b\n1,2\n"3" x,4\n5,6\n', 3, "expected after", "closed quotes"),
        (b'a,b\n"1\n1",2\n\xff,4\n5,6\n', 4, "byte 0xff at byte 12", "be UTF-8"),
        (b"a,b\n1,2\n3,\0\n5,6\n", 3, "a NUL byte at byte 10", "hold no NUL byte"),
    ],
)
def test_wrong_rows_of_a_csv_file_are_told(
    content: bytes, place: int, found: str, expected: str, tmp_path: Path
) -> None:
    first, bad, after = csv(tmp_path, content)
    assert isinstance(bad, BadRow)
    assert isinstance(first, RawRow)
    assert isinstance(after, RawRow)
    assert bad.source.line == place
    assert found in bad.found
    assert expected in bad.expected


def test_an_open_quote_swallows_the_rest_and_is_told(tmp_path: Path) -> None:
    first, bad = csv(tmp_path, b'a,b\n1,2\n3,"4\n5,6\n')
    assert isinstance(first, RawRow)
    assert isinstance(bad, BadRow)
    assert bad.source.line == 3
    assert "unexpected end of data" in bad.found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"a,b\n', "must begin with column names; got unexpected end of data"),
        (b"a,b\r1,2\r", "must have lines that end in LF or CRLF; got CR alone"),
        (b"a,\xff\n1,2\n", "a.csv:1: column names must be UTF-8; got byte 0xff at byte 2"),
        (b"a,a\n1,2\n", "column names must be different and not blank; got columns a, a"),
        (b"a,\n1,2\n", "column names must be different and not blank"),
        (b"a, b,c\n1, 2,3\n", "must not begin or end with white space; got columns ' b'. Remove"),
    ],
)
def test_bad_csv_headers(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        csv(tmp_path, content)
    assert message in str(error.value)


def test_the_index_that_pandas_writes_is_a_column(tmp_path: Path) -> None:
    (row,) = csv(tmp_path, b",prompt\n0,Hi\n")
    assert isinstance(row, RawRow)
    assert row.columns == {"Unnamed: 0": "0", "prompt": "Hi"}
    for header in (b",a,\n", b",Unnamed: 0\n"):
        with pytest.raises(DataError, match="column names must be different and not blank"):
            csv(tmp_path, header + b"1,2,3\n")


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": {"0": "a", "1": "b"}, "answer": {"0": 1, "1": 2}},
        {"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"]},
    ],
)
def test_a_table_by_its_columns_is_refused_with_the_way_out(value: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must hold its data row by row; .* to_json.path, orient="):
        json_file(tmp_path, json.dumps(value).encode())


@pytest.mark.parametrize("line", [b"[", b"{", b'[{"text": "a"}]'])
def test_json_that_is_no_row_per_line_is_told_its_name(line: bytes, tmp_path: Path) -> None:
    (bad,) = jsonl(tmp_path, line)
    assert isinstance(bad, BadRow)
    assert bad.advice.startswith("A file that is one JSON array is named .json; ")


def test_csv_places_are_those_of_the_file(tmp_path: Path) -> None:
    rows = csv(tmp_path, b'a,b\r\n"1\r\nx",2\r\n\r\n3,4\r\n')
    assert [row.source.line for row in rows] == [2, 5]
    assert isinstance(rows[0], RawRow)
    assert rows[0].columns == {"a": "1\nx", "b": "2"}


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match="must be a whole Parquet file; got"):
        list(read_parquet(tmp_path / "a.parquet", "a", ignore))


def test_a_cut_gzip_file_is_refused_after_its_whole_lines(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": str(i) * 50}).encode() + b"\n" for i in range(2000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-3000])
    with pytest.raises(DataError, match=r"must be a whole gzip file; got .* after line \d{3}"):
        list(read_jsonl(tmp_path / "a.jsonl.gz", "a", ignore))


def test_nesting_has_one_limit_whatever_python_allows(tmp_path: Path) -> None:
    rows = jsonl(
        tmp_path, b"".join(b'{"a": ' + b"[" * n + b"]" * n + b"}\n" for n in (99, 100, 600))
    )
    assert [isinstance(row, BadRow) for row in rows] == [False, True, True]


def test_parquet_rows_that_python_cannot_take(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    cells = arrow.array([b"fine", b"\xff\xfe", b"too"], arrow.binary())
    text = arrow.StringArray.from_buffers(3, *cells.buffers()[1:])
    days = arrow.array([0, 0, 2**30], arrow.date32())
    parquet.write_table(arrow.table({"text": text, "day": days}), tmp_path / "a.parquet")
    first, second, third = read_parquet(tmp_path / "a.parquet", "a", ignore)
    assert isinstance(first, RawRow)
    assert first.columns["text"] == "fine"
    for row, found in ((second, "UnicodeDecodeError"), (third, "OverflowError")):
        assert isinstance(row, BadRow)
        assert row.found.startswith(found)
        assert row.expected == "have values that Python can hold"


def test_a_parquet_file_that_unpacks_to_far_more_is_left_early(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    text = arrow.DictionaryArray.from_arrays(
        arrow.array([0] * 100_000, arrow.int32()), arrow.array(["x" * 1_000_000])
    )
    parquet.write_table(arrow.table({"text": text}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 2_000_000
    with pytest.raises(DataError, match="must unpack to at most 100 times its size"):
        list(read_parquet(tmp_path / "a.parquet", "a", ignore))


def test_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = [arrow.array(["a"]), arrow.array(["b"])]
    parquet.write_table(arrow.Table.from_arrays(columns, ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column names must be different and not blank"):
        list(read_parquet(tmp_path / "a.parquet", "a", ignore))


@pytest.mark.parametrize(
    ("mark", "name"),
    [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")],
    ids=["semi", "tab", "bar"],
)
def test_another_separator_is_named(tmp_path: Path, mark: str, name: str) -> None:
    content = f"prompt{mark}completion\n1,5{mark}x\n".encode()
    told = f"must be separated by commas; got .* separated by {name}"
    advice = r"Rename it to \.tsv" if mark == "\t" else "Save the file with commas"
    with pytest.raises(DataError, match=f"{told}. {advice}, or save its rows as"):
        csv(tmp_path, content)


def test_cells_with_tabs_between_them(tmp_path: Path) -> None:
    file = tmp_path / "a.tsv"
    rows = [['said "no", then', "a\tb\nc"], ['"quoted"', "x,y"], ["", " "]]
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv_module.writer(out, csv_module.excel_tab)
        writer.writerows([["prompt", "completion"], *rows])
        out.write("one cell\n")
    *read, bad = read_tsv(file, "a", ignore)
    assert [list(row.columns.values()) for row in read if isinstance(row, RawRow)] == rows
    assert [row.source.line for row in read] == [2, 4, 5]
    assert bad == BadRow(
        Source("a", str(file), 6), "", "1 cells", "have 2 cells, one per column name"
    )
    file.write_text("prompt,completion\n1,2\n")
    with pytest.raises(DataError, match=r"by tabs; got .* by commas\. Rename it to \.csv, or"):
        list(read_tsv(file, "a", ignore))
