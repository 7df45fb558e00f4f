"""What an engine's checkpoint holds, and what follows each step of its actor."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tandem.checkpoint.state import SavedState
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.update import restore_training, training_state


def follow_actor(engine: RLHFEngine) -> dict[str, float]:
    """Bring the moving average, and a reference that moves, up to date; call it after each
    optimizer step of the actor. Returns metrics of what has been done, to be added up."""
    if engine.ema is not None:
        engine.ema.update()
    if engine.moving_reference is None:
        return {}
    return {"reference_updates": float(engine.moving_reference.follow())}


def engine_state(engine: RLHFEngine) -> dict[str, Mapping[str, Tensor]]:
    """Models in training with their optimizers, the average, and a reference that has moved."""
    tensors = training_state(engine.learners)
    if engine.ema is not None:
        tensors["ema"] = engine.ema.state_tensors()
    if engine.moving_reference is not None:
        tensors["reference"] = engine.moving_reference.state_tensors()
    return tensors


def restore_engine(state: SavedState, engine: RLHFEngine) -> None:
    """Continue from `engine_state`.

    Raises:
        CheckpointError: the state is of other models.
    """
    restore_training(state, engine.learners)
    if engine.ema is not None:
        engine.ema.load_state_tensors(state.tensors["ema"])
    if engine.moving_reference is not None:
        engine.moving_reference.load_state_tensors(state.tensors["reference"])
