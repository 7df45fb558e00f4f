"""Compact ids and marks behave as the tuples of the same."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.compact import Marks, TokenIds
from tandem.types import PromptRow, Source, TokenRow

IDS = (7, 0, 49_151, 2**31 - 1, 7)
MARKS = (False, True, True, False, True)
HERE = Source("made", "made.jsonl", 1)


@pytest.mark.parametrize(
    ("compact", "plain"), [(TokenIds(IDS), IDS), (Marks(MARKS), MARKS), (TokenIds(()), ())]
)
def test_they_are_as_the_tuple(compact: Sequence[int], plain: tuple[int, ...]) -> None:
    assert compact == plain
    assert plain == compact
    assert compact != (*plain, 1)
    assert compact != list(plain)
    assert {plain: "found"}[compact] == "found"
    assert repr(compact) == repr(plain)
    assert len(compact) == len(plain)
    assert list(reversed(compact)) == list(reversed(plain))
    for part in (slice(1, 3), slice(None, -1), slice(None, None, 2), slice(4, 1, -1)):
        assert compact[part] == plain[part]
    for place in range(-len(plain), len(plain)):
        assert compact[place] == plain[place]
        assert type(compact[place]) is type(plain[place])
        assert compact.index(plain[place]) == plain.index(plain[place])
    assert pickle.loads(pickle.dumps(compact)) == plain


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        TokenIds([2**31])
    with pytest.raises(ValueError, match="not in tuple"):
        TokenIds(IDS).index(5)
    assert TokenIds([1, 0]) != Marks([True, False]), "ids are no marks"


def test_they_are_made_of_what_is_compact_as_it_is() -> None:
    ids, marks = TokenIds(IDS), Marks(MARKS)
    assert TokenIds.of(ids) is ids
    assert TokenIds.unpacked(ids.packed) == IDS
    assert Marks.unpacked(marks.packed) == MARKS


def test_rows_keep_five_bytes_a_token() -> None:
    ids, marks = list(range(1000, 5000)), [False] * 2000 + [True] * 2000
    row = TokenRow(tuple(ids), tuple(marks), HERE)
    assert (row.token_ids, row.response_mask) == (tuple(ids), tuple(marks))
    assert row == TokenRow(TokenIds(ids), Marks(marks), HERE)
    assert hash(row) == hash(TokenRow(tuple(ids), tuple(marks), HERE))
    assert isinstance(row.token_ids, TokenIds)
    assert isinstance(row.response_mask, Marks)
    held = sum(map(sys.getsizeof, (row.token_ids.packed, row.response_mask.packed)))
    assert held < 5 * 4000 + 200
    changed = replace(row, source=Source("made", "made.jsonl", 2))
    assert changed.token_ids is row.token_ids, "nothing is packed again"
    prompt = PromptRow(tuple(ids), (), {}, HERE)
    assert isinstance(prompt.token_ids, TokenIds)
    assert prompt.token_ids == tuple(ids)
