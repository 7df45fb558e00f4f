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
    """shadow = decay * shadow + (1 - decay) * weights, in float32.

    In half precision most updates of an average would round to nothing. Only trained parameters are
    averaged: with LoRA, the adapters.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        masters: Mapping[nn.Parameter, Tensor] | None = None,
        *,
        shadow: Mapping[str, Tensor] | None = None,
    ):
        """Start at the model's present weights.

        Args:
            masters: float32 values of rounded weights, updated in place (`Learner.masters`), which
                are then averaged.
            shadow: float32 tensors with these values, split as the weights are, to keep the average
                in; None: new ones.
        """
        self.model = model
        self.decay = decay
        self._masters = masters or {}
        self.shadow = dict(shadow or {}) or {
            name: self._exact(parameter).float().clone()
            for name, parameter in self._parameters().items()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """Average in the present weights; each rank its own pieces, without communication."""
        parameters = self._parameters()
        shadows = [local(average) for average in self.shadow.values()]
        weights = [
            local(self._exact(parameters[name])).to(average.device, torch.float32)
            for name, average in zip(self.shadow, shadows, strict=True)
        ]
        torch._foreach_lerp_(shadows, weights, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within: the model computes with the average, rounded to its weights' type and at their
        addresses; after: with its own weights, bit for bit."""
        parameters = self._parameters()
        pieces = {name: local(parameters[name].detach()) for name in self.shadow}
        own = {}
        for name, piece in pieces.items():
            master = self._masters.get(parameters[name])
            # A float32 weight may be its own master, which the average is about to overwrite.
            is_apart = master is not None and local(master).data_ptr() != piece.data_ptr()
            own[name] = local(master) if master is not None and is_apart else piece.clone()
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
        """Within: the model's weights are the float32 average, for saving only."""
        if shards_of(self.model).is_split:  # whose pieces are float32
            with self.applied():
                yield
            return
        parameters = self._parameters()
        with exactly({parameters[name]: average for name, average in self.shadow.items()}):
            yield

    def state_tensors(self) -> dict[str, Tensor]:
        """The average by parameter name, split as the weights are, to save."""
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


def moving_average(
    model: nn.Module, decay: float, masters: Mapping[nn.Parameter, Tensor]
) -> MovingAverage | None:
    """A model's moving average; None where its decay is 0, which asks for none."""
    return MovingAverage(model, decay, masters) if decay else None
