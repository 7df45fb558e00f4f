"""What a step has drawn, on its way from the device to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.generation.observed import observe, read_observed
from tandem.generation.request import Request


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that a step has drawn, as the host reads them: of `requests`, in their order."""

    requests: list[Request]
    token_ids: list[int]


class Unread:
    """Tokens of one draw on their way to the host."""

    def __init__(
        self,
        step: int,
        requests: list[Request],
        at_limit: list[Request],
        tokens: Tensor,
        observed: Observed | None,
    ) -> None:
        """`at_limit`: those of the requests that may have no more tokens."""
        self.step, self.requests, self.at_limit = step, requests, at_limit
        self.observed = observed
        self._tokens, self._arrived = tokens, None
        if tokens.is_cuda:
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def token_ids(self) -> list[int]:
        """One for each request."""
        if self._arrived is not None:
            self._arrived.synchronize()
        ids: list[int] = self._tokens.tolist()
        return ids


@dataclass(frozen=True, slots=True)
class Observed:
    """Log-probs of those rows of a draw that asked for them, still on the device."""

    requests: list[Request]
    tokens: Tensor
    numbers: tuple[Tensor, Tensor, Tensor]

    @staticmethod
    def of(logits: Tensor, tokens: Tensor, requests: list[Request]) -> Observed | None:
        """What the requests among these ask for; None if none does."""
        rows = [i for i, request in enumerate(requests) if request.top >= 0]
        if not rows:
            return None
        asking = [requests[i] for i in rows]
        index = torch.tensor(rows, device=logits.device)
        chosen = tokens[index]
        num_ids = asking[0].sampler.num_ids  # of one model, as all are
        numbers = observe(logits[index], chosen, max(r.top for r in asking), num_ids)
        return Observed(asking, chosen, numbers)

    def deliver(self) -> None:
        """Give the answers that go on what belongs to their newest token."""
        counts = [request.top for request in self.requests]
        found = read_observed(self.tokens.tolist(), self.numbers, counts)
        for request, of_token in zip(self.requests, found, strict=True):
            if not request.ended:
                request.observed.append(of_token)
