"""An fp32 moving average of a model's trained weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


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
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights in."""
        parameters = dict(self.model.named_parameters())
        shadows = list(self.shadow.values())
        weights = [parameters[name].detach().float() for name in self.shadow]
        torch._foreach_lerp_(shadows, weights, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model has the average's weights; afterwards its own, bit for bit."""
        parameters = dict(self.model.named_parameters())
        own = {name: parameters[name].data for name in self.shadow}
        try:
            for name, average in self.shadow.items():
                parameters[name].data = average.to(own[name].dtype)
            yield
        finally:
            for name, data in own.items():
                parameters[name].data = data

    def state_tensors(self) -> dict[str, Tensor]:
        """The average by parameter name, to save."""
        return dict(self.shadow)

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue from a saved average of the same parameters."""
        for name, value in tensors.items():
            self.shadow[name].copy_(value)
