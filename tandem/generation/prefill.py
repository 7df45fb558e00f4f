"""Prompts that were let in, run as much of them at a time as a step may.

Where a step may run only some, one half of each forward goes to the prompts that came first, the
other to those with the fewest tokens left. So a short prompt waits for no long one, and none waits
for more than twice the forwards that it would in the order they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.generation.keeping import StateKeeper
from tandem.generation.request import Group
from tandem.generation.runner import Runner
from tandem.generation.snapshots import Snapshots
from tandem.ops import gpu
from tandem.ops.attention_context import KVMemory
from tandem.ops.sizes import BLOCK_TOKENS


class Prefill:
    """Prompts on their way into KV memory.

    A prompt that begins with blocks that others are yet to compute waits for these, or runs behind
    them in the same forward. States are copied between forwards, so where layers keep any, it waits
    for the snapshot that it begins with, too.
    """

    def __init__(
        self,
        memory: KVMemory,
        model: PreTrainedModel,
        prefill_tokens: int,
        chunk_tokens: int | None,
        snapshots: Snapshots | None,
    ) -> None:
        """No prompts yet.

        Args:
            prefill_tokens: most tokens of prompts in one forward.
            chunk_tokens: most tokens that run in a step; None: any.
        """
        self._memory, self._device, self._snapshots = memory, model.device, snapshots
        self._prefill_tokens, self._chunk_tokens = prefill_tokens, chunk_tokens
        # On a CPU more in one forward are no faster, and their activations take memory.
        most = max(512, 2**18 // model.config.get_text_config().hidden_size)
        self._run_tokens = prefill_tokens if model.device.type != "cpu" else most
        self.groups: deque[Group] = deque()  # as they came
        self._unwritten: set[int] = set()  # the blocks that they are yet to compute
        self._favors_first = False

    def add(self, groups: Iterable[Group]) -> None:
        """Prompts that were let in, behind those before."""
        for group in groups:
            group.awaited = self._unwritten.intersection(group.blocks[: group.found])
            self._unwritten.update(_whole_blocks(group, group.computed, len(group.prompt)))
            self.groups.append(group)

    def drop(self, group: Group) -> None:
        """Run no more of a prompt that nobody begins with."""
        self.groups.remove(group)
        self._unwritten.difference_update(_whole_blocks(group, group.computed, len(group.prompt)))

    def run(self, runner: Runner, keeper: StateKeeper | None) -> None:
        """Run prompts to their ends, or as much of them as a step may."""
        left = torch.inf if self._chunk_tokens is None else max(BLOCK_TOKENS, self._chunk_tokens)
        while self.groups and left >= BLOCK_TOKENS:  # fewer are not worth a forward
            part = self._next_part(left)
            assert part
            left -= sum(part.values())
            self._forward(runner, keeper, part)
            self.groups = deque(g for g in self.groups if g.computed < len(g.prompt))

    def _next_part(self, left: float) -> dict[Group, int]:
        """What the next forward runs, of the tokens that a step may still run: how many of each
        prompt."""
        part: dict[Group, int] = {}
        if self._chunk_tokens is None:
            self._fill(part, self.groups, left)
            return part
        left = min(left, self._run_tokens)
        self._favors_first = not self._favors_first  # where halves are no whole blocks
        half = (int(left) // BLOCK_TOKENS + self._favors_first) // 2 * BLOCK_TOKENS
        self._fill(part, self.groups, half)
        quick = sorted(self.groups, key=lambda group: len(group.prompt) - group.computed)
        self._fill(part, quick, left - sum(part.values()))
        return part

    def _fill(self, part: dict[Group, int], groups: Iterable[Group], left: float) -> None:
        """Add at most as many tokens to a forward, of prompts that need nothing that it does not
        compute, in this order; of each up to its next snapshot."""
        awaited = {stop.slot for group in self.groups for stop in group.stops}
        total = sum(part.values())
        for group in groups:
            if left <= 0:
                return
            group.awaited &= self._unwritten
            if group.awaited or group.source in awaited:
                continue
            start = group.computed + part.get(group, 0)
            count = self._next_tokens(group, start, left)
            if part and (count > left or total + count > self._run_tokens):
                return
            if count:
                part[group] = part.get(group, 0) + count
                total, left = total + count, left - count
                self._unwritten.difference_update(_whole_blocks(group, start, start + count))

    def _next_tokens(self, group: Group, start: int, left: float) -> int:
        """How many tokens of a prompt from `start` on to run, of those that a step may still."""
        remaining = len(group.prompt) - start
        count = int(min(remaining, left, self._prefill_tokens))
        if count < remaining:  # parts end where blocks do
            count = max(1, count // BLOCK_TOKENS) * BLOCK_TOKENS
            count = min(count, remaining)
        if group.stops:
            count = min(count, group.stops[0].end - start)
        return count

    def _forward(
        self, runner: Runner, keeper: StateKeeper | None, part: Mapping[Group, int]
    ) -> None:
        """One forward over parts of prompts, between what it begins with and what it leaves."""
        groups, counts = list(part), list(part.values())
        begun = [group for group in groups if group.source >= 0]
        self._copy([(group.source, group.state) for group in begun])
        for group in begun:
            self._release(group.source)
            group.source = -1
        width = max(len(group.blocks) for group in groups)
        tables = [group.blocks + [0] * (width - len(group.blocks)) for group in groups]
        starts = [group.computed for group in groups]
        tokens = [t for g, n in part.items() for t in g.prompt[g.computed : g.computed + n]]
        logits = runner.prefill(
            token_ids := gpu.sent(tokens, self._device),
            counts,
            gpu.sent(tables, self._device, torch.int32),
            starts,
            self._slots(groups),
        )
        if keeper is not None:
            keeper.ran_prompts(token_ids, list(zip(groups, starts, counts, strict=True)))
        for (group, count), row in zip(part.items(), logits, strict=True):
            group.computed += count
            if group.computed == len(group.prompt):
                group.logits = row
        leaving = [g for g in groups if g.stops and g.stops[0].end == g.computed]
        self._copy([(group.state, group.stops[0].slot) for group in leaving])
        for group in leaving:
            self._release(group.stops.pop(0).slot)

    def _slots(self, groups: Sequence[Group]) -> Tensor | None:
        """Where the states of parts of these prompts are kept, (G,)."""
        if not self._memory.num_slots:
            return None
        return gpu.sent([group.state for group in groups], self._device)

    def _copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy states from slots to others."""
        if pairs := list(pairs):
            slots = gpu.sent(pairs, self._device)
            self._memory.copy_states(slots[:, 0], slots[:, 1])

    def _release(self, slot: int) -> None:
        assert self._snapshots is not None
        self._snapshots.release(slot)


def _whole_blocks(group: Group, start: int, end: int) -> list[int]:
    """A prompt's blocks that its tokens from the beginning of one on to `end` fill."""
    return group.blocks[start // BLOCK_TOKENS : end // BLOCK_TOKENS]
