"""The step of several models that share a loss scaler, in fp16."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.learner import Learner
from tandem.errors import BadStepError, NumericsError
from tandem.parallel.scaling import LossScaler

_MOST_SKIPPED = 30
"""Overflows in a row after which no smaller scale can help."""


def step_learners(learners: Sequence[Learner], scaler: LossScaler) -> list[float] | None:
    """Step all models that share a loss scaler or, on overflow, none.

    Returns:
        the gradients' norms before the clip; None where a gradient of any model overflowed.
    Raises:
        BadStepError: a gradient is out of line; no model has changed.
        NumericsError: gradients overflow however small the scale.
    """
    gradients = [learner.finished_gradients() for learner in learners]
    world = learners[0].shards.world
    flat = [gradient for part in gradients for gradient in part]
    overflowed = scaler.overflowed(flat, world.all_reduce_ if world.size > 1 else None)
    norms = None
    if overflowed:
        for learner in learners:
            learner.forget()
    else:
        scaler.unscale_(flat)
        try:  # all norms before the first update: a bad gradient leaves every model as it was
            pairs = zip(learners, gradients, strict=True)
            norms = [learner.sound_norm(part) for learner, part in pairs]
        except BadStepError:
            for learner in learners:
                learner.forget()
            raise
        for learner, part, norm in zip(learners, gradients, norms, strict=True):
            learner.apply(part, norm)
    if scaler.update(overflowed):
        for learner in learners:
            learner.shards.restart_feedback()
    if scaler.skipped_in_a_row >= _MOST_SKIPPED:
        raise NumericsError(
            f"{learners[0].name}: the gradient must be finite in fp16 at some loss scale; got "
            f"overflows in {scaler.skipped_in_a_row} steps in a row, down to scale "
            f"{scaler.scale:g}. Use --dtype bf16 or fp32, or look at the rows."
        )
    return norms
