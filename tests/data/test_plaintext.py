"""Plain text to blocks: nothing is lost, nothing is too long."""

from __future__ import annotations

import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.data.reading.plaintext import BLOCK, read_text
from tandem.data.rows import BadRow, RawRow


def blocks(path: Path) -> list[RawRow]:
    return [row for row in read_text(path, "a", lambda: None) if isinstance(row, RawRow)]


words = st.text(alphabet="ab .!\n", max_size=400)


@settings(deadline=None)  # it writes files
@given(st.lists(words | st.just("x" * 2500) | st.just("\n\n"), max_size=12))
def test_blocks_hold_all_text_in_order(tmp_path_factory: object, parts: list[str]) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"  # type: ignore[attr-defined]
    path.write_text("".join(parts))
    rows = blocks(path)
    assert all(0 < len(row.columns["text"]) <= BLOCK for row in rows)
    found = "".join("".join(row.columns["text"].split()) for row in rows)
    assert found == "".join("".join(parts).split())


def test_paragraphs_are_packed_and_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" = Title = \n \n one\ntwo \n\n" + "y" * (BLOCK - 10) + "\n")
    first, second = blocks(tmp_path / "a.txt")
    assert first.columns["text"] == "= Title =\n\none\ntwo"
    assert (first.source.line, second.source.line) == (1, 6)


def test_long_lines_are_cut_after_sentences_first(tmp_path: Path) -> None:
    sentence = "s" * 598 + ". "
    (tmp_path / "a.txt").write_text(sentence * 3 + "t" * 700 + " " + "u" * 2000)
    texts = [row.columns["text"] for row in blocks(tmp_path / "a.txt")]
    assert texts[:3] == [sentence.strip()] * 3
    assert texts[3:] == ["t" * 700, "u" * 1000, "u" * 1000]


def test_the_parts_of_a_cut_line_stay_apart(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 500 + "." + " " * 600 + "b" * 300)
    (row,) = blocks(tmp_path / "a.txt")
    assert row.columns["text"] == "a" * 500 + ". " + "b" * 300


def test_a_bad_line_is_told_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\ntwo\n")
    bad, row = read_text(tmp_path / "a.txt", "a", lambda: None)
    assert isinstance(bad, BadRow)
    assert bad.source.line == 2
    assert isinstance(row, RawRow)
    assert row.columns["text"] == "one\ntwo"


def test_wikitext_is_read_in_whole_blocks(shared: Path) -> None:
    rows = blocks(shared / "text" / "wikitext2_valid.txt.gz")
    text = "".join(row.columns["text"] for row in rows)
    assert rows[0].columns["text"].startswith("= Homarus gammarus =\n\nHomarus gammarus , known")
    assert sum(len(row.columns["text"]) for row in rows) / len(rows) > BLOCK / 2
    assert "".join(text.split()).count("<unk>") > 1000


def test_a_line_of_megabytes_is_cut_in_linear_time(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word and word, " * 1_000_000)
    start = time.process_time()
    assert sum(1 for _ in read_text(tmp_path / "a.txt", "a", lambda: None)) > 14_000
    assert time.process_time() - start < 10
