"""What a message says of values and rows that have changed."""

from __future__ import annotations

from pathlib import Path

from tandem.data.ledger import DatasetLedger, Ledger
from tandem.training.differences import difference, known_rows


def account(path: str, rows: int, fingerprint: str) -> DatasetLedger:
    return DatasetLedger(Path(path).stem, path, rows=rows, fingerprint=fingerprint)


def test_rows_are_told_by_file_and_number() -> None:
    known = {
        name: account(path, rows, name)
        for name, path, rows in (
            ("a", "x/prefs.jsonl", 300), ("b", "x/prefs.jsonl", 299),
            ("c", "x/prefs.jsonl", 300), ("d", "y/other.csv", 1),
        )
    }  # fmt: skip

    def told(before: list[str] | None, now: list[str] | None) -> str:
        return difference("the rows of data", before, now, known)

    start = "the rows of data: "
    assert told(["d", "a"], ["d", "b"]) == (
        f"{start}prefs.jsonl has changed (300 rows before, 299 now)"
    )
    assert told(["a"], ["c"]).startswith(f"{start}prefs.jsonl has changed (300 rows as before, ")
    assert told(["a"], ["d"]) == f"{start}prefs.jsonl (300 rows) before, other.csv (1 row) now"
    assert told(["unknown"], ["a"]) == f"{start}prefs.jsonl has changed"
    assert told(None, ["a"]) == f"{start}0 data sets before, 1 data set now"


def test_the_accounts_are_those_recorded_and_those_of_now(tmp_path: Path) -> None:
    now = Ledger({"b": account("b.jsonl", 2, "new")})
    assert list(known_rows(tmp_path / "data.json", now)) == ["new"]
    old = Ledger({"a": DatasetLedger("a", "a.jsonl", fingerprint="old")})
    (tmp_path / "data.json").write_text(old.to_json())
    assert list(known_rows(tmp_path / "data.json", now)) == ["old", "new"]
    (tmp_path / "data.json").write_text("{}")
    assert list(known_rows(tmp_path / "data.json", now)) == ["new"]


def test_values_are_whole_or_cut_to_what_differs() -> None:
    assert difference("seed", 1, 2) == "seed 1 -> 2"
    before = ["wrong.jsonl::prompt=question_text,chosen=the_better_answer,rejected=the_other"]
    now = [before[0].replace("prompt=q", "promt=q")]
    assert difference("data", before, now) == (
        'data ["wrong.jsonl::prompt=question_text,chos... -> '
        '["wrong.jsonl::promt=question_text,chos...'
    )
    long = "a" * 500
    text = difference("x", long + "1" + long, long + "2" + long)
    assert text == f"x ...{'a' * 20}1{'a' * 20}... -> ...{'a' * 20}2{'a' * 20}..."
    text = difference("x", long, long + "b" * 500)
    assert text == f'x ...{"a" * 20}" -> ...{"a" * 20}{"b" * 80}...'
