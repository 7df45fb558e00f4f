"""Gradient checkpointing: keep each layer's input, recompute the rest in the backward pass."""

from __future__ import annotations

from transformers import PreTrainedModel

from tandem.errors import ModelError


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Turn it on, in place; it has an effect in train mode.

    Non-reentrant, because reentrant checkpointing gives no gradient if a layer's input needs none,
    as in the first layer under LoRA with frozen embeddings. For that case transformers adds a hook
    to the embeddings, which is removed again.

    Raises:
        ModelError: the family does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"family {model.config.model_type!r} must support gradient checkpointing; got "
            f"{type(model).__name__}, which does not. Set --no-gradient-checkpointing."
        )
    # renamed in transformers 5.23, where the old name warns
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.disable_input_require_grads()
