"""A model's weights into safetensors files, one at a time: no rank ever holds the whole model.

Several ranks share the files. A sharded weight is gathered on the rank that writes its file,
written and freed. Names and layout are Hugging Face's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tandem.errors import ModelError
from tandem.files import replace
from tandem.models.blocks import decoder_blocks
from tandem.models.folder import INDEX
from tandem.models.frozen import LinearLayer
from tandem.models.lora import LoraLayer
from tandem.models.token_layers import TokenEmbedding, TokenHead
from tandem.tensor_files import Spec, TensorFile

_STEM = INDEX.split(".")[0]
MAX_FILE_BYTES = 4 * 2**30
"""A larger model has several files and an index."""
_MIN_SHARE_BYTES = 2**28
"""Files do not get smaller than this only to give every rank one."""


def _here(tensor: Tensor, rank: int) -> Tensor | None:
    return tensor


@dataclass(frozen=True, slots=True)
class Writers:
    """The ranks that write a folder together.

    rank: among them; -1 for one that only takes part in gathering.
    gather: gathers a weight on one rank (by its number); called by every rank for one weight after
        another. What it returns on other ranks is not used.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[Tensor, int], Tensor | None] = _here

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files that are not weights."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to write: its spec, and the function that makes it on every rank when it is due."""

    spec: Spec
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Weight:
        """A tensor that exists already."""
        return cls(Spec.of(tensor), lambda: tensor)


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are written together.

    weights: by the model's names. specs: of the converted tensors, by the file's names.
    convert: turns the former into the latter.
    """

    weights: Mapping[str, Weight]
    specs: Mapping[str, Spec]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]

    @property
    def num_bytes(self) -> int:
        """The size in a file."""
        return sum(spec.num_bytes for spec in self.specs.values())


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file to write."""

    name: str
    units: Sequence[Unit]
    metadata: Mapping[str, str]

    @property
    def specs(self) -> dict[str, Spec]:
        """Its tensors."""
        return {name: spec for unit in self.units for name, spec in unit.specs.items()}


def model_units(model: PreTrainedModel, dtype: torch.dtype | None) -> list[Unit]:
    """A model's weights, merged and dequantized, in Hugging Face's layout; nothing is computed yet.

    Args:
        dtype: of floating-point weights in the files; None leaves each as it is.
    """
    weights = _merged_weights(model, dtype)
    groups: dict[str, list[str]] = {}
    prefixes = _block_prefixes(model)
    for name in weights:
        groups.setdefault(next((p for p in prefixes if name.startswith(p)), ""), []).append(name)
    units = []
    for names in groups.values():
        empty = {name: _empty(weights[name].spec) for name in names}
        found = revert_weight_conversion(model, dict(empty))
        is_one_to_one = Counter(t.shape for t in found.values()) == Counter(
            t.shape for t in empty.values()
        )
        # Families with stacked experts convert a block's weights together.
        for part in [[name] for name in names] if is_one_to_one else [names]:
            named = {name: weights[name] for name in part}
            units.append(_unit(model, named, dtype))
    return units


