"""Hidden states of all tokens, vocabulary logits of the few that a loss needs.

The (B, T, V) logits of a whole batch are the largest tensor in RLHF, and almost all of it is
discarded. The base model returns (N, D) (`packed`), the caller picks the states that it needs, and
the model's own head code turns those into (N, V). Soft-caps, logit scales and biases are included,
because the model's own forward runs, over a stub of a base model that returns the given states.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from tandem.errors import ModelError, NumericsError
from tandem.models.modes import evaluating
from tandem.models.packed import hidden_states
from tandem.models.twin import twin_of
from tandem.text import first_line
from tandem.types import TokenBatch


@dataclass
class _GivenOutput(BaseModelOutputWithPastAndCrossAttentions):
    """Hidden states, and every other output that some family's forward passes on, all None."""

    router_logits: tuple[Tensor, ...] | None = None
    cache_params: Any = None


class _GivenStates(nn.Module):
    """Replaces the base model and returns the hidden states that it is given."""

    @property
    def decoder(self) -> _GivenStates:
        """OPT's forward calls the decoder of its base model."""
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _GivenOutput:
        """The states come as `inputs_embeds`, the one argument that every family passes on."""
        return _GivenOutput(last_hidden_state=inputs_embeds)


class VocabularyHead:
    """A model's head alone: (N, D) hidden states -> (N, V) logits, with gradient.

    Holds a copy of the model's twin object whose base model is replaced by a stub; every
    parameter is the model's own.

    Raises:
        ModelError: the base model cannot be replaced.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if model.base_model_prefix not in model._modules:
            raise ModelError(
                f"family {model.config.model_type!r} must keep its base model as "
                f"{model.base_model_prefix!r}; got {type(model).__name__} without it. This family "
                "is not supported."
            )
        # A copy of the twin, so that the head computes as in generation.
        self._twin = copy.copy(twin_of(model))
        self._twin._modules = {**self._twin._modules, model.base_model_prefix: _GivenStates()}

    def __call__(self, hidden: Tensor) -> Tensor:
        """(N, D) -> (N, V), in the dtype that the model's forward would give (`attending`)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self._twin(inputs_embeds=hidden[None], use_cache=False).logits.squeeze(0)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The head's parameters; sharded weights are whole only inside a forward."""
        return list(self._twin.parameters())


_heads: WeakKeyDictionary[PreTrainedModel, VocabularyHead] = WeakKeyDictionary()


def vocabulary_head(model: PreTrainedModel) -> VocabularyHead:
    """The VocabularyHead of the model's twin, built once per twin."""
    twin = twin_of(model)
    if twin not in _heads:
        _heads[twin] = VocabularyHead(model)
    return _heads[twin]


def vocabulary_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits (N, V) of hidden states (N, D), by the model's own head code."""
    return vocabulary_head(model)(hidden)


@torch.no_grad()
def check_head(model: PreTrainedModel, own: PreTrainedModel | None = None, seed: int = 0) -> None:
    """Compare hidden states plus head with the full forward on random tokens.

    Args:
        own: runs the full forward where the model itself cannot (`shared_copy.plain_copy`).
    Raises:
        ModelError: they differ, or a token's logits depend on later tokens or on padding.
        NumericsError: logits are not finite, as when float16 is too small for a model.
    """
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(config.vocab_size, (2, 6), generator=generator).to(model.device)
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    mask[1, 4:] = False
    own = own or model
    batch = TokenBatch(token_ids, mask, mask & False)
    try:
        with evaluating(model):
            full = own(input_ids=token_ids, attention_mask=mask.long(), use_cache=False).logits
            ours = _head_logits(model, hidden_states(model, batch))
            alone = own(input_ids=token_ids[1:, :4], use_cache=False).logits
    except RuntimeError as error:
        if model.dtype == torch.float32 or "dtype" not in str(error):
            raise
        raise ModelError(
            f"family {config.model_type!r} must compute in {model.dtype}; its own forward mixes "
            f"types: {first_line(error)}. Use --dtype fp32."
        ) from error
    family = config.model_type
    if not bool((full[mask] < math.inf).all()):  # minus infinity excludes a token
        raise NumericsError(
            f"logits of family {family!r} must be finite; got some that are not in {full.dtype}. "
            "Use --dtype bf16 or fp32 where float16 is too small, or an undamaged model."
        )
    if not _close(alone[0], full[1, :4]):
        raise ModelError(
            f"logits of family {family!r} must not depend on later tokens or right padding; got a "
            f"difference of {_difference(alone[0], full[1, :4]):.3g}. This family is not supported."
        )
    if not _close(ours, full[mask]):
        raise ModelError(
            f"logits of family {family!r} must follow from its last hidden states; got a largest "
            f"difference of {_difference(ours, full[mask]):.3g}. This family is not supported."
        )


def _head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """`vocabulary_logits`; an error if the forward needs more than hidden states."""
    try:
        return vocabulary_logits(model, hidden)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ModelError(
            f"logits of family {model.config.model_type!r} must follow from its last hidden "
            f"states; got {type(error).__name__}: {error}. This family is not supported."
        ) from error


def _difference(left: Tensor, right: Tensor) -> float:
    return float((left.float() - right.float()).abs().max())


def _close(left: Tensor, right: Tensor) -> bool:
    """Equal up to rounding, relative to the largest logit: 1.4e-3 in float32, 0.35 in bfloat16.

    Kernels sum in an order that depends on the shape, which adds up over layers. A missing cap,
    scale or mask changes logits by their own size.
    """
    scale = max(1.0, float(right.float().abs().max()))
    return _difference(left, right) <= 4 * math.sqrt(torch.finfo(left.dtype).eps) * scale
