"""Hidden states of all tokens, vocabulary logits of the few that a loss needs.

The (B, T, V) logits of a whole batch are the largest tensor in RLHF, and almost all of it is
discarded. The base model returns (N, D) (`packed`), the caller picks the states that it needs, and
the model's own head code turns those into (N, V). Soft-caps, logit scales and biases are included,
because the model's own forward runs, over a stub of a base model that returns the given states.
"""

from __future__ import annotations

import copy
import math
import re
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
from tandem.models.twin import running, twin_of
from tandem.models.twin_layers import TwinLinear
from tandem.ops import dense
from tandem.ops.logits import HeadProduct
from tandem.text import first_line
from tandem.types import TokenBatch


@dataclass
class _GivenOutput(BaseModelOutputWithPastAndCrossAttentions):
    """Hidden states, and every other output that some family's forward passes on, all None."""

    router_logits: tuple[Tensor, ...] | None = None
    shared_kv_states: Any = None
    # No field: transformers from 5.24 on warns of the name when one is set.
    cache_params = None


class _GivenStates(nn.Module):
    """Replaces the base model and returns the hidden states that it is given."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["_base"] = base  # no module of this one's

    def __getattr__(self, name: str) -> Any:
        """A number of the base model's: Falcon-H1's head is scaled by one."""
        found = getattr(self.__dict__["_base"], name)
        if isinstance(found, int | float):
            return found
        raise AttributeError(f"{name!r} of the base model")

    @property
    def decoder(self) -> _GivenStates:
        """OPT's forward calls the decoder of its base model."""
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _GivenOutput:
        """The states come as `inputs_embeds`, the one argument that every family passes on."""
        return _GivenOutput(last_hidden_state=inputs_embeds)


class _GivenLogits(nn.Module):
    """Replaces the head's linear layer and returns the logits that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: Tensor | None = None
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """What the linear layer would get, (1, n, D), is kept to be looked at."""
        assert self.logits is not None
        self.seen = x
        return self.logits[None]


_MIXES_TYPES = ("xlstm",)
"""Families whose own forward fails in half precision, but not in the few tokens of `check_head`."""


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
        base = self._twin._modules[model.base_model_prefix]
        assert base is not None
        self._twin._modules = {**self._twin._modules, model.base_model_prefix: _GivenStates(base)}
        layer = model.get_output_embeddings()
        names = [name for name, child in model._modules.items() if child is layer]
        self._layer_name = names[0] if layer is not None and len(names) == 1 else None
        self._is_product: bool | None = None
        self._is_plain = False
        self._after: _After | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """(N, D) -> (N, V), in the dtype that the model's forward would give (`attending`)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self._twin(inputs_embeds=hidden[None], use_cache=False).logits.squeeze(0)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The head's parameters; sharded weights are whole only inside a forward."""
        return list(self._twin.parameters())

    def product(self) -> HeadProduct | None:
        """The head as a product and what each of its numbers goes through after it, to be called
        where weights are whole; None if it is not of that kind, or its weight is quantized.

        It is found out once, by running the head's own code on random states.
        """
        if self._layer_name is None:
            return None
        layer = self._twin._modules[self._layer_name]
        if type(layer) is not TwinLinear:
            return None
        if self._is_product is None:
            self._after = _After(self._twin, self._layer_name)
            self._is_product = self._takes_apart(layer, self._after)
        if not self._is_product:
            return None
        return HeadProduct(layer.weight, layer.bias, None if self._is_plain else self._after)

    @torch.no_grad()
    def _takes_apart(self, layer: TwinLinear, after: _After) -> bool:
        """Whether the head is its linear layer, on the states as they are, and then a function of
        each number by itself."""
        weight, bias = layer.weight, layer.bias
        states = torch.randn(2, weight.shape[1], device=weight.device).to(weight.dtype)
        raw = dense.linear(states, weight, bias)
        cut = len(weight) // 3
        try:
            whole, parts = after(raw), [after(part) for part in (raw[:, :cut], raw[:, cut:])]
        except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
            return False
        self._is_plain = whole.data_ptr() == raw.data_ptr()
        return (
            after.passes_on(states)
            and whole.dtype == raw.dtype
            and torch.equal(torch.cat(parts, 1), whole)
            and torch.equal(self(states), whole)
        )


class _After:
    """A head without its linear layer: raw logits (n, v) -> (n, v), of any columns."""

    def __init__(self, twin: Any, name: str) -> None:
        self._given = _GivenLogits()
        self._twin = copy.copy(twin)
        self._twin._modules = {**twin._modules, name: self._given}

    def __call__(self, raw: Tensor) -> Tensor:
        return self._run(raw, raw)

    def passes_on(self, states: Tensor) -> bool:
        """Whether states (n, D) come to the linear layer unchanged."""
        self._run(states, states.new_zeros(len(states), 1))
        seen, self._given.seen = self._given.seen, None
        return seen is not None and torch.equal(seen.view(states.shape), states)

    def _run(self, states: Tensor, raw: Tensor) -> Tensor:
        self._given.logits = raw
        with torch.autocast(raw.device.type, enabled=False):
            logits: Tensor = self._twin(inputs_embeds=states[None], use_cache=False).logits
        self._given.logits = None
        return logits.squeeze(0)


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
def check_head(model: PreTrainedModel) -> None:
    """Compare hidden states plus head with the full forward on random tokens.

    Raises:
        ModelError: they differ, or a token's logits depend on later tokens or on padding.
        NumericsError: logits are not finite, as when float16 is too small for a model.
    """
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(config.vocab_size, (2, 6), generator=generator).to(model.device)
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    mask[1, 4:] = False
    batch = TokenBatch(token_ids, mask, mask & False)
    try:
        with evaluating(model):
            own = running(model)
            full = own(input_ids=token_ids, attention_mask=mask.long(), use_cache=False).logits
            ours = _head_logits(model, hidden_states(model, batch))
            alone = own(input_ids=token_ids[1:, :4], use_cache=False).logits
        if config.model_type in _MIXES_TYPES and model.dtype != torch.float32:
            raise RuntimeError("its products of longer rows have operands of another dtype")
    except RuntimeError as error:
        if model.dtype == torch.float32 or not re.search("dtype|scalar type", str(error)):
            raise
        raise ModelError(
            f"family {config.model_type!r} must compute in {model.dtype}; its own forward mixes "
            f"types: {first_line(error)}. Use --dtype fp32."
        ) from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # of the family's code
        raise ModelError(
            f"family {config.model_type!r} must run on token ids and a mask; got "
            f"{type(error).__name__}: {first_line(error)}. This family is not supported."
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
