"""How a model computes now: evaluation mode in a `with` block, adapters on or off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


@dataclass(slots=True)
class AdapterSwitch:
    """Whether a layer adds its adapter's output; the layer and its twin share the object."""

    on: bool = True


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within: eval mode, without dropout; the earlier mode is restored after."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