def model_files(units: Sequence[Unit], num_ranks: int, max_bytes: int) -> list[WeightFile]:
    """The files for `units`, in order: one if they are small enough."""
    total = sum(unit.num_bytes for unit in units)
    share = max(_MIN_SHARE_BYTES, -(-total // num_ranks))
    limit = min(max_bytes, share) if num_ranks > 1 else max_bytes
    parts: list[list[Unit]] = [[]]
    filled = 0
    for unit in units:
        if parts[-1] and filled + unit.num_bytes > limit:
            parts.append([])
            filled = 0
        parts[-1].append(unit)
        filled += unit.num_bytes
    names = [f"{_STEM}-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    if len(parts) == 1:
        names = [f"{_STEM}.safetensors"]
    metadata = {"format": "pt"}
    return [WeightFile(n, part, metadata) for n, part in zip(names, parts, strict=True)]


def write_index(folder: Path, files: Sequence[WeightFile]) -> None:
    """Write the index, if there are several files."""
    if len(files) == 1:
        return
    specs = [spec for file in files for spec in file.specs.values()]
    index = {
        "metadata": {
            "total_parameters": sum(spec.num_bytes // spec.dtype.itemsize for spec in specs),
            "total_size": sum(spec.num_bytes for spec in specs),
        },
        "weight_map": {name: file.name for file in files for name in sorted(file.specs)},
    }
    replace(folder / INDEX, _json(index))


def write_files(folder: Path, files: Sequence[WeightFile], writers: Writers) -> None:
    """Write the files, distributed over the ranks; every rank calls it.

    The ranks take turns in gathering, so that all of them write at the same time.

    Raises:
        OSError: this rank could not write; it has still taken part in the gathering.
    """
    if writers.rank >= 0:
        folder.mkdir(parents=True, exist_ok=True)
    tasks = [
        [(file, unit) for file in files[rank :: writers.size] for unit in file.units]
        for rank in range(writers.size)
    ]
    refused: OSError | None = None
    opened: tuple[WeightFile, TensorFile] | None = None
    for turn in zip_longest(*tasks):
        for rank, task in enumerate(turn):
            if task is None:
                continue
            file, unit = task
            made = {n: writers.gather(w.make(), rank) for n, w in unit.weights.items()}
            if rank != writers.rank or refused is not None:
                continue
            try:
                if opened is None or opened[0] is not file:
                    (folder / file.name).unlink(missing_ok=True)
                    opened = file, TensorFile(folder / file.name, file.specs, file.metadata)
                whole = {name: tensor for name, tensor in made.items() if tensor is not None}
                for name, tensor in unit.convert(whole).items():
                    opened[1].put(name, tensor)
                if unit is file.units[-1]:
                    opened[1].close()
            except OSError as error:
                refused = error
    if refused is not None:
        raise refused


def remove_others(folder: Path, files: Sequence[WeightFile]) -> None:
    """Remove weight files of an earlier save with other names."""
    index = {INDEX} if len(files) > 1 else set()
    for old in folder.glob(f"{_STEM}*.safetensors*"):
        if old.name not in {file.name for file in files} | index:
            old.unlink()


def plain_unit(weights: Mapping[str, Weight]) -> Unit:
    """Weights that are written as they are."""
    return Unit(weights, {name: weight.spec for name, weight in weights.items()}, dict)


def _merged_weights(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, Weight]:
    """Every weight under the unadapted model's name, adapters merged in and quantized ones
    dequantized when they are due; a tied weight once."""
    state = model.state_dict()
    weights = {name: Weight.of(t) for name, t in state.items()}
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearLayer | TokenEmbedding):
            continue
        own = {f"{name}.weight", f"{name}.bias"}
        for inner in [n for n in weights if n.startswith(f"{name}.") and n not in own]:
            del weights[inner]
        shape, kept = tuple(layer.weight.shape), layer.weight.dtype
        if isinstance(layer, LoraLayer | TokenEmbedding | TokenHead):  # rounded once
            spec = Spec(dtype or kept, shape)
            make: Callable[[], Tensor] = partial(layer.merged_weight, dtype or kept)
        else:
            spec, make = Spec(kept, shape), layer.plain_weight
        weights[f"{name}.weight"] = Weight(spec, partial(_without_gradient, make))
    unwanted = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name in _repeated(model, weights) | unwanted:
        weights.pop(name, None)
    return weights


def _repeated(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """The names of tied weights that the files have under another name."""
    owners = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    holders = Counter(owners[name] for name in names if name in owners)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    repeated = set()
    for name in sorted(tied):
        if holders[owners.get(name, 0)] > 1:
            holders[owners[name]] -= 1
            repeated.add(name)
    return repeated


def _unit(model: PreTrainedModel, weights: dict[str, Weight], dtype: torch.dtype | None) -> Unit:
    def convert(whole: dict[str, Tensor]) -> dict[str, Tensor]:
        converted = revert_weight_conversion(model, whole)
        if dtype is None:
            return converted
        return {n: t.to(dtype) if t.is_floating_point() else t for n, t in converted.items()}

    empty = convert({name: _empty(weight.spec) for name, weight in weights.items()})
    return Unit(weights, {name: Spec.of(tensor) for name, tensor in empty.items()}, convert)


def _block_prefixes(model: PreTrainedModel) -> list[str]:
    """The prefixes of the names of each block's weights."""
    try:
        blocks = {id(block) for block in decoder_blocks(model)}
    except ModelError:  # a family that cannot be sharded is one unit
        return []
    return [f"{name}." for name, module in model.named_modules() if id(module) in blocks]


def _empty(spec: Spec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def _without_gradient(make: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return make().detach()


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
