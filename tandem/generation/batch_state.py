"""The live rows as tensors: what the next decode step reads, kept dense as answers come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.generation.request import Request
from tandem.generation.sampler import Draw, Sampler, TokenCounts
from tandem.ops import gpu

_COLUMNS = ("key", "limit", "token id", "position", "token number", "place")
"""What is known of a row besides its blocks, as `LlamaDecoder::advance` reads it."""
_COUNTING = 3
"""The first of those that grow."""


@dataclass(frozen=True, slots=True)
class Part:
    """Views of n rows side by side; valid until rows come or go.

    token_ids, positions: (n,) int64, each row's last token and its index in the sequence.
    keys, token_numbers: (n,) int64, what the next draw is made of.
    places: (n,) int64, where the next draw is recorded.
    counting: (3, n), of these the ones that grow by one with each token.
    columns: (6, n), all of these, and of each row the most tokens it may draw.
    tables: (n, W) int32, each row's blocks.
    states: (n,) int64, the slot of each row's states; None where no layer keeps any.
    """

    rows: slice
    requests: list[Request]
    token_ids: Tensor
    positions: Tensor
    keys: Tensor
    token_numbers: Tensor
    places: Tensor
    counting: Tensor
    columns: Tensor
    tables: Tensor
    states: Tensor | None


class Rows:
    """One row per live request, the n live ones in front.

    Attributes:
        requests: the live requests, by row.
        live: the live rows.
    """

    def __init__(
        self, slots: int, table_width: int, device: torch.device, *, keeps_states: bool = False
    ) -> None:
        """No row is live; there may be up to `slots`, of up to `table_width` blocks, with slots for
        states or without."""
        self.requests: list[Request] = []
        self.device = device
        self._samplers: list[Sampler] = []
        self._counts: TokenCounts | None = None
        self._columns = torch.zeros((len(_COLUMNS), slots), dtype=torch.long, device=device)
        self._tables = torch.zeros((slots, table_width), dtype=torch.int32, device=device)
        self._states = torch.zeros(slots, dtype=torch.long, device=device) if keeps_states else None
        self.live = self._part(0)

    def __len__(self) -> int:
        return len(self.requests)

    def enter(self, requests: Sequence[Request], places: Sequence[int]) -> Part:
        """Rows for these requests behind the live ones; `places` is where each records first."""
        first = len(self.requests)
        for row, request in enumerate(requests, first):
            request.row = row
        self.requests += requests
        part = self._part(first)
        columns = [
            [request.key for request in requests],
            [request.limit for request in requests],
            [0] * len(requests),
            [len(request.prompt) - 1 for request in requests],
            [0] * len(requests),
            list(places),
        ]
        self._columns[:, part.rows] = gpu.sent(columns, self.device)
        width = self._tables.shape[1]
        tables = [request.blocks + [0] * (width - len(request.blocks)) for request in requests]
        part.tables.copy_(gpu.sent(tables, self.device, torch.int32))
        if part.states is not None:
            part.states.copy_(gpu.sent([request.state for request in requests], self.device))
        self._samplers = []  # others may have come with them
        self._look()
        return part

    def draw(self, logits: Tensor, part: Part, allowed: Tensor | None = None) -> Draw:
        """Draw for the rows of a part, each with its request's sampler; logits (n, V), and of
        which tokens, (n, V) bool."""
        if self.sampler is not None:
            return self._drawn(self.sampler, logits, part, None, allowed)
        parts, order = [], []
        for sampler in self._samplers:
            chosen = [i for i, request in enumerate(part.requests) if request.sampler is sampler]
            if chosen:
                order += chosen
                index = gpu.sent(chosen, self.device)
                parts.append(self._drawn(sampler, logits, part, index, allowed))
        back = gpu.sent(order, self.device).argsort()
        return Draw(
            torch.cat([draw.tokens for draw in parts])[back],
            torch.cat([draw.logprobs for draw in parts])[back],
            torch.cat([draw.sampled_logprobs for draw in parts])[back],
            torch.cat([draw.entropy for draw in parts])[back],
        )

    def advance(self, tokens: Tensor, part: Part) -> Tensor:
        """The rows of a part have drawn these tokens; where each records them, (n,) int64."""
        places = part.places.clone()
        if self._counts is not None:
            self._counts.add(part.rows, tokens)
        part.token_ids.copy_(tokens)
        part.counting.add_(1)
        return places

    def ahead(self, drafts: Sequence[Sequence[int]]) -> Part:
        """The live rows, each with rows for the tokens of its draft behind it; no views, as of rows
        that are run and forgotten.

        Whoever draws for them draws what follows each token, if those before it are right.
        """
        counts = [1 + len(draft) for draft in drafts]
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        later = torch.tensor([i for count in counts for i in range(count)])
        columns = self._columns[:, rows]
        columns[_COUNTING:] += later
        columns[_COLUMNS.index("token id"), later > 0] = torch.tensor(
            [token for draft in drafts for token in draft], dtype=torch.long
        )
        requests = [self.requests[row] for row in rows]
        return self._part_of(slice(0, 0), requests, columns, self._tables[rows], None)

    def jump(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """The live rows have drawn so many tokens each, the last of them `tokens` (n,)."""
        self.live.token_ids.copy_(tokens)
        self.live.counting.add_(torch.tensor(counts))

    @property
    def sampler(self) -> Sampler | None:
        """The one that draws for all live rows, if it is one."""
        return self._samplers[0] if len(self._samplers) == 1 else None

    def keep(self, rows: Sequence[int]) -> None:
        """Of these rows alone, which are in front and in this order now, an answer goes on; none of
        them has counts."""
        before = self.requests
        for request in before:
            request.row = -1
        self.requests = [before[row] for row in rows]
        for row, request in enumerate(self.requests):
            request.row = row
        self._look()

    def leave(self, requests: Sequence[Request]) -> None:
        """The rows of these requests are free; live rows from the end move into them."""
        holes = {request.row for request in requests}
        keep = len(self.requests) - len(holes)
        sources = [row for row in range(keep, len(self.requests)) if row not in holes]
        targets = [row for row in holes if row < keep]
        if sources:
            self._move(sources, targets)
        for request in requests:
            request.row = -1
        for old, new in zip(sources, targets, strict=True):
            self.requests[new] = self.requests[old]
            self.requests[new].row = new
        del self.requests[keep:]
        self._look()

    def _move(self, sources: list[int], targets: list[int]) -> None:
        """Rows take other places."""
        if self.device.type == "cpu":  # numpy takes a tenth of torch's time for so few numbers
            for rows in (self._columns.numpy().T, self._tables.numpy()):
                rows[targets] = rows[sources]
            if self._states is not None:
                self._states[targets] = self._states[sources]
            if self._counts is not None:
                self._counts.move(torch.tensor(sources), torch.tensor(targets))
            return
        source, target = gpu.sent([sources, targets], self.device)
        self._columns.index_copy_(1, target, self._columns.index_select(1, source))
        self._tables.index_copy_(0, target, self._tables.index_select(0, source))
        if self._states is not None:
            self._states.index_copy_(0, target, self._states.index_select(0, source))
        if self._counts is not None:
            self._counts.move(source, target)

    def _drawn(
        self,
        sampler: Sampler,
        logits: Tensor,
        part: Part,
        index: Tensor | None,
        allowed: Tensor | None,
    ) -> Draw:
        """Draw with one sampler for all rows of a part, or for those at `index` in it."""
        keys, numbers = part.keys, part.token_numbers
        if index is not None:
            logits, keys, numbers = logits[index], keys[index], numbers[index]
            allowed = None if allowed is None else allowed[index]
        counts = None
        if sampler.penalizes:
            rows = part.rows if index is None else index + part.rows.start
            counts = self._counted(part, logits.shape[1]).of(rows)
        return sampler.draw(logits, keys, numbers, counts, allowed)

    def _counted(self, part: Part, vocabulary: int) -> TokenCounts:
        """The counts, begun for rows that have drawn nothing yet."""
        if self._counts is None:
            self._counts = TokenCounts(len(self._tables), vocabulary, self.device)
        for request in part.requests:
            if not request.is_counted:
                request.is_counted = True
                self._counts.begin(request.row, request.prompt)
        return self._counts

    def _look(self) -> None:
        """Made again whenever rows come or go, and not at every step."""
        self.live = self._part(0)
        if len(self._samplers) != 1 or not self.requests:  # of one, those that stay have it too
            self._samplers = list({id(r.sampler): r.sampler for r in self.requests}.values())

    def _part(self, first: int) -> Part:
        rows = slice(first, len(self.requests))
        states = None if self._states is None else self._states[rows]
        return self._part_of(
            rows, self.requests[rows], self._columns[:, rows], self._tables[rows], states
        )

    @staticmethod
    def _part_of(
        rows: slice,
        requests: list[Request],
        columns: Tensor,
        tables: Tensor,
        states: Tensor | None,
    ) -> Part:
        keys, _, token_ids, positions, token_numbers, places = columns.unbind()
        return Part(
            rows=rows,
            requests=requests,
            token_ids=token_ids,
            positions=positions,
            keys=keys,
            token_numbers=token_numbers,
            places=places,
            counting=columns[_COUNTING:],
            columns=columns,
            tables=tables,
            states=states,
        )
