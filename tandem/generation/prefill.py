"""Prompts that were let in, run in order, as much of them at a time as a step may."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

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

Piece = tuple[Group, int, int]
"""A part of a prompt: where it begins, and how many tokens it has."""


class Prefill:
    """Prompts on their way into KV memory.

    They run in order, so what one shares has been computed when another needs it. States are copied
    between forwards, so where layers keep any, a prompt waits for the one that leaves the snapshot
    that it begins with, but not for others.
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
            chunk_tokens: most tokens that run beside live rows; None: any.
        """
        self._memory, self._device, self._snapshots = memory, model.device, snapshots
        self._prefill_tokens, self._chunk_tokens = prefill_tokens, chunk_tokens
        # On a CPU more in one forward are no faster, and their activations take memory.
        most = max(512, 2**18 // model.config.get_text_config().hidden_size)
        self._run_tokens = prefill_tokens if model.device.type != "cpu" else most
        self.groups: deque[Group] = deque()

    def run(self, runner: Runner, keeper: StateKeeper | None, *, beside_rows: bool) -> None:
        """Run prompts to their ends, or as much of them as may run beside live rows."""
        left: float = torch.inf
        if self._chunk_tokens is not None:
            left = self._chunk_tokens if beside_rows else self._prefill_tokens
        while self.groups and left > 0:
            part = self._next_part(left)
            for group, _, count in part:
                group.computed += count
                left -= count
            self._forward(runner, keeper, part)
            done = {id(group) for group, _, _ in part if group.computed == len(group.prompt)}
            self.groups = deque(group for group in self.groups if id(group) not in done)

    def _next_part(self, left: float) -> list[Piece]:
        """What the next forward runs, of the tokens that a step may still run: of each prompt what
        comes before its next snapshot, as long as what earlier ones have left can follow."""
        part: list[Piece] = []
        total = 0
        awaited = {stop.slot for group in self.groups for stop in group.stops}
        for group in self.groups:
            if group.source in awaited:
                continue
            start, length = group.computed, len(group.prompt)
            while start < length:
                count = self._next_tokens(group, start, left)
                if part and (left <= 0 or total + count > self._run_tokens):
                    return part
                part.append((group, start, count))
                start, total, left = start + count, total + count, left - count
                if self._memory.num_slots:  # states go on in the next forward
                    left -= length - start
                    break
        return part

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

    def _forward(self, runner: Runner, keeper: StateKeeper | None, parts: Sequence[Piece]) -> None:
        """One forward over parts of prompts, between what it begins with and what it leaves."""
        groups = [group for group, _, _ in parts]
        begun = [group for group in groups if group.source >= 0]
        self._copy([(group.source, group.state) for group in begun])
        for group in begun:
            self._release(group.source)
            group.source = -1
        width = max(len(group.blocks) for group in groups)
        tables = [group.blocks + [0] * (width - len(group.blocks)) for group in groups]
        tokens = [t for group, start, n in parts for t in group.prompt[start : start + n]]
        logits = runner.prefill(
            token_ids := gpu.sent(tokens, self._device),
            [count for _, _, count in parts],
            gpu.sent(tables, self._device, torch.int32),
            [start for _, start, _ in parts],
            self._slots(groups),
        )
        if keeper is not None:
            keeper.ran_prompts(token_ids, parts)
        for (group, start, count), row in zip(parts, logits, strict=True):
            if start + count == len(group.prompt):
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
