"""An fp32 moving average of a model's trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tandem.parallel.pieces import Saved, fill, local
from tandem.parallel.shard import shards_of


class MovingAverage:
    """shadow = decay * shadow + (1 - decay) * weights, in float32 whatever the weights' type.

    In half precision most updates of an average round to nothing; and only trained parameters are
    kept, so with LoRA it is the adapters' average, started from the same adapters.
    """

    def __init__(self, model: nn.Module, decay: float):
        """Starts at the model's present weights."""
        self.model = model
        self.decay = decay
        self.shadow = {
            name: parameter.detach().float().clone()
            for name, parameter in self._parameters().items()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights in; each rank those that lie with it, without communication."""
        parameters = self._parameters()
        shadows = [local(average) for average in self.shadow.values()]
        weights = [local(parameters[name].detach()).float() for name in self.shadow]
        torch._foreach_lerp_(shadows, weights, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model has the average's weights; afterwards its own, bit for bit."""
        swap = self._copied_in() if shards_of(self.model).is_split else self._swapped_in()
        with swap:
            yield

    def state_tensors(self) -> dict[str, Tensor]:
        """The average by parameter name, to save; of split weights it is split alike."""
        return dict(self.shadow)

    def load_state_tensors(self, tensors: Mapping[str, Tensor | Saved]) -> None:
        """Continue from a saved average of the same parameters."""
        for name, value in tensors.items():
            fill(self.shadow[name], value)

    @contextmanager
    def _swapped_in(self) -> Iterator[None]:
        parameters = self._parameters()
        own = {name: parameters[name].data for name in self.shadow}
        try:
            for name, average in self.shadow.items():
                parameters[name].data = average.to(own[name].dtype)
            yield
        finally:
            for name, data in own.items():
                parameters[name].data = data

    @contextmanager
    def _copied_in(self) -> Iterator[None]:
        """What travels is the memory that FSDP2 knows: a piece's values change, not its storage."""
        parameters = self._parameters()
        pieces = {name: local(parameters[name].detach()) for name in self.shadow}
        own = {name: piece.clone() for name, piece in pieces.items()}
        try:
            for name, piece in pieces.items():
                piece.copy_(local(self.shadow[name]))
            yield
        finally:
            self._parameters()
            for name, piece in pieces.items():
                piece.copy_(own[name])

    def _parameters(self) -> dict[str, nn.Parameter]:
        shards_of(self.model).rest()
        return dict(self.model.named_parameters())
