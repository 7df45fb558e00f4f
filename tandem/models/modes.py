"""Evaluation mode in a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Within: eval mode, without dropout; the earlier mode is restored after."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
