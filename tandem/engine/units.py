"""Which rows stay together in micro-batches, and what micro-batches then cost.

A unit is a row, or rows of one prompt, which counts once. What the prompts of several units begin
with alike (`models.beginnings`) counts once in each micro-batch that holds any of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.data.loader import microbatches
from tandem.models.beginnings import Beginning, PromptGroup


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that stay together; their tokens, a prompt that they share once; and what that has in
    common with those of other units."""

    rows: list[int]
    tokens: int
    beginnings: tuple[Beginning, ...] = ()

    @property
    def own(self) -> int:
        """The tokens that no other unit has."""
        return self.tokens - (self.beginnings[-1].end if self.beginnings else 0)


class Load:
    """Units that are computed together; `tokens` counts what they begin with alike once."""

    def __init__(self, units: Iterable[Unit] = ()) -> None:
        self.tokens = 0
        self._known: set[int] = set()
        for unit in units:
            self.add(unit)

    def added(self, unit: Unit) -> int:
        """The tokens that a unit would add."""
        known = [part.end for part in unit.beginnings if part.number in self._known]
        return unit.tokens - (known[-1] if known else 0)

    def add(self, unit: Unit) -> None:
        """Take it in."""
        self.tokens += self.added(unit)
        self._known.update(part.number for part in unit.beginnings)


def balanced(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The rows of each rank, in O(rows log ranks): the longest row that is left goes to the first
    rank with the fewest tokens.

    Args:
        lengths: tokens of each row.
    """
    rows_of: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]  # sorted, so a heap
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        load, rank = loads[0]
        rows_of[rank].append(row)
        heapq.heapreplace(loads, (load + lengths[row], rank))
    return rows_of


def balanced_units(
    lengths: Sequence[int], max_tokens: int, num_ranks: int, groups: Sequence[PromptGroup]
) -> list[list[Unit]]:
    """What stays together on each rank.

    Large groups leave ranks with less work than others and small ones repeat prompts: of a few
    sizes, the one whose busiest rank has the fewest tokens.
    """
    alone = [Unit([row], length) for row, length in enumerate(lengths)]
    choices = [alone]
    if any(len(group.rows) > 1 or group.beginnings for group in groups):
        units = _units(lengths, groups, max_tokens)
        choices = [units]
        if num_ranks > 1:
            share = -(-Load(units).tokens // num_ranks)
            choices += [_units(lengths, groups, min(max_tokens, share // n)) for n in (1, 2, 4)]
            choices.append(alone)
    best: tuple[int, list[list[Unit]]] | None = None
    for units in choices:
        # What units have in common hardly counts where a rank has many of them.
        both = (tuple(unit.tokens for unit in units), tuple(unit.own for unit in units))
        for sizes in dict.fromkeys(both):
            shares = [[units[i] for i in mine] for mine in balanced(sizes, num_ranks)]
            busiest = max(Load(mine).tokens for mine in shares)
            if best is None or busiest < best[0]:
                best = busiest, shares
    assert best is not None
    return best[1]


def filled(units: Sequence[Unit], max_tokens: int) -> list[list[Unit]]:
    """As `microbatches`, of units: those that begin alike one behind the other."""
    if not any(unit.beginnings for unit in units):
        parts = microbatches([unit.tokens for unit in units], max_tokens)
        return [[units[i] for i in part] for part in parts]
    longest: dict[int, int] = {}
    for unit in units:
        for part in unit.beginnings:
            longest[part.number] = max(longest.get(part.number, 0), unit.tokens)

    def place(i: int) -> list[tuple[int, int]]:
        around = [(-longest[part.number], part.number) for part in units[i].beginnings]
        return [*around, (-units[i].tokens, i)]

    found: list[list[Unit]] = []
    load = Load()
    for i in sorted(range(len(units)), key=place):
        if not found or load.tokens + load.added(units[i]) > max_tokens:
            found.append([])
            load = Load()
        found[-1].append(units[i])
        load.add(units[i])
    return found


def _units(lengths: Sequence[int], groups: Sequence[PromptGroup], max_tokens: int) -> list[Unit]:
    """Groups cut so that each part has at most `max_tokens`, or one row."""
    units: list[Unit] = []
    for group in groups:
        room, shared = 0, group.prompt_tokens
        for row in group.rows:
            own = lengths[row] - shared
            if row == group.rows[0] or own > room:
                units.append(Unit([], shared, group.beginnings))
                room = max_tokens - shared
            part = units[-1]
            units[-1] = Unit([*part.rows, row], part.tokens + own, part.beginnings)
            room -= own
    return units
