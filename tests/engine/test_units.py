"""Micro-batches of prompts that begin alike: what they cost, and what stands together."""

from __future__ import annotations

import pytest

from tandem.engine.forward import rank_micro_batches
from tandem.engine.units import Load, Unit, balanced_units, filled
from tandem.models.beginnings import Beginning, PromptGroup, prompt_groups
from tandem.models.packed import packed_rows
from tandem.parallel.world import World
from tests.models.alike_rows import PROMPTS, beginning_batch

S, T = Beginning(0, 64), Beginning(1, 96)


def test_a_beginning_counts_once() -> None:
    load = Load([Unit([0], 100, (S,)), Unit([1], 30)])
    assert load.tokens == 130
    assert load.added(Unit([2], 100, (S,))) == 36
    assert load.added(Unit([2], 100, (S, T))) == 36
    load.add(Unit([2], 100, (S, T)))
    assert load.added(Unit([3], 106, (S, T))) == 10
    assert load.added(Unit([3], 106)) == 106


def test_what_begins_alike_stands_together() -> None:
    units = [
        Unit([0], 90),
        Unit([1], 80, (S,)),
        Unit([2], 120),
        Unit([3], 110, (S, T)),
        Unit([4], 70, (S,)),
        Unit([5], 99, (S, T)),
    ]
    # Of S: 110, then 99 - 96, 80 - 64 and 70 - 64.
    assert [[u.rows[0] for u in part] for part in filled(units, 135)] == [[2], [3, 5, 1, 4], [0]]
    assert [[u.rows[0] for u in part] for part in filled(units, 134)] == [[2], [3, 5, 1], [4], [0]]
    assert [[u.rows[0] for u in part] for part in filled(units, 9)] == [
        [2],
        [3],
        [5],
        [1],
        [4],
        [0],
    ]


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("max_tokens", [60, 75, 90, 1000])
def test_a_micro_batch_computes_what_was_counted(prompts: str, max_tokens: int) -> None:
    batch = beginning_batch(PROMPTS[prompts])
    lengths, groups = batch.lengths().tolist(), prompt_groups(batch)
    for size in (1, 2):
        seen: list[int] = []
        for units in balanced_units(lengths, max_tokens, size, groups):
            for part in filled(units, max_tokens):
                rows = [row for unit in part for row in unit.rows]
                seen += rows
                tokens = Load(part).tokens
                assert tokens <= max_tokens or len(rows) == 1
                some = batch.select(batch.token_ids.new_tensor(rows))
                made = len(packed_rows(some, some.attention_mask, shares=True).token_ids)
                # Rows of one prompt that came apart may meet again.
                assert made == tokens or (made < tokens and len(prompt_groups(some)) < len(part))
        assert sorted(seen) == list(range(len(batch)))


def test_ranks_have_equally_much_of_their_own() -> None:
    """Eight prompts of 1,000 tokens alike and 10 to 80 of their own: each rank pays for the
    beginning, and 180 tokens more."""
    begins = (Beginning(0, 1000),)
    groups = [PromptGroup([row], 1000, begins) for row in range(8)]
    lengths = [1010 + 10 * row for row in range(8)]
    shares = balanced_units(lengths, 10_000, 2, groups)
    assert [Load(units).tokens for units in shares] == [1180, 1180]
    parts = [rank_micro_batches(lengths, 1100, World(rank, 2), groups) for rank in range(2)]
    found = [[part.rows for part in rank if part.weight] for rank in parts]
    assert found == [[[7], [4, 3, 0]], [[6], [5, 2], [1]]]
