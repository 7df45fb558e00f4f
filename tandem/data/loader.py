"""The order in which rows are read, and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

from tandem.errors import ConfigError, DataError

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """The rows of every optimizer step, a pure function of these numbers.

    The stream of rows is one permutation per epoch, drawn from (seed, epoch). Step k reads the k-th
    `batch_size` rows of it, across epochs; only the very last batch may be short, and no row is
    skipped.

    Args:
        num_rows: rows to choose from.
        batch_size: rows per step, over all ranks.
        seed: 0 to 2^64 - 1.
        epochs: passes over the rows; a fraction is rounded up to whole rows; None: until max_steps.
        max_steps: at most this many steps; 0: as `epochs` says.
        rank, world_size: this process takes every world_size-th row of each batch, from the
            rank-th on. In a short batch that may be none.
    Raises:
        DataError: there are no rows.
        ConfigError: a number is out of its range.
    """

    num_rows: int
    batch_size: int
    seed: int
    epochs: float | None
    max_steps: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise DataError(
                f"a data set must have a row to read; got {self.num_rows}. "
                "See the data ledger for what was dropped."
            )
        rules = [
            (self.batch_size >= 1, f"batch_size must be at least 1; got {self.batch_size}"),
            (0 <= self.seed < 2**64, f"seed must be in 0 to 2^64 - 1; got {self.seed}"),
            (self.epochs is None or self.epochs > 0, f"epochs must be over 0; got {self.epochs}"),
            (self.max_steps >= 0, f"max_steps must be at least 0; got {self.max_steps}"),
            (
                self.epochs is not None or self.max_steps > 0,
                f"max_steps must be over 0 where epochs is None; got {self.max_steps}",
            ),
            (
                0 <= self.rank < self.world_size,
                f"rank must be in 0 to world_size - 1; got {self.rank} of {self.world_size}",
            ),
        ]
        for holds, message in rules:
            if not holds:
                raise ConfigError(f"{message}. Correct that number.")

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        if self.epochs is None:
            return self.max_steps
        steps = -(-self._rows_to_read // self.batch_size)
        return min(steps, self.max_steps) if self.max_steps else steps

    def epochs_done(self, step: int) -> float:
        """Passes over the rows after `step` steps."""
        return self._rows_before(step) / self.num_rows

    def from_step(self, step: int) -> Iterator[tuple[int, list[int]]]:
        """(k, this rank's rows of step k) for k = step + 1 to num_steps; nothing is replayed.

        Args:
            step: steps already done.
        Raises:
            ConfigError: `step` is out of range.
        """
        if not 0 <= step <= self.num_steps:
            raise ConfigError(
                f"step must be in 0 to {self.num_steps}; got {step}. "
                "Continue with the data and the batch size that the run began with."
            )
        return self._batches(step)

    @property
    def _rows_to_read(self) -> int:
        assert self.epochs is not None
        # 0.1 * 30 is a little over 3 in floating point, which must not become a fourth row.
        return max(1, math.ceil(round(self.epochs * self.num_rows, 6)))

    def _rows_before(self, step: int) -> int:
        """Rows of the stream that the first `step` steps read."""
        rows = step * self.batch_size
        return rows if self.epochs is None else min(rows, self._rows_to_read)

    def _batches(self, step: int) -> Iterator[tuple[int, list[int]]]:
        epoch, order = -1, np.empty(0, dtype=np.int64)
        for k in range(step, self.num_steps):
            begin, end = self._rows_before(k), self._rows_before(k + 1)
            rows: list[int] = []
            while begin < end:
                if begin // self.num_rows != epoch:
                    epoch = begin // self.num_rows
                    order = permutation(self.num_rows, self.seed, epoch)
                offset = begin - epoch * self.num_rows
                taken = order[offset : offset + end - begin]
                rows += taken.tolist()
                begin += len(taken)
            yield k + 1, rows[self.rank :: self.world_size]


def evenly(items: Sequence[Item], number: int) -> list[Item]:
    """At most `number` of the items, evenly spaced over all of them."""
    taken = min(len(items), number)
    return [items[place * len(items) // taken] for place in range(taken)]


@lru_cache(maxsize=2)  # of a million rows it takes a third of a second
def permutation(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """(num_rows,) int64: the order of rows in one epoch; not to be written to.

    Sorted by the raw words of the Philox counter generator, which numpy keeps stable over
    versions (it does not promise that for `Generator.permutation`).
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    order = np.argsort(Philox(key=key).random_raw(num_rows), kind="stable")
    order.setflags(write=False)
    return order


def microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Positions of a batch in groups of at most `max_tokens` tokens, similar lengths together.

    Args:
        lengths: tokens per row.
        max_tokens: most tokens of a group; a longer row is a group of its own.
    Returns:
        Every position once, longest rows first, so that a lack of memory shows at once.
    Raises:
        ConfigError: max_tokens is under 1.
    """
    if max_tokens < 1:
        raise ConfigError(
            f"micro_batch_tokens must be at least 1; got {max_tokens}. Raise micro_batch_tokens."
        )
    groups: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[i] > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(i)
        room -= lengths[i]
    return groups
