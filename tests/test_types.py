"""Batches of rows: padding, masks, and rows that are refused."""

from __future__ import annotations

import pytest

from tandem.errors import ShapeError
from tandem.types import Source, TokenBatch, TokenRow


def row(ids: tuple[int, ...], mask: tuple[bool, ...], line: int = 1) -> TokenRow:
    return TokenRow(ids, mask, Source("made", "made.jsonl", line))


def test_rows_are_padded_on_the_right_to_the_longest() -> None:
    batch = TokenBatch.from_rows(
        [row((5, 6), (False, True)), row((), ()), row((7, 8, 9), (False, True, False))], 4
    )
    assert batch.token_ids.tolist() == [[5, 6, 4], [4, 4, 4], [7, 8, 9]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert batch.response_mask.int().tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]
    assert TokenBatch.from_rows([], 4).token_ids.shape == (0, 0)


def test_a_row_with_another_number_of_marks_than_ids_is_refused() -> None:
    # Together they have as many marks as ids.
    rows = [row((1, 2, 3), (False, True)), row((4, 5), (False, True, True), 17)]
    with pytest.raises(ShapeError, match=r"a mark for each of 3 ids; got 2"):
        TokenBatch.from_rows(rows, 0)
    with pytest.raises(ShapeError, match=r"made\.jsonl:17.*a mark for each of 2 ids; got 3"):
        TokenBatch.from_rows(rows[1:], 0)
