"""The embedding and the vocabulary head of a model with trained rows (`token_rows`).

They replace the model's own two layers and hold the same weight objects under the same names, as
adapted layers do (`lora`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import ModelError
from tandem.models.frozen import LinearLayer
from tandem.models.token_rows import TokenRows

ROWS = "lora_tokens"
"""What a layer calls its rows."""


class TokenEmbedding(nn.Embedding):
    """nn.Embedding with trained rows. A pad token among them has a gradient, too.

    Attributes:
        embed_scale: what Gemma multiplies what it has looked up by; None: nothing.
    """

    embed_scale: Tensor | None

    def __init__(self, base: nn.Embedding, rows: TokenRows) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = base.num_embeddings, base.embedding_dim
        self.padding_idx = base.padding_idx
        self.max_norm, self.norm_type = base.max_norm, base.norm_type
        self.scale_grad_by_freq, self.sparse = base.scale_grad_by_freq, base.sparse
        self.weight, self.lora_tokens = base.weight, rows
        self.register_buffer("embed_scale", getattr(base, "embed_scale", None), persistent=False)
        self.train(base.training)

    def forward(self, token_ids: Tensor) -> Tensor:
        """(...) -> (..., D)."""
        found = self._look_up(token_ids, self.weight)
        found = self.lora_tokens.looked_up(token_ids, found, self._look_up)
        scale = self.embed_scale
        return found if scale is None else found * scale.to(self.weight.dtype)

    def plain_weight(self) -> Tensor:
        """The frozen matrix (V, D)."""
        return self.weight

    def merged_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """A new tensor: the matrix with the rows in it; `dtype` None: in the matrix's type."""
        return self.lora_tokens.merged(self.weight, dtype)

    @staticmethod
    def _look_up(token_ids: Tensor, matrix: Tensor) -> Tensor:
        return F.embedding(token_ids, matrix)


class TokenHead(LinearLayer, nn.Linear):
    """A vocabulary head, nn.Linear, with trained rows."""

    def __init__(self, base: nn.Linear, rows: TokenRows) -> None:
        self.take_over(base)
        self.lora_tokens = rows

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        return self.lora_tokens.multiplied(x, self.product(x), self._multiply)

    def merged_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """As of `TokenEmbedding`; a quantized matrix is dequantized."""
        return self.lora_tokens.merged(self.plain_weight(), dtype)

    def _multiply(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._linear(x, rows, None)


TokenLayer = TokenEmbedding | TokenHead


def token_layers(model: nn.Module) -> list[tuple[str, TokenLayer]]:
    """The layers with trained rows, with their names; a tied head has the embedding's."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, TokenEmbedding | TokenHead)]


def token_rows(model: nn.Module) -> list[TokenRows]:
    """All trained rows; those of a tied head once."""
    return [module for module in model.modules() if isinstance(module, TokenRows)]


def trained_tokens(model: nn.Module) -> tuple[int, ...]:
    """The tokens whose rows are trained, in ascending order; none without such rows."""
    ids = {int(i) for rows in token_rows(model) for i in rows.token_ids}
    return tuple(sorted(ids))


def matrices_of(model: PreTrainedModel) -> list[str]:
    """Names of the layers whose rows can be trained: the embedding, and a language model's head if
    it has a matrix of its own."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [embedding]
    if head is not None and head.weight is not embedding.weight:
        layers.append(head)
    return [n for wanted in layers for n, m in model.named_modules() if m is wanted][: len(layers)]


def attach_token_rows(
    model: PreTrainedModel, tokens: Mapping[str, Sequence[int]], *, with_memory: bool = False
) -> None:
    """Give layers rows of their own for some tokens, without values yet, in place.

    Args:
        tokens: to each of `matrices_of`, or to some. A tied head gets the embedding's rows.
        with_memory: on the host even where the model has none yet, since values come at once.
    Raises:
        ModelError: a layer that is not plain, or a token that the model does not have.
    """
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    head_name = next((n for n, m in model.named_modules() if m is head), "")
    for name, ids in tokens.items():
        layer: Any = model.get_submodule(name)
        _require_plain(model, name, layer, ids)
        device = layer.weight.device
        if with_memory and device.type == "meta":
            device = torch.device("cpu")
        rows = TokenRows(ids, layer.weight.shape[1], device)
        made = TokenEmbedding if isinstance(layer, nn.Embedding) else TokenHead
        model.set_submodule(name, made(layer, rows))
        if is_tied and isinstance(layer, nn.Embedding):
            _require_plain(model, head_name, head, ids)
            model.set_submodule(head_name, TokenHead(head, rows))


@torch.no_grad()
def start_token_rows(
    model: nn.Module,
    whole: Callable[[Tensor], Tensor] = Tensor.detach,
    put: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> None:
    """Copy the frozen matrices' rows into the trained ones, and into their kept start if there is
    one: outputs are those of the base.

    Args:
        whole: makes a weight that may be sharded whole. put: copies a whole tensor into such a one.
    """
    for _, layer in token_layers(model):
        rows = layer.lora_tokens
        if not rows.weight.is_meta:
            start = whole(layer.plain_weight())[rows.token_ids]
            for own in (rows.weight, rows.start):
                if own is not None:
                    put(own, start.to(own.dtype))


def _require_plain(model: PreTrainedModel, name: str, layer: Any, ids: Sequence[int]) -> None:
    family = model.config.model_type
    is_plain = type(layer) in (nn.Embedding, nn.Linear) or (
        type(layer).__name__.endswith("TextScaledWordEmbedding") and hasattr(layer, "embed_scale")
    )
    if not is_plain or getattr(layer, "max_norm", None) is not None:
        raise ModelError(
            f"lora.train_tokens must find a plain nn.Embedding and nn.Linear; got {layer!r} as "
            f"{name!r} of family {family!r}. Leave --lora.train-tokens out."
        )
    if getattr(layer, "bias", None) is not None:
        raise ModelError(
            f"lora.train_tokens must find a vocabulary head without a bias, which PEFT's format "
            f"loses; got one at {name!r} of family {family!r}. Leave --lora.train-tokens out."
        )
    rows = layer.weight.shape[0]
    unknown = [i for i in ids if not 0 <= i < rows]
    if unknown or not ids:
        raise ModelError(
            f"lora.train_tokens must name tokens that the model has, 0 to {rows - 1}; got "
            f"{unknown[0] if unknown else 'none'} for {name!r}. Resize its embeddings first."
        )
