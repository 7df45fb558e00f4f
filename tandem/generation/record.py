"""What a session has drawn, put in order once at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.generation.request import Request
from tandem.generation.sampler import Draw


class Record:
    """What was drawn for a known number of answers, put in order once at the end."""

    def __init__(self, num_answers: int, limit: int) -> None:
        """For answers of at most `limit` tokens, numbered from 0 by `Request.number`.

        `num_answers` may be set to more before they are collected.
        """
        self.num_answers = num_answers
        self._width = limit
        self._places: list[Tensor] = []
        self._draws: list[Draw] = []

    def place(self, request: Request) -> int:
        """Where a request's first token goes."""
        return request.number * self._width

    def keep(self, places: Tensor, draw: Draw) -> None:
        """Keep a draw; each row's next one goes to the next place."""
        self._places.append(places)
        self._draws.append(draw)

    def collected(self) -> Draw:
        """All draws, (answers, limit) each; undefined past an answer's end."""
        places = torch.cat(self._places)

        def ordered(parts: list[Tensor]) -> Tensor:
            flat = torch.cat(parts)
            out = torch.zeros(self.num_answers * self._width, dtype=flat.dtype, device=flat.device)
            out[places] = flat
            return out.view(self.num_answers, self._width)

        return Draw(
            ordered([draw.tokens for draw in self._draws]),
            ordered([draw.logprobs for draw in self._draws]),
            ordered([draw.sampled_logprobs for draw in self._draws]),
            ordered([draw.entropy for draw in self._draws]),
        )
