"""The order of rows against a plain stream, and micro-batches against every partition."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.data.loader import BatchOrder, microbatches, permutation
from tandem.errors import ConfigError, DataError


def stream(num_rows: int, seed: int, total: int) -> list[int]:
    epochs = -(-total // num_rows)
    return [int(i) for e in range(epochs) for i in permutation(num_rows, seed, e)][:total]


@given(
    num_rows=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    epochs=st.sampled_from([0.1, 0.5, 1.0, 1.3, 3.0]),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
)
def test_batches_cut_the_stream(
    num_rows: int, batch_size: int, epochs: float, world_size: int, seed: int
) -> None:
    numbers = {"num_rows": num_rows, "batch_size": batch_size, "seed": seed, "epochs": epochs}
    order = BatchOrder(**numbers)  # type: ignore[arg-type]
    total = max(1, math.ceil(num_rows * epochs - 1e-6))
    rows = stream(num_rows, seed, total)
    expected = [rows[i : i + batch_size] for i in range(0, total, batch_size)]
    steps = list(order.from_step(0))
    assert steps == list(enumerate(expected, start=1))
    assert order.num_steps == len(expected)
    for step in range(len(expected) + 1):  # continuing is the same as never having stopped
        assert list(order.from_step(step)) == steps[step:]
    ranks = [
        list(BatchOrder(**numbers, rank=r, world_size=world_size).from_step(0))  # type: ignore[arg-type]
        for r in range(world_size)
    ]
    for i, batch in enumerate(expected):
        shares = [rank[i][1] for rank in ranks]
        assert shares == [batch[r::world_size] for r in range(world_size)]
        assert sorted(x for share in shares for x in share) == sorted(batch)


def test_every_epoch_holds_every_row_in_another_order() -> None:
    orders = [tuple(permutation(100, 7, epoch)) for epoch in range(3)]
    orders.append(tuple(permutation(100, 8, 0)))
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len(set(orders)) == 4


def test_the_order_is_the_same_everywhere() -> None:
    golden = [7, 3, 0, 1, 4, 2, 5, 6]
    assert permutation(8, 1234, 0).tolist() == golden
    code = "from tandem.data.loader import permutation; print(permutation(8, 1234, 0).tolist())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(golden)


def test_an_order_is_made_once_for_the_updates_that_read_it() -> None:
    order = permutation(30, 5, 0)
    assert permutation(30, 5, 0) is order
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 1


def test_rows_are_evenly_placed() -> None:
    # Each of 5 rows comes first in about a fifth of the epochs (sd 9 of 500).
    firsts = [int(permutation(5, 1, epoch)[0]) for epoch in range(2500)]
    assert all(abs(firsts.count(row) - 500) < 60 for row in range(5))


def test_steps_without_epochs_go_on_through_the_data() -> None:
    order = BatchOrder(num_rows=5, batch_size=4, seed=3, epochs=None, max_steps=9)
    batches = [rows for _, rows in order.from_step(0)]
    assert [len(rows) for rows in batches] == [4] * 9
    assert [i for rows in batches for i in rows] == stream(5, 3, 36)


def test_max_steps_ends_the_epochs_early() -> None:
    order = BatchOrder(num_rows=10, batch_size=4, seed=3, epochs=2, max_steps=3)
    assert order.num_steps == 3
    assert [len(rows) for _, rows in order.from_step(0)] == [4, 4, 4]
    assert BatchOrder(num_rows=10, batch_size=4, seed=3, epochs=2, max_steps=99).num_steps == 5


def test_a_share_of_an_epoch_is_counted_in_rows() -> None:
    # In floating point 0.1 * 30 is 3.0000000000000004.
    order = BatchOrder(num_rows=30, batch_size=1, seed=0, epochs=0.1 + 0.2 - 0.2)
    assert order.num_steps == 3


GOOD = {"num_rows": 3, "batch_size": 2, "seed": 0, "epochs": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, r"batch_size must be at least 1; got 0"),
        ({"seed": -1}, r"seed must be in 0 to 2\^64 - 1; got -1"),
        ({"epochs": 0.0}, r"epochs must be over 0; got 0.0"),
        ({"max_steps": -1}, r"max_steps must be at least 0; got -1"),
        ({"epochs": None}, r"max_steps must be over 0 where epochs is None; got 0"),
        ({"rank": 2, "world_size": 2}, r"rank must be in 0 to world_size - 1; got 2 of 2"),
    ],
)
def test_numbers_out_of_range(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchOrder(**{**GOOD, **change})  # type: ignore[arg-type]


def test_no_rows_and_no_such_step() -> None:
    with pytest.raises(DataError, match=r"must have a row to read; got 0"):
        BatchOrder(**{**GOOD, "num_rows": 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"step must be in 0 to 2; got 3"):
        BatchOrder(**GOOD).from_step(3)  # type: ignore[arg-type]


def fits(groups: list[list[int]], lengths: list[int], limit: int) -> bool:
    return all(len(g) == 1 or sum(lengths[i] for i in g) <= limit for g in groups)


@given(st.lists(st.integers(0, 60), max_size=60), st.integers(1, 100))
def test_microbatches_hold_every_position_once(lengths: list[int], limit: int) -> None:
    groups = microbatches(lengths, limit)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(groups)
    assert fits(groups, lengths, limit)
    flat = [lengths[i] for group in groups for i in group]
    assert flat == sorted(lengths, reverse=True)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 100))
def test_no_two_neighbours_fit_together(lengths: list[int], limit: int) -> None:
    sums = [sum(lengths[i] for i in group) for group in microbatches(lengths, limit)]
    assert all(left + right > limit for left, right in pairwise(sums))


def test_microbatches_need_room() -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_tokens must be at least 1; got 0"):
        microbatches([1], 0)


def test_epochs_are_counted_in_the_rows_that_were_read() -> None:
    """The last batch is short: 40 rows in batches of 32 are one epoch, not 1.6."""
    order = BatchOrder(num_rows=40, batch_size=32, seed=1, epochs=1.0)
    assert [order.epochs_done(step) for step in range(order.num_steps + 1)] == [0, 0.8, 1]
    assert sum(len(rows) for _, rows in order.from_step(0)) == 40
    endless = BatchOrder(num_rows=40, batch_size=32, seed=1, epochs=None, max_steps=5)
    assert endless.epochs_done(5) == 4
