"""Which answers run and which wait: rows, blocks of memory and prompts that are shared.

Prompts enter in the order they came in, so one that does not fit is never passed over for ever.
The samples of a prompt share the blocks that it fills whole; of its last, partly filled block each
sample has a copy, but the last sample to enter takes the block itself.
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
from tandem.generation.sampler import Sampler
from tandem.ops.attention_context import BLOCK_TOKENS


@dataclass(slots=True, eq=False)
class Request:
    """One answer to draw, and where it stands.

    number: the caller's name for it. key: its `sequence_key`. limit: most tokens it may have.
    text: watches for stop strings; None where there are none.
    row: among the live rows, -1 off them. is_counted: its prompt is in the row's counts, for
    penalties. blocks: what it holds. begun: the step that drew its
    first token. length: tokens drawn, the one that ended it included; valid once `ended`.
    finished: a stop token or stop string ended it. failed: its distribution was none (NaN).
    top: how many of the likeliest tokens to observe beside each drawn one; -1: observe nothing.
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
    begun: int = -1
    length: int = 0
    ended: bool = False
    finished: bool = False
    failed: bool = False
    top: int = -1
    observed: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Group:
    """Samples of one prompt. logits: (V,) of its last token, once it has been run."""

    prompt: tuple[int, ...]
    waiting: deque[Request]
    blocks: list[int] = field(default_factory=list)
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Entering:
    """What comes in now: prompts to run, blocks to copy then (from, to), requests with theirs."""

    prompts: list[Group]
    copies: list[tuple[int, int]]
    requests: list[tuple[Request, Group]]


class Scheduler:
    """The queue, and the blocks that it hands out."""

    def __init__(self, pool: BlockPool, slots: int, *, prefill_tokens: int, refill: int) -> None:
        """An empty queue.

        Args:
            slots: most rows side by side.
            prefill_tokens: prompts that are run at once have at most this many tokens together;
                a longer one is run alone.
            refill: rows that must be free before some are filled while others run.
        """
        self.pool = pool
        self._slots, self._prefill_tokens, self._refill = slots, prefill_tokens, refill
        self._queue: deque[Group] = deque()
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
        self.num_waiting += len(requests)

    def admit(self, num_live: int) -> Entering | None:
        """Take blocks for all that can come in now; None if nothing can."""
        room = self._slots - num_live
        if not self._queue or (num_live and room < min(self._refill, self.num_waiting)):
            return None
        entering = Entering([], [], [])
        num_tokens = 0
        while self._queue and room:
            group = self._queue[0]
            if not group.blocks:
                num_tokens += len(group.prompt)
                if num_tokens > self._prefill_tokens and entering.prompts:
                    break
                if not self._fits_with_prompt(group):
                    break
                group.blocks = self.pool.take(blocks_for(len(group.prompt)))
                entering.prompts.append(group)
            while group.waiting and room and self._own_blocks(group) <= self.pool.num_free:
                entering.requests.append((self._enter(group, entering.copies), group))
                room -= 1
            if group.waiting:
                break
            self._queue.popleft()
        return entering if entering.requests else None

    def leave(self, request: Request) -> None:
        """A request that was admitted gives its blocks back."""
        self.pool.release(request.blocks)
        request.blocks = []

    def withdraw(self, request: Request) -> None:
        """Forget a request that waits."""
        for group in self._queue:
            if request in group.waiting:
                group.waiting.remove(request)
                self.num_waiting -= 1
                if not group.waiting:
                    self.pool.release(group.blocks)
                    self._queue.remove(group)
                return

    def _fits_with_prompt(self, group: Group) -> bool:
        needed = blocks_needed(len(group.prompt), group.waiting[0].limit, len(group.waiting))
        return needed <= self.pool.num_free

    def _own_blocks(self, group: Group) -> int:
        """Blocks that the group's next sample needs besides the prompt's."""
        length = len(group.prompt)
        whole = blocks_for(length + group.waiting[0].limit)
        takes_over = len(group.waiting) == 1
        return whole - (blocks_for(length) if takes_over else length // BLOCK_TOKENS)

    def _enter(self, group: Group, copies: list[tuple[int, int]]) -> Request:
        own = self.pool.take(self._own_blocks(group))
        request = group.waiting.popleft()
        self.num_waiting -= 1
        if group.waiting:
            shared = group.blocks[: len(group.prompt) // BLOCK_TOKENS]
            self.pool.share(shared)
            request.blocks = [*shared, *own]
            if len(shared) < len(group.blocks):
                copies.append((group.blocks[-1], own[0]))
        else:
            request.blocks = [*group.blocks, *own]
        return request


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
