"""A model out: a folder that from_pretrained opens, tokenizer and chat template included."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from tandem.errors import ModelError, NumericsError
from tandem.models.adapter import save_adapter
from tandem.models.hf_logging import quiet
from tandem.models.lora import is_adapted, scalar_head
from tandem.models.weight_files import (
    MAX_FILE_BYTES,
    Writers,
    model_files,
    model_units,
    remove_others,
    write_files,
    write_index,
)

ADAPTER_FOLDER = "adapter"


def saved_bytes(model: PreTrainedModel, dtype: torch.dtype | None = None) -> int:
    """Bytes of the weights that `save_model` will write, without the adapter's folder."""
    return sum(unit.num_bytes for unit in model_units(model, dtype))


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    base_path: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    writers: Writers | None = None,
) -> None:
    """Write weights (safetensors), config, generation config, tokenizer and its chat template.

    A model with adapters is written twice: merged in `folder`, and the adapter in
    `folder/adapter`, with the tokenizer and its template too: the base may have others. The model
    is not changed.

    A scalar model's config gets the tokenizer's pad token, but only if that is not the EOS token:
    Hugging Face's pooling skips every pad id, so with pad = EOS it would score the token before
    the EOS. Without a pad token it refuses batches of several rows instead.

    Args:
        base_path: the base model that the adapter names; by default where the model came from.
        dtype: of the weights in the folder; by default each weight's own.
        max_file_bytes: larger models are saved in several files, with an index.
        writers: the ranks that write together, each its own files. None: only this process.
    Raises:
        ModelError: adapters without a known base.
        NumericsError: a weight is not finite, or would not be in `dtype`; nothing is written.
        OSError: this rank could not write; it has still taken part in the gathering.
    """
    _require_finite(model, dtype)
    target = Path(folder)
    base = str(base_path or model.name_or_path)
    if is_adapted(model) and not base:
        raise ModelError(
            "save_model must know the base of a model with adapters; got none. Give base_path."
        )
    writers = writers or Writers()
    files = model_files(model_units(model, dtype), writers.size, max_file_bytes)
    write_files(target, files, writers)
    if is_adapted(model):
        save_adapter(model, target / ADAPTER_FOLDER, base, writers=writers)
    if not writers.is_first:
        return
    remove_others(target, files)
    write_index(target, files)
    _write_settings(model, tokenizer, target, dtype)
    if is_adapted(model):
        with quiet():
            _write_tokenizer(tokenizer, target / ADAPTER_FOLDER)


def _write_settings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    dtype: torch.dtype | None,
) -> None:
    """Everything but weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype or model.dtype
    if scalar_head(model) is not None:
        pad = tokenizer.pad_token_id
        config.pad_token_id = None if pad == tokenizer.eos_token_id else pad
    with quiet():
        if model.is_remote_code():
            custom_object_save(model, target, config=config)  # type: ignore[arg-type]
        config.save_pretrained(target)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(target)
        _write_tokenizer(tokenizer, target)


def _write_tokenizer(tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """As save_pretrained, but an error of the disk in its Rust code becomes an OSError too."""
    try:
        tokenizer.save_pretrained(target)
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError) or number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(target)) from error


def _require_finite(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise NumericsError(
                f"weights to save must be finite; got {name} with values that are not. "
                "Lower the learning rate, and continue from a checkpoint before it."
            )
        if dtype == torch.float16 and not bool(torch.isfinite(parameter.to(dtype)).all()):
            raise NumericsError(
                f"weights to save must fit into their type; got {name} with values beyond "
                "float16's 65504. Use --save-dtype bf16 or fp32."
            )
