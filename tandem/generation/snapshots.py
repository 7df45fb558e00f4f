"""Snapshots: copies of sequences' states at the ends of known blocks, where layers keep states.

Keys and values in a block serve every sequence that begins with its tokens. A state serves only
sequences that go on from the token behind which it was copied, so a prompt begins at the last of
its known blocks (`prefixes`) that has a snapshot, with a copy of that. Snapshots are left where
prompts were seen to part, at the last whole blocks of prompts that a conversation repeats, and
behind its answers: while one grows, its *trail* is the state at the last block's end that it has
passed. They are in slots of KV memory beside those of sequences. The one that was used longest ago
goes first, and each goes when its block is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedModel

from tandem.generation.blocks import BlockPool, affordable_slots, state_bytes
from tandem.models.twin import decodes, kv_shapes, twin_of
from tandem.ops.sizes import SNAPSHOT_SLOTS


class Stop(NamedTuple):
    """Where a prompt's run leaves a snapshot: behind `end` tokens, in `slot`, for `block`."""

    end: int
    slot: int
    block: int


class Snapshots:
    """Which slots hold snapshots, of which blocks.

    A slot has a holder for being known, and one more each for being written and for every sequence
    that is yet to copy it; it is free when it has none.
    """

    def __init__(self, slots: BlockPool, most: int) -> None:
        """None yet; never more than `most` of the slots, which sequences leave alone."""
        self._slots, self._most = slots, most
        self._known: OrderedDict[int, int] = OrderedDict()  # block to slot; oldest use first
        self._used = self._trails = 0

    @property
    def num_known(self) -> int:
        """Blocks that have one."""
        return len(self._known)

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self._used

    @property
    def can_take(self) -> bool:
        """Whether `take` finds a slot."""
        return self._used < self._most or self._oldest() is not None

    def reach(self, blocks: Sequence[int]) -> int:
        """How many of a sequence's first blocks there are up to the last that has one."""
        for count in range(len(blocks), 0, -1):
            if blocks[count - 1] in self._known:
                return count
        return 0

    def has(self, block: int) -> bool:
        """Whether a block has one, or will before any later prompt runs."""
        return block in self._known

    def hold(self, block: int) -> int:
        """The slot of a block's snapshot, which stays as it is until `release`."""
        self._known.move_to_end(block)
        slot = self._known[block]
        self._slots.share((slot,))
        return slot

    def take(self) -> int:
        """Hold a slot to write to; -1 if all are held by others."""
        if self._used >= self._most:
            oldest = self._oldest()
            if oldest is None:
                return -1
            self.forget(oldest)
        self._used += 1
        return self._slots.take(1)[0]

    def know(self, block: int, slot: int) -> None:
        """A held slot has, or will have before any later prompt runs, a known block's snapshot."""
        if block in self._known:  # of the same tokens
            self._known.move_to_end(block)
            return
        self._known[block] = slot
        self._slots.share((slot,))

    def release(self, slot: int) -> None:
        """One holder less."""
        self._slots.release((slot,))
        self._used -= self._slots.holders(slot) == 0

    def forget(self, block: int) -> None:
        """A block's snapshot can be found no longer."""
        slot = self._known.pop(block, -1)
        if slot >= 0:
            self.release(slot)

    def is_awaited(self, stop: Stop) -> bool:
        """Whether a sequence is to begin with what this stop leaves."""
        return self._slots.holders(stop.slot) > 1 + (self._known.get(stop.block) == stop.slot)

    def give_up(self, stop: Stop) -> None:
        """The stop will not be reached."""
        if self._known.get(stop.block) == stop.slot:
            self.forget(stop.block)
        self.release(stop.slot)

    def begin_trail(self) -> int:
        """As `take`, for a live answer, which all together have at most half of the slots."""
        if 2 * (self._trails + 1) > self._most:
            return -1
        slot = self.take()
        self._trails += slot >= 0
        return slot

    def end_trail(self, slot: int) -> None:
        """As `release`."""
        self._trails -= 1
        self.release(slot)

    def _oldest(self) -> int | None:
        """The block of the snapshot that goes next: none that is yet to be written or copied."""
        free = (block for block, slot in self._known.items() if self._slots.holders(slot) == 1)
        return next(free, None)


def spare_slots(
    model: PreTrainedModel,
    rows: int,
    *,
    parting: int = SNAPSHOT_SLOTS,
    keeps_answers: bool = False,
    free: int | None = None,
) -> int:
    """Slots for snapshots beside the states of `rows` sequences: as many as are of use, if the half
    of KV memory that states may take has room for them, but one at least if any is of use.

    Args:
        parting: places where prompts that are known so far can part at the most.
        keeps_answers: later prompts may begin with an answer: two more for each row, one while the
            answer grows and one that stays.
        free: bytes that are free; measured if None.
    """
    each = state_bytes(kv_shapes(model), twin_of(model).dtype) if decodes(model) else 0
    if not each:
        return 0
    few = min(SNAPSHOT_SLOTS, rows) if keeps_answers else min(SNAPSHOT_SLOTS, rows, parting)
    wanted = few + (2 * rows if keeps_answers else 0)
    if not wanted:
        return 0
    return max(1, affordable_slots(rows + wanted, each, model.device, free) - rows)
