"""A model's mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Within: eval mode, without dropout; the mode before returns after."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
