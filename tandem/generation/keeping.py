"""What a session computes in the layers of every token, kept for the update that follows.

The rows of `KeptStates` are in the order in which tokens are run, so that every step writes its own
behind those before; which row each token of an answer has is put together at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.generation.blocks import blocks_for
from tandem.generation.request import Group, Request
from tandem.generation.scheduler import Entry
from tandem.models.blocks import decoder_blocks
from tandem.models.replayed import KeptStates, LayerStates, replays, state_widths
from tandem.models.twin import twin_of
from tandem.ops.attention_context import BLOCK_TOKENS


class StateKeeper:
    """Keeps the states of one rollout's tokens, if they can be and there is room.

    Attributes:
        states: of the rollout, after it; None where nothing was kept.
    """

    def __init__(self, room: int) -> None:
        """Nothing is kept yet, and never more than `room` bytes."""
        self.states: KeptStates | None = None
        self._room = room
        self._layers: list[LayerStates] = []
        self._count = 0
        self._limit = 0
        self._blocks: dict[int, int] = {}  # the row of each block's first token
        self._prompts: dict[int, list[int]] = {}  # of a request's prompt, one for each block

    def begin(self, model: PreTrainedModel, tokens: int, answers: int, limit: int) -> list[Tensor]:
        """Memory for the states of at most `tokens` tokens, as `LlamaDecoder.keep` takes it; empty
        where nothing will be kept.

        Args:
            answers, limit: of the rollout, and the most tokens of each.
        """
        twin = twin_of(model)
        if not replays(twin):
            return []
        widths, layers = state_widths(twin), len(decoder_blocks(twin))
        if tokens * sum(widths) * layers * twin.dtype.itemsize > self._room:
            return []
        self._layers = [
            LayerStates(*(torch.empty(tokens, width, dtype=twin.dtype) for width in widths))
            for _ in range(layers)
        ]
        self._limit = limit
        self._token_ids = torch.empty(tokens, dtype=torch.long)
        self._answers = torch.full((answers * limit,), -1)
        return [matrix for layer in self._layers for matrix in layer]

    def ran_prompts(self, token_ids: Tensor, parts: Sequence[tuple[Group, int, int]]) -> None:
        """Parts of prompts were run: each a group, where the part begins, and its tokens."""
        row = self._ran(token_ids)
        for group, start, count in parts:
            for place in range(start, start + count, BLOCK_TOKENS):
                self._blocks[group.blocks[place // BLOCK_TOKENS]] = row + place - start
            row += count

    def entered(self, entries: Sequence[Entry]) -> None:
        """Requests come in whose prompts have been run."""
        for entry in entries:
            blocks = entry.group.blocks[: blocks_for(len(entry.group.prompt))]
            self._prompts[entry.request.number] = [self._blocks[block] for block in blocks]

    def decoded(self, token_ids: Tensor, places: Tensor) -> None:
        """One token of each row was run; `places` is where the next one of each is recorded."""
        row = self._ran(token_ids)
        self._answers[places - 1] = torch.arange(row, row + len(places))

    def end(self, requests: Sequence[Request], width: int) -> None:
        """The rollout is over; its batch has these rows, `width` tokens wide."""
        if not self._layers:
            return
        rows = torch.full((len(requests), width), -1)
        steps = torch.arange(BLOCK_TOKENS)
        for row, request in zip(rows, requests, strict=True):
            n, first = len(request.prompt), request.number * self._limit
            blocks = torch.tensor(self._prompts[request.number])
            row[:n] = (blocks[:, None] + steps).flatten()[:n]
            row[n : n + request.length - 1] = self._answers[first : first + request.length - 1]
        self.states = KeptStates(self._layers, self._token_ids, rows)

    def _ran(self, token_ids: Tensor) -> int:
        """The row of the first of these tokens."""
        row = self._count
        self._count += len(token_ids)
        self._token_ids[row : self._count] = token_ids
        return row
