"""An fp32 moving average of a model's trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tandem.parallel.dtensor import Saved, fill, local
from tandem.parallel.masters import exactly
from tandem.parallel.shard import shards_of


class MovingAverage:
    """shadow = decay * shadow + (1 - decay) * weights, in float32 whatever the weights' type.

    In half precision most updates of an average round to nothing; and only trained parameters are
    kept, so with LoRA it is the adapters' average, started from the same adapters.
    """

    def __init__(
        self, model: nn.Module, decay: float, masters: Mapping[nn.Parameter, Tensor] | None = None
    ):
        """Starts at the model's present weights.

        Args:
            masters: the exact values of weights that rest in a smaller type, updated in place
                (`engine.optimizer.Learner.masters`); the average is theirs.
        """
        self.model = model
        self.decay = decay
        self._masters = masters or {}
        self.shadow = {
            name: self._exact(parameter).float().clone()
            for name, parameter in self._parameters().items()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights in; each rank those that lie with it, without communication."""
        parameters = self._parameters()
        shadows = [local(average) for average in self.shadow.values()]
        weights = [local(self._exact(parameters[name])).float() for name in self.shadow]
        torch._foreach_lerp_(shadows, weights, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model computes with the average, rounded to its weights' type and at their
        addresses; afterwards with its own, bit for bit."""
        parameters = self._parameters()
        pieces = {name: local(parameters[name].detach()) for name in self.shadow}
        own = {
            name: local(self._masters[parameters[name]])
            if parameters[name] in self._masters
            else piece.clone()
            for name, piece in pieces.items()
        }
        try:
            for name, piece in pieces.items():
                piece.copy_(local(self.shadow[name]))
            yield
        finally:
            self._parameters()
            for name, piece in pieces.items():
                piece.copy_(own[name])

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Within: the model's weights are the average itself, float32, to be saved; nothing may
        compute."""
        if shards_of(self.model).is_split:  # whose pieces are float32
            with self.applied():
                yield
            return
        parameters = self._parameters()
        with exactly({parameters[name]: average for name, average in self.shadow.items()}):
            yield

    def state_tensors(self) -> dict[str, Tensor]:
        """The average by parameter name, to save; of split weights it is split alike."""
        return dict(self.shadow)

    def load_state_tensors(self, tensors: Mapping[str, Tensor | Saved]) -> None:
        """Continue from a saved average of the same parameters."""
        for name, value in tensors.items():
            fill(self.shadow[name], value)

    def _exact(self, parameter: nn.Parameter) -> Tensor:
        return self._masters.get(parameter, parameter.detach())

    def _parameters(self) -> dict[str, nn.Parameter]:
        shards_of(self.model).reshard()
        return dict(self.model.named_parameters())
