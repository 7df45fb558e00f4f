"""A model out: a folder that from_pretrained opens, tokenizer and chat template included."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.errors import ModelError, NumericsError
from tandem.models.adapter import save_adapter
from tandem.models.lora import is_adapted, merged_state_dict, scalar_head
from tandem.models.quiet import quiet

ADAPTER_FOLDER = "adapter"


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    base_path: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write weights (safetensors), config, generation config, tokenizer and its chat template.

    A model with adapters is written twice: merged in `folder`, and the adapter in
    `folder/adapter`. The model is not changed.

    A scalar model's config gets the tokenizer's pad token, but only if it is a token of its own:
    Hugging Face's pooling skips every pad id, so with pad = EOS it would score the token before
    the EOS. Without a pad token it refuses batches of several rows instead.

    Args:
        base_path: the base model that the adapter names; by default where the model came from.
        dtype: of the weights in the folder; by default the model's own, float32.
    Raises:
        ModelError: adapters without a known base.
        NumericsError: a weight is not finite; nothing is written.
    """
    _require_finite(model)
    target = Path(folder)
    base = str(base_path or model.name_or_path)
    if is_adapted(model) and not base:
        raise ModelError(
            "save_model must know the base of a model with adapters; got none. Give base_path."
        )
    config = copy.deepcopy(model.config)
    with quiet():
        model.save_pretrained(target, state_dict=_state(model, dtype))
        tokenizer.save_pretrained(target)
        config.architectures = model.config.architectures
        config.dtype = dtype or model.dtype
        if scalar_head(model) is not None:
            pad = tokenizer.pad_token_id
            config.pad_token_id = None if pad == tokenizer.eos_token_id else pad
        config.save_pretrained(target)
    if is_adapted(model):
        save_adapter(model, target / ADAPTER_FOLDER, base)


def _require_finite(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise NumericsError(
                f"weights to save must be finite; got {name} with values that are not. "
                "Lower the learning rate, and continue from a checkpoint before it."
            )


def _state(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The merged state, cast if asked; tensors that share memory still share it when cast."""
    state = merged_state_dict(model)
    if dtype is None:
        return state
    cast: dict[int, Tensor] = {}
    for tensor in state.values():
        if tensor.is_floating_point() and tensor.data_ptr() not in cast:
            cast[tensor.data_ptr()] = tensor.to(dtype)
    return {name: cast.get(tensor.data_ptr(), tensor) for name, tensor in state.items()}
