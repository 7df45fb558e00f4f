"""Gradient checkpointing: keep the input of each layer, or of each MLP or attention alone, and
recompute the rest in the backward pass.

Layers are recomputed by Hugging Face's own switch. For parts, a mark on each MLP or attention
module tells the twin to compute it in a class that recomputes (`recomputing`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tandem.config.parallel import Recompute
from tandem.errors import ModelError
from tandem.models.blocks import decoder_blocks
from tandem.ops.attention_context import attending, current_step

RECOMPUTED = "tandem_recomputed"
"""The attribute of a module whose inner tensors are not kept."""

_PARTS = {
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "ffn"),
    "attention": ("self_attn", "attn", "attention", "self_attention"),
}
"""What families call the parts of a block."""


def enable_gradient_checkpointing(model: PreTrainedModel, recompute: Recompute = "layers") -> None:
    """Turn it on, in place; it has an effect in train mode.

    Non-reentrant, because reentrant checkpointing gives no gradient if a layer's input needs none,
    as in the first layer under LoRA with frozen embeddings. For that case transformers adds a hook
    to the embeddings, which is removed again.

    Args:
        recompute: what is computed again in the backward pass.
    Raises:
        ModelError: the family does not support it.
    """
    if recompute != "layers":
        for part in _parts(model, recompute):
            setattr(part, RECOMPUTED, True)
        return
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"family {model.config.model_type!r} must support gradient checkpointing; got "
            f"{type(model).__name__}, which does not. Set --no-gradient-checkpointing."
        )
    # renamed in transformers 5.23, where the old name warns
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.disable_input_require_grads()


def _parts(model: PreTrainedModel, recompute: Recompute) -> list[nn.Module]:
    """That part of every block."""
    parts = []
    for block in decoder_blocks(model):
        found = [
            child for name in _PARTS[recompute] if (child := block._modules.get(name)) is not None
        ]
        if not found:
            names = ", ".join(name for name, _ in block.named_children())
            raise ModelError(
                f"blocks of family {model.config.model_type!r} must keep their {recompute} in a "
                f"module of its own for --recompute {recompute}; got {names}. Use --recompute "
                "layers."
            )
        parts.append(found[0])
    return parts


def require_whole_layers(model: nn.Module, why: str) -> None:
    """Refuse a model that runs by its own forward, where nothing recomputes parts.

    Args:
        why: it has no twin that computes.
    Raises:
        ModelError: it was told to recompute parts.
    """
    if any(RECOMPUTED in module.__dict__ for module in model.modules()):
        raise ModelError(f"--recompute must be layers: {why}. Use --recompute layers.")


@cache
def recomputing(kind: Any) -> Any:
    """A class that computes as `kind`, and in training keeps its input alone."""

    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return kind.forward(self, *args, **keywords)
        return checkpointed(partial(kind.forward, self), *args, **keywords)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"forward": forward, **names})


def checkpointed(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Gradient checkpointing whose second forward has the attention metadata of the first."""
    step = current_step()

    def recompute(*inputs: Any, **given: Any) -> Any:
        with attending(step):
            return function(*inputs, **given)

    return checkpoint(recompute, *arguments, use_reentrant=False, **keywords)
