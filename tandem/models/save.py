"""A model out: a folder that from_pretrained opens, tokenizer and chat template included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.errors import ModelError, NumericsError
from tandem.models.adapter import adapter_tensors, save_adapter
from tandem.models.lora import is_adapted, merged_state_dict, scalar_head
from tandem.models.quiet import quiet

ADAPTER_FOLDER = "adapter"


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    base_path: str | Path | None = None,
    dtype: torch.dtype | None = None,
    whole: Callable[[Tensor], Tensor] = _as_it_is,
    writes: bool = True,
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
        whole: all of a weight of which every rank has a piece; called for one after another.
        writes: whether this rank writes; the others only take part in `whole`.
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
    state = _state(model, dtype, whole, writes)
    adapter = adapter_tensors(model, whole) if is_adapted(model) else {}
    if not writes:
        return
    config = copy.deepcopy(model.config)
    with quiet():
        model.save_pretrained(target, state_dict=state)
        tokenizer.save_pretrained(target)
        # A split model's class is named for it.
        names = model.config.architectures or []
        config.architectures = [name.removeprefix("FSDP") for name in names] or None
        config.dtype = dtype or model.dtype
        if scalar_head(model) is not None:
            pad = tokenizer.pad_token_id
            config.pad_token_id = None if pad == tokenizer.eos_token_id else pad
        config.save_pretrained(target)
    if is_adapted(model):
        save_adapter(model, target / ADAPTER_FOLDER, base, tensors=adapter)


def _require_finite(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise NumericsError(
                f"weights to save must be finite; got {name} with values that are not. "
                "Lower the learning rate, and continue from a checkpoint before it."
            )


def _state(
    model: PreTrainedModel,
    dtype: torch.dtype | None,
    whole: Callable[[Tensor], Tensor],
    writes: bool,
) -> dict[str, Tensor]:
    """The merged state, whole and cast if asked, where this rank writes it.

    Tied weights are one tensor under all of their names.
    """
    # By identity: an address says nothing where a rank's piece is empty.
    owners = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    made: dict[int | str, Tensor] = {}
    state = merged_state_dict(model)
    for name, tensor in state.items():
        if owners.get(name, name) in made:
            continue
        full = whole(tensor)
        if full is not tensor and writes:
            full = full.cpu()  # the whole model may not fit beside its pieces on the device
        if writes and dtype is not None and full.is_floating_point():
            full = full.to(dtype)
        made[owners.get(name, name)] = full if writes else tensor
    return {name: made[owners.get(name, name)] for name in state} if writes else {}
