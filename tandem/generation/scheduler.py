"""Which answers run and which wait: rows, blocks of memory and prompts that are shared.

Prompts enter in the order they came in, so one that does not fit is never passed over for ever.
The samples of a prompt share the blocks that it fills whole; of its last, partly filled block each
sample has a copy, but the last sample to enter takes the block itself. Prompts that begin alike
share the blocks of their beginning (`prefixes`), which the first of them computes; where layers
keep states, so far as a snapshot of them is there or will be (`snapshots`).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.errors import GenerationError
from tandem.generation.blocks import BlockPool, blocks_for, blocks_needed
from tandem.generation.prefixes import PrefixPool
from tandem.generation.request import Group, Request
from tandem.generation.snapshots import Snapshots, Stop
from tandem.ops.attention_context import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A request that comes in once its prompt has been run; then a block is copied (from, to), and
    the prompt's states to its own slot, if that is another."""

    request: Request
    group: Group
    copy: tuple[int, int] | None

    @property
    def copied_state(self) -> tuple[int, int] | None:
        """Slots, from and to."""
        source, target = self.group.state, self.request.state
        return None if source == target else (source, target)


@dataclass(frozen=True, slots=True)
class Entering:
    """What comes in now: prompts to run, and requests."""

    prompts: list[Group]
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class _Beginning:
    """What a prompt begins with. known: blocks of its tokens. shared: how many of them it begins
    behind, all but where layers keep states. leaves: who is to leave a snapshot there; None: it is
    there, or none is needed."""

    known: list[int]
    shared: int
    leaves: Group | None = None

    @property
    def blocks(self) -> list[int]:
        """Those that it begins behind."""
        return self.known[: self.shared]


@dataclass(slots=True)
class PrefixCounts:
    """Tokens of prompts that were let in, and how many of them were in memory already."""

    prompt_tokens: int = 0
    shared_tokens: int = 0


