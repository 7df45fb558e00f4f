"""Which answers run and which wait: rows, blocks of memory and prompts that are shared.

Prompts enter in the order they came in, so one that does not fit is never passed over for ever.
The samples of a prompt share the blocks that it fills whole; of its last, partly filled block each
sample has a copy, but the last sample to enter takes the block itself. Prompts that begin alike
share the blocks of their beginning (`prefixes`), which the first of them computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tandem.errors import GenerationError
from tandem.generation.blocks import BlockPool, blocks_for
from tandem.generation.detokenizer import AnswerText
from tandem.generation.observed import TokenLogprobs
from tandem.generation.prefixes import PrefixPool
from tandem.generation.sampler import Sampler
from tandem.ops.attention_context import BLOCK_TOKENS


@dataclass(slots=True, eq=False)
class Request:
    """One answer to draw, and where it stands.

    number: the caller's name for it. key: its `sequence_key`. limit: most tokens it may have.
    text: watches for stop strings; None where there are none.
    row: among the live rows, -1 off them. is_counted: its prompt is in the row's counts, for
    penalties. blocks: what it holds. state: the slot of its states, where layers keep any; -1:
    none. begun: the step that drew its first token. length: tokens drawn, the one that ended it
    included; valid once `ended`.
    finished: a stop token or stop string ended it. failed: its distribution was none (NaN).
    top: how many of the likeliest tokens to observe beside each drawn one; -1: observe nothing.
    epoch: of the pool, when its prompt came in.
    drawn: its tokens as far as the host has read them, where sessions keep answers.
    observed: what was observed, a drawn token each.
    """

    number: int
    prompt: tuple[int, ...]
    key: int
    sampler: Sampler
    limit: int
    text: AnswerText | None = None
    row: int = -1
    is_counted: bool = False
    blocks: list[int] = field(default_factory=list)
    state: int = -1
    begun: int = -1
    length: int = 0
    ended: bool = False
    finished: bool = False
    failed: bool = False
    top: int = -1
    observed: list[TokenLogprobs] = field(default_factory=list)
    epoch: int = 0
    drawn: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Group:
    """Samples of one prompt. computed: its tokens whose keys and values are in memory, or will be
    before its own next ones. found: its first blocks, which others have computed. state: the slot
    of its states, -1: none. logits: (V,) of its last token, once it has been run."""

    prompt: tuple[int, ...]
    waiting: deque[Request]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    found: int = 0
    state: int = -1
    epoch: int = 0
    logits: Tensor | None = None


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
        prefill_tokens: int,
        refill: int,
        shares_prefixes: bool = True,
        keeps_states: bool = False,
    ) -> None:
        """An empty queue.

        Args:
            slots: most rows side by side.
            prefill_tokens: prompts that are run at once have at most this many tokens together;
                a longer one is run alone.
            refill: rows that must be free before some are filled while others run.
            shares_prefixes: prompts that begin alike share blocks.
            keeps_states: each sequence has a slot for its layers' states, of `state_slots`.
        """
        self.pool = pool
        self._states = BlockPool(state_slots(slots)) if keeps_states else None
        self.counts = PrefixCounts()
        self._shares_prefixes = shares_prefixes
        self._slots, self._prefill_tokens, self._refill = slots, prefill_tokens, refill
        self._queue: deque[Group] = deque()
        self._is_stuck = False  # nothing can come in before somebody leaves or asks anew
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

    def admit(self, num_live: int) -> Entering | None:
        """Take blocks for all that can come in now; None if nothing can."""
        room = self._slots - num_live
        if not self._queue or num_live > self.rows_that_let_in:
            return None
        entering = Entering([], [])
        num_tokens = 0
        self._is_stuck = True
        while self._queue and room:
            group = self._queue[0]
            if not group.blocks:
                found = self.pool.find(group.prompt) if self._shares_prefixes else []
                num_tokens += len(group.prompt) - len(found) * BLOCK_TOKENS
                if num_tokens > self._prefill_tokens and entering.prompts:
                    self._is_stuck = False  # it may come in next time
                    break
                if not self._fits_with_prompt(group, found):
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
            self.pool.keep((*request.prompt, *answer), request.blocks)
        self.pool.release(request.blocks)
        request.blocks = []
        self._release_state(request.state)
        request.state = -1
        self._is_stuck = False

    def drop(self, entry: Entry) -> bool:
        """Forget a request whose prompt is being run, unless others need what its prompt computes;
        whether it has been done."""
        group, request = entry.group, entry.request
        if group.waiting or self.pool.has_others(group.blocks[group.found :]):
            return False
        self.pool.forget(group.blocks[group.computed // BLOCK_TOKENS :])
        self.leave(request)
        return True

    def withdraw(self, request: Request) -> None:
        """Forget a request that waits."""
        self._is_stuck = False
        for group in self._queue:
            if request in group.waiting:
                group.waiting.remove(request)
                self.num_waiting -= 1
                if not group.waiting:
                    # Samples that came in before may still be waiting for what the prompt leaves
                    # in its blocks and slot, which nobody takes before they have begun.
                    self.pool.release(group.blocks)
                    self._release_state(group.state)
                    self._queue.remove(group)
                return

    def _fits_with_prompt(self, group: Group, found: Sequence[int]) -> bool:
        needed = blocks_needed(len(group.prompt), group.waiting[0].limit, len(group.waiting))
        held_by_others = len(found) - self.pool.num_idle(found)
        return needed - held_by_others <= self.pool.num_free

    def _begin(self, group: Group, found: list[int]) -> None:
        """Blocks for a prompt that begins with the tokens of these."""
        length = len(group.prompt)
        self.pool.share(found)
        group.blocks = [*found, *self.pool.take(blocks_for(length) - len(found))]
        group.found, group.computed = len(found), len(found) * BLOCK_TOKENS
        group.epoch = self.pool.epoch
        group.state = self._taken()
        self.counts.prompt_tokens += length
        self.counts.shared_tokens += group.computed
        if self._shares_prefixes:  # those behind it run later, or in the same forward
            self.pool.keep(group.prompt, group.blocks)

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


def state_slots(slots: int) -> int:
    """Slots for the states of as many rows, and of a prompt whose samples have not all come in."""
    return slots + 1


def blocks_needed(prompt: int, limit: int, samples: int) -> int:
    """Blocks without which a prompt of this many tokens and one of its samples cannot run."""
    kept_for_others = samples > 1 and prompt % BLOCK_TOKENS > 0
    return blocks_for(prompt + limit) + kept_for_others


def blocks_wanted(prompts: Sequence[int], limit: int, samples: int, slots: int) -> int:
    """Blocks with which `slots` rows never wait for memory, the longest of the prompts first."""
    wanted = 0
    for length in sorted(prompts, reverse=True):
        rows = min(samples, slots)
        if rows == 0:
            break
        slots -= rows
        own = blocks_for(length + limit) - length // BLOCK_TOKENS
        wanted += blocks_needed(length, limit, samples) + (rows - 1) * own
    # A shorter prompt that ends inside a block may need one more than a longer one that does not.
    return max(wanted, most_needed(prompts, limit, samples))


def most_needed(prompts: Sequence[int], limit: int, samples: int) -> int:
    """Blocks without which some prompt could never run."""
    return max((blocks_needed(prompt, limit, samples) for prompt in prompts), default=0)
