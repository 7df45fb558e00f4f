"""Checks of a model folder before anything is built from it.

A folder may come from anywhere. Its index may point outside of it or to a pickle, its config may
ask for a billion layers or a terabyte of vocabulary, and the libraries that read it trust it. The
checks compare it with the safetensors headers, which say what is really there. They read a few
kilobytes and build the modules on the meta device, where they take no memory.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem.errors import ModelError
from tandem.models.folder import read_headers, read_index, read_object, require_small
from tandem.models.hf_logging import quiet
from tandem.text import cause_of, one_line

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_MOST_LABELS = 2**16
_FLOATS = {"F64", "F32", "F16", "BF16"}
# A classification folder lacks the vocabulary head, tied weights are stored once or twice, and
# computed tables (masks, rotations) are small compared with the weights.
_MOST_TIMES = 4
_MOST_MORE = 2**20
_MOST_BUFFER_BYTES = 2**32
# The config's counts of modules; its other numbers are dimensions.
_LAYERS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"}
_COUNTS = _LAYERS | {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
_known: dict[object, tuple[int, int]] = {}
"""What `_described` has found out."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What the weight files of a folder hold: tensors, values, the largest dimension."""

    num_tensors: int
    num_values: int
    largest_dim: int


def is_panic(error: BaseException) -> bool:
    """Whether Rust code panicked (in a tokenizer's regular expression, say): not an `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


def check_folder(folder: Path) -> None:
    """Check what libraries read unchecked: kinds of files, index, settings, numbers of labels.

    Raises:
        ModelError: something in the folder is neither a file nor a folder; the index names
            anything but safetensors files of this folder; generation settings or stop tokens are
            invalid; config.json names more than 65,536 labels.
    """
    for path in folder.iterdir():
        _require_readable(path)
    if (folder / _CONFIG).exists():
        _check_labels(folder / _CONFIG)
    read_index(folder)
    if (folder / _GENERATION_CONFIG).exists():
        settings = read_object(folder / _GENERATION_CONFIG)
        eos = settings.get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise ModelError(
                f"{str(folder / _GENERATION_CONFIG)!r} must give eos_token_id as token ids; got "
                f"{eos!r:.100}. Correct or remove the file."
            )
        try:
            with quiet():
                GenerationConfig.from_dict(settings)
        except Exception as error:  # a wrong value may raise anything
            raise ModelError(
                f"{str(folder / _GENERATION_CONFIG)!r} must be settings that transformers takes; "
                f"got: {cause_of(error)}. Correct or remove the file."
            ) from error


def check_weights(folder: Path, config: PreTrainedConfig, *, trust_remote_code: bool) -> None:
    """Compare a config with the weight files of its folder.

    Raises:
        ModelError: quantized weights, weights that are not floating-point numbers, attention code
            from the hub, or a config of a larger model, or of one that cannot be built.
    """
    attention = getattr(config, "_attn_implementation", None)
    if isinstance(attention, str) and "/" in attention:
        # transformers would fetch a kernel of that name and run it, trust_remote_code or not.
        raise ModelError(
            f"config.json of {str(folder)!r} must name no code of the hub's; got attention from "
            f"{attention!r:.100}. Take the attention out of config.json."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"model {str(folder)!r} must be stored unquantized, to be trained; got a "
            "quantization_config. Give the original model, or save it dequantized."
        )
    stored = _stored(folder)
    if stored is None:
        return  # the loader reports that there are no weights
    for name, count in _counts(config.to_dict()):
        most = stored.num_tensors if name in _LAYERS else stored.num_tensors + stored.largest_dim
        if count > most:
            raise _too_large(folder, f"{name}={count}", f"{stored.num_tensors} weights")
    is_decoder = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if is_decoder and not config.is_encoder_decoder:
        _check_sizes(folder, config, stored, trust_remote_code)


def check_finite(model: torch.nn.Module, name: str) -> None:
    """Refuse weights that are NaN or infinite.

    Raises:
        ModelError: with the name of the first.
    """
    for key, weight in model.state_dict().items():
        if not is_finite(weight):
            raise not_finite(name, key)


def is_finite(weight: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    # One pass without a mask in memory; only if the sum overflows, every value is looked at.
    return math.isfinite(float(weight.sum())) or bool(weight.isfinite().all())


def not_finite(name: str, weight: str) -> ModelError:
    """The error for a model with a weight that is NaN or infinite."""
    return ModelError(
        f"weights of {name!r} must be finite; got NaN or infinity in {weight}. "
        "Copy the model again, or take an earlier checkpoint."
    )


def _require_readable(path: Path) -> None:
    """Refuse a pipe, for example: reading it would wait forever."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # a broken link counts as no file
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ModelError(
            f"{str(path)!r} must be a regular file; got a pipe, a socket or a device. Remove it "
            "from the model's folder."
        )