class Scheduler:
    """The queue, and the blocks that it hands out."""

    def __init__(
        self,
        pool: PrefixPool,
        slots: int,
        *,
        refill: int,
        shares_prefixes: bool = True,
        states: BlockPool | None = None,
        leaves_ends: bool = False,
    ) -> None:
        """An empty queue.

        Args:
            slots: most rows side by side.
            refill: rows that must be free before some are filled while others run.
            shares_prefixes: prompts that begin alike share blocks.
            states: slots for the states that layers keep of each sequence, `state_slots`, of which
                those of the pool's snapshots are; None: no layer keeps any.
            leaves_ends: a prompt's last whole block gets a snapshot: it is likely to come again.
        """
        self.pool = pool
        self._states = states
        self._leaves_ends = leaves_ends
        self.counts = PrefixCounts()
        self._shares_prefixes = shares_prefixes
        self._slots, self._refill = slots, refill
        self._queue: deque[Group] = deque()
        self._is_stuck = False  # nothing can come in before an answer ends or a request comes
        self.num_waiting = 0

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the samples of one prompt.

        Raises:
            GenerationError: one alone needs more blocks than there are.
        """
        prompt = requests[0].prompt
        needed = blocks_needed(len(prompt), max(r.limit for r in requests), len(requests))
        if needed > self.pool.num_blocks:
            raise GenerationError(
                f"KV memory must hold a prompt of {len(prompt)} tokens and its answer, {needed} "
                f"blocks of {BLOCK_TOKENS}; got {self.pool.num_blocks} blocks. Lower "
                "sampling.max_new_tokens or dataset.max_prompt_tokens."
            )
        self._queue.append(Group(prompt, deque(requests)))
        self._is_stuck = False
        self.num_waiting += len(requests)

    def admit(self, num_live: int, running: Iterable[Group] = ()) -> Entering | None:
        """Take blocks for all that can come in now; None if nothing can.

        Args:
            num_live: requests that have come in, and prompts that only run to their ends.
            running: prompts that came in before and have not been run to their ends.
        """
        room = self._slots - num_live
        if not self._queue or num_live > self.rows_that_let_in:
            return None
        entering = Entering([], [])
        self._is_stuck = True
        while self._queue and room:
            group = self._queue[0]
            if not group.blocks:
                found = self._beginning(group.prompt, [*running, *entering.prompts])
                if not self._fits_with_prompt(group, found.blocks):
                    break
                self._begin(group, found)
                entering.prompts.append(group)
            while group.waiting and room and self._own_blocks(group) <= self.pool.num_free:
                entering.entries.append(self._enter(group))
                room -= 1
            if group.waiting:
                break
            self._queue.popleft()
        return entering if entering.entries else None

    @property
    def rows_that_let_in(self) -> int:
        """How few rows may be live for others to come in beside them; 0 if none wait."""
        return max(0, self._slots - min(self._refill, self.num_waiting)) if self._queue else 0

    def may_admit(self, num_live: int) -> bool:
        """Whether `admit` is worth asking: false if it was, and nobody has left since."""
        return bool(self._queue) and not self._is_stuck and num_live <= self.rows_that_let_in

    def leave(self, request: Request, answer: Sequence[int] | None = None) -> None:
        """A request that was admitted gives its blocks back.

        Args:
            answer: its tokens whose keys and values are in memory, for sequences that begin with
                prompt and answer; None: nobody will ask for them.
        """
        if answer is not None and request.blocks and request.epoch == self.pool.epoch:
            tokens = (*request.prompt, *answer)
            known = self.pool.keep(tokens, request.blocks)
            if 0 < request.trail_tokens <= len(tokens) and self.pool.snapshots is not None:
                block = known[request.trail_tokens // BLOCK_TOKENS - 1]
                self.pool.snapshots.know(block, request.trail)
        self.pool.release(request.blocks)
        request.blocks = []
        self._release_state(request.state)
        if request.trail >= 0 and self.pool.snapshots is not None:
            self.pool.snapshots.end_trail(request.trail)
        request.state, request.trail, request.trail_tokens = -1, -1, 0
        self._is_stuck = False

    def drop(self, group: Group, requests: Sequence[Request], *, is_ending: bool) -> bool:
        """Forget a prompt that is being run, and its requests, none of which waits, unless others
        need what it computes.

        Args:
            is_ending: `withdraw` has returned it; `end` it then.
        Returns:
            whether it has been done.
        """
        if self.pool.has_others(group.blocks[group.found :], len(requests) + is_ending):
            return False
        snapshots = self.pool.snapshots
        if snapshots is not None:
            if any(snapshots.is_awaited(stop) for stop in group.stops):
                return False
            for stop in group.stops:
                snapshots.give_up(stop)
            if group.source >= 0:
                snapshots.release(group.source)
            group.source, group.stops = -1, []
        self.pool.forget(group.blocks[group.computed // BLOCK_TOKENS :])
        for request in requests:
            self.leave(request)
        return True

    def withdraw(self, request: Request) -> Group | None:
        """Forget a request that waits.

        Returns:
            Its group, if the prompt was let in and no other sample waits: `end` it as soon as
            those that came in have begun, which need what it leaves in its blocks and slot.
        """
        self._is_stuck = False
        for group in self._queue:
            if request in group.waiting:
                group.waiting.remove(request)
                self.num_waiting -= 1
                if not group.waiting:
                    self._queue.remove(group)
                    return group if group.blocks else None
                break
        return None

    def end(self, group: Group) -> None:
        """A prompt of which no sample is to come in any more gives back what is its own."""
        self.pool.release(group.blocks)
        self._release_state(group.state)
        self._is_stuck = False

    def _fits_with_prompt(self, group: Group, found: Sequence[int]) -> bool:
        needed = blocks_needed(len(group.prompt), group.waiting[0].limit, len(group.waiting))
        held_by_others = len(found) - self.pool.num_idle(found)
        return needed - held_by_others <= self.pool.num_free

    def _beginning(self, prompt: Sequence[int], running: Sequence[Group]) -> _Beginning:
        """Where a prompt can begin; `running`: those that have not been run to their ends."""
        known = self.pool.find(prompt) if self._shares_prefixes else []
        snapshots = self.pool.snapshots
        if snapshots is None:
            return _Beginning(known, len(known))
        reach = snapshots.reach(known)
        if reach < len(known) and snapshots.can_take:
            end = len(known) * BLOCK_TOKENS
            for group in running:
                if group.computed < end and group.prompt[:end] == prompt[:end]:
                    return _Beginning(known, len(known), group)
        return _Beginning(known, reach)

    def _begin(self, group: Group, found: _Beginning) -> None:
        """Blocks for a prompt that begins so."""
        length = len(group.prompt)
        shared, again = found.blocks, found.known[found.shared :]
        self.pool.share(shared)
        # Blocks that are known and run again get what they hold; so nobody else may hold them.
        again = [block if self.pool.num_idle([block]) else -1 for block in again]
        self.pool.share(block for block in again if block >= 0)
        rest = blocks_for(length) - len(found.known)
        own = iter(self.pool.take(again.count(-1) + rest))
        group.blocks = [*shared, *(next(own) if block < 0 else block for block in again), *own]
        group.found, group.computed = len(shared), len(shared) * BLOCK_TOKENS
        group.epoch = self.pool.epoch
        group.state = self._taken()
        self.counts.prompt_tokens += length
        self.counts.shared_tokens += group.computed
        if self._shares_prefixes:  # those behind it run later, or in the same forward
            known = self.pool.keep(group.prompt, group.blocks)
            if self.pool.snapshots is not None:
                self._begin_states(group, found, known, self.pool.snapshots)

    def _begin_states(
        self, group: Group, found: _Beginning, known: Sequence[int], snapshots: Snapshots
    ) -> None:
        """The snapshot that a prompt begins with, and those that its run leaves at the ends of some
        of its known blocks: where it parts from others, and where it ends."""
        if found.leaves is not None:
            self._leave(found.leaves, found.shared, known, snapshots)
        if found.shared:
            group.source = snapshots.hold(known[found.shared - 1])
        for blocks in (len(found.known), len(known) if self._leaves_ends else 0):
            if blocks > found.shared:
                self._leave(group, blocks, known, snapshots)

    def _leave(self, group: Group, blocks: int, known: Sequence[int], snapshots: Snapshots) -> None:
        """A prompt's run is to leave a snapshot behind these known blocks, if a slot is free."""
        block = known[blocks - 1]
        if not snapshots.has(block) and (slot := snapshots.take()) >= 0:
            snapshots.know(block, slot)
            insort(group.stops, Stop(blocks * BLOCK_TOKENS, slot, block))

    def _own_blocks(self, group: Group) -> int:
        """Blocks that the group's next sample needs besides the prompt's."""
        length = len(group.prompt)
        whole = blocks_for(length + group.waiting[0].limit)
        takes_over = len(group.waiting) == 1
        return whole - (blocks_for(length) if takes_over else length // BLOCK_TOKENS)

    def _enter(self, group: Group) -> Entry:
        own = self.pool.take(self._own_blocks(group))
        request = group.waiting.popleft()
        request.epoch = group.epoch
        self.num_waiting -= 1
        if not group.waiting:
            request.blocks, request.state = [*group.blocks, *own], group.state
            return Entry(request, group, None)
        request.state = self._taken()
        shared = group.blocks[: len(group.prompt) // BLOCK_TOKENS]
        self.pool.share(shared)
        request.blocks = [*shared, *own]
        partly_filled = len(shared) < len(group.blocks)
        return Entry(request, group, (group.blocks[-1], own[0]) if partly_filled else None)

    def _taken(self) -> int:
        """A slot, -1 where none is needed; one is free whenever a row is."""
        return -1 if self._states is None else self._states.take(1)[0]

    def _release_state(self, slot: int) -> None:
        if self._states is not None and slot >= 0:
            self._states.release([slot])


def state_slots(slots: int, spare: int = 0) -> int:
    """Slots for the states of as many rows, and of a prompt whose samples have not all come in; and
    spare ones, for snapshots."""
    return slots + 1 + spare
