"""The account of every row: it balances, it lasts, it shows."""

from __future__ import annotations

import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tandem.data.ledger import Ledger
from tandem.data.rows import BadRow
from tandem.errors import DataError
from tandem.types import Source


def at(line: int, dataset: str = "a") -> Source:
    return Source(dataset, f"{dataset}.jsonl", line)


def bad(line: int, expected: str = "not be blank") -> BadRow:
    return BadRow(at(line), "chosen", "''", expected)


def filled() -> Ledger:
    ledger = Ledger()
    account = ledger.open("a", "a.jsonl", 2.0)
    account.rows = 10
    for _ in (1, 2, 3):
        account.use("texts", 2)
    account.use("heldout")
    account.leave("no rejected answer, in the share of pairs")
    for line in range(6, 11):
        account.bad(bad(line))
    account.note("turns left out", at(3))
    account.duplicate(at(4))
    account.shapes["preference"] += 5
    account.blank()
    return ledger


def show(table: object, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_rows_add_up_and_copies_stand_apart() -> None:
    account = filled().datasets["a"]
    assert account.balances()
    assert (account.num_used, account.unused.total(), account.num_dropped) == (4, 1, 5)
    assert account.extra_copies == {"texts": 3}
    assert account.dropped["chosen must not be blank"].first == [f"a.jsonl:{n}" for n in (6, 7, 8)]
    account.rows += 1
    assert not account.balances()


def test_a_late_drop_moves_a_row_once() -> None:
    ledger = filled()
    for _ in range(2):  # each of the row's two copies is too long
        ledger.drop(at(1), "texts", "over max_tokens")
    account = ledger.datasets["a"]
    assert account.used["texts"] == 2
    assert account.dropped["over max_tokens (texts)"].count == 1
    assert account.balances()
    again = Ledger.from_json(ledger.to_json())
    again.drop(at(1), "texts", "over max_tokens")
    again.drop(at(2), "texts", "over max_tokens")
    again.drop(at(3), "texts", "over max_tokens")
    again.drop(at(3), "texts", "over max_tokens")
    assert again.datasets["a"].used["texts"] == 0
    assert again.datasets["a"].dropped["over max_tokens (texts)"].count == 3
    assert again.datasets["a"].balances()


@given(
    st.lists(st.tuples(st.sampled_from(["texts", "pairs", "heldout"]), st.booleans()), max_size=30)
)
def test_the_balance_holds_whatever_is_dropped(rows: list[tuple[str, bool]]) -> None:
    ledger = Ledger()
    account = ledger.open("a", "a.jsonl")
    for step, _ in rows:
        account.rows += 1
        account.use(step)
    for line, (step, drop) in enumerate(rows):
        if drop:
            ledger.drop(at(line), step, "too long")
            ledger.drop(at(line), step, "too long")
    assert account.balances()
    assert account.num_dropped == sum(drop for _, drop in rows)
    assert Ledger.from_json(ledger.to_json()).to_json() == ledger.to_json()


@pytest.mark.parametrize(("dataset", "step"), [("b", "texts"), ("a", "prompts")])
def test_a_drop_of_what_was_never_used_is_refused(dataset: str, step: str) -> None:
    with pytest.raises(DataError, match=f"dropped from {step} must be one that the ledger counts"):
        filled().drop(at(1, dataset), step, "too long")


def test_json_round_trip() -> None:
    ledger = filled()
    ledger.drop(at(2), "texts", "too long")
    again = Ledger.from_json(ledger.to_json())
    assert again == ledger
    assert json.loads(ledger.to_json())["datasets"][0]["late"] == {"a.jsonl": [2]}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"datasets": [{"name": "a"}]}', '{"datasets": 3}', '{"datasets":[3]}']
)
def test_what_is_no_ledger(text: str) -> None:
    with pytest.raises(DataError, match="must be the JSON that Tandem wrote; got"):
        Ledger.from_json(text)


def test_an_unknown_entry_or_numbers_that_do_not_add_up() -> None:
    value = json.loads(filled().to_json())
    value["datasets"][0]["colour"] = "red"
    with pytest.raises(DataError, match="unknown entry colour"):
        Ledger.from_json(json.dumps(value))
    value = json.loads(filled().to_json())
    value["datasets"][0]["rows"] = 11
    with pytest.raises(DataError, match=r"ledger of 'a' must have .* got 11 = 4 \+ 1 \+ 5"):
        Ledger.from_json(json.dumps(value))


def test_names_are_their_own() -> None:
    ledger = filled()
    with pytest.raises(DataError, match="names must differ within a ledger; got 'a' twice"):
        ledger.open("a", "b.jsonl")


def test_tables_show_all_numbers_and_no_escapes() -> None:
    ledger = filled()
    other = ledger.open("[red]b\x1b[2J", "b.jsonl")
    other.rows = 2
    other.use("ptx", 3)
    other.leave("plain text, in the share of pairs")
    text = show(ledger.table())
    assert "[red]b\\x1b[2J" in text
    row = next(line for line in text.splitlines() if line.startswith("│ a "))
    assert [cell.strip() for cell in row.strip("│").split("│")][1:] == [
        *("10", "3", "0", "0", "1", "0", "1", "5")
    ]
    total = next(line for line in text.splitlines() if line.startswith("│ all "))
    assert [cell.strip() for cell in total.strip("│").split("│")][1:] == [
        *("12", "3", "0", "0", "1", "1", "2", "5")
    ]
    reasons = show(ledger.reasons())
    assert "dropped: chosen must not be blank" in reasons
    assert "a.jsonl:8" in reasons
    assert "a.jsonl:9" not in reasons
    assert "unused: plain text, in the share of pairs" in reasons
    assert re.search(r"1 │ note: turns left out +│ a\.jsonl:3 ", reasons)
    assert re.search(r"1 │ note: same turns and answers as an earlier row +│ a\.jsonl:4 ", reasons)
    old = json.loads(ledger.to_json())
    del old["datasets"][0]["noted_at"]  # an earlier version's
    assert Ledger.from_json(json.dumps(old)).datasets["a"].noted_at == {}
    for note in ("3  | note: copies by weight", "1 | note: blank lines skipped"):
        assert re.search(note.replace(" ", r"\s*").replace("|", "│"), reasons)
    assert "duplicate" not in reasons
    assert "dropped: chosen must not be blank (the first: found ''.)" in reasons


@pytest.mark.parametrize(
    ("count", "steps"),
    [(1_000_000, ("texts", "pairs", "prompts", "heldout")),
     (100_000, ("texts", "pairs", "prompts", "heldout", "ptx"))],
)  # fmt: skip
def test_eighty_columns_hold_every_head_and_number(count: int, steps: tuple[str, ...]) -> None:
    ledger = Ledger()
    for name in ("preferences_of_the_whole_house", "b"):
        account = ledger.open(name, name)
        account.rows = len(steps) * count
        account.used.update(dict.fromkeys(steps, count))
    text = show(ledger.table(), width=80)
    for head in ("read", "texts", "pairs", "prompts", "held out", "unused", "dropped"):
        assert head in text
    assert text.count(f" {count}│") == 2 * len(steps)
    assert text.count(f" {2 * count}│") == len(steps)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_ptx_column_comes_with_ptx_rows() -> None:
    assert "ptx" not in show(filled().table())