def _check_labels(file: Path) -> None:
    """Limit the labels: transformers makes a name for each when it reads a config."""
    require_small(file)
    try:
        config = read_object(file)
    except ModelError:
        return  # the loader reports it
    waiting = [config]
    while waiting:
        part = waiting.pop()
        waiting += [value for value in part.values() if isinstance(value, dict)]
        labels = part.get("num_labels")
        if isinstance(labels, (int, float)) and not labels <= _MOST_LABELS:
            raise ModelError(
                f"{str(file)!r} must have at most {_MOST_LABELS} labels; got num_labels={labels}. "
                "A reward model has one. Copy or save the model again."
            )


def _stored(folder: Path) -> Stored | None:
    """None if there is no safetensors file; raises as `check_weights`."""
    if not any(folder.glob("*.safetensors")):
        return None
    tensors = read_headers(folder)
    for tensor in tensors:
        if tensor.name.endswith("weight") and tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{str(tensor.file)!r} must hold weights in 16, 32 or 64-bit floating point; got "
                f"{tensor.dtype} in {one_line(Exception(tensor.name))}. Give the original model, "
                "or save it dequantized."
            )
    return Stored(
        num_tensors=len(tensors),
        num_values=sum(math.prod(tensor.shape) for tensor in tensors),
        largest_dim=max((dim for tensor in tensors for dim in tensor.shape), default=0),
    )


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The config's counts of modules: layers and experts."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _counts(value)
        elif type(value) is int and name in _COUNTS:
            yield name, value


def _check_sizes(
    folder: Path, config: PreTrainedConfig, stored: Stored, trust_remote_code: bool
) -> None:
    try:
        described, buffers = _described(config, trust_remote_code)
    except Exception as error:  # a family's own code may raise anything
        raise ModelError(
            f"config.json of {str(folder)!r} must describe a model that can be built; got "
            f"{type(error).__name__}: {cause_of(error)}. Copy or save the model again."
        ) from error
    most = _MOST_TIMES * stored.num_values + _MOST_MORE
    if described > most:
        raise _too_large(folder, f"{described} values", str(stored.num_values))
    if buffers > _MOST_BUFFER_BYTES + 4 * most:
        raise _too_large(folder, f"tables of {buffers} bytes", f"{stored.num_values} values")


def _described(config: PreTrainedConfig, trust_remote_code: bool) -> tuple[int, int]:
    """Values of all weights, and bytes of all tables, of the model that a config describes.

    Of the families in transformers, whose modules their configs alone decide, this is remembered: a
    run reads each of its models' configs some six times.
    """
    described = None
    if not trust_remote_code:
        chosen = [getattr(config, f"_{part}_implementation", None) for part in ("attn", "experts")]
        described = (type(config), config.to_json_string(use_diff=False), *map(str, chosen))
    if described in _known:
        return _known[described]
    with torch.device("meta"), quiet():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    values = sum(weight.numel() for weight in model.parameters())
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    if described is not None:
        _known[described] = values, buffers
    return values, buffers


def _too_large(folder: Path, described: str, held: str) -> ModelError:
    return ModelError(
        f"config.json of {str(folder)!r} must describe the weights in its folder; got "
        f"{described} where the files hold {held}. Copy or save the model again."
    )
