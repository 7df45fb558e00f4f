"""Whether a model can be prepared for training, seen without its weights."""

from __future__ import annotations

from tandem.config.engine import EngineSettings
from tandem.config.lora import TrainedRole
from tandem.engine.placement import prepare_for_training
from tandem.models.checkpoint_ref import checkpoint_ref_of
from tandem.models.meta_init import empty_causal_lm, empty_scalar_model
from tandem.models.recompute import enable_gradient_checkpointing


def check_start(
    source: str, settings: EngineSettings, role: TrainedRole, tokens: tuple[int, ...] = ()
) -> None:
    """Prepare a model as `Placement` will, by its config, the headers of its files and the adapter
    that it came with, if its training goes on with that one.

    A model that cannot be built without its weights is not looked at.

    Args:
        source: a folder or hub name.
        tokens: of `lora.train_tokens`, in its tokenizer.
    Raises:
        ModelError: its adapter is not the configured one, or its family cannot recompute what is
            to be recomputed.
    """
    start = checkpoint_ref_of(source, unmerged=settings.takes_adapters(role))
    recomputes = role in settings.checkpointed
    if start.adapter is None and not recomputes:
        return
    empty_model = empty_causal_lm if role == "actor" else empty_scalar_model
    empty = empty_model(start.base, trust_remote_code=settings.trust_remote_code)
    if empty is None:
        return
    if start.adapter is not None:
        empty.adapt(start)
        prepare_for_training(empty.model, settings, settings.seed, role=role, tokens=tokens)
    elif recomputes:
        enable_gradient_checkpointing(empty.model, settings.recompute)
