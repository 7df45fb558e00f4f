"""Weights straight from safetensors into where they belong: no rank ever holds a whole model.

Every run loads its models like this. A model is made without weights (parameters on the meta
device, buffers real), adapted, quantized, sharded and then filled: of every weight a rank reads its
own rows from the files and nothing else, and quantizes those. Where files and model do not match
one to one (a family that stores its experts otherwise, weights that are missing or left over),
`load` loads it whole through transformers, or says what is wrong.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.models.adapter import load_adapter
from tandem.models.build import build_model
from tandem.models.checkpoint_ref import CheckpointRef
from tandem.models.classifiers import one_output, take_backbone
from tandem.models.composite import (
    decoder_names,
    is_other_form,
    is_transposed,
)
from tandem.models.folder import incomplete, is_equal, read_headers, read_index
from tandem.models.load import open_decoder, take_generation_config
from tandem.models.lora import SCALAR_HEAD, scalar_head
from tandem.models.quantized import PackedWeight, Pieces
from tandem.models.scalar import has_scalar_head
from tandem.models.source import files_of, keep_layer_numbers, keep_saved_dtype, whole_family
from tandem.models.validate_checkpoint import is_finite
from tandem.tensor_files import open_tensors

_HEAD = f"{SCALAR_HEAD}."


class WeightFiles:
    """The safetensors files of a model folder, read row by row."""

    def __init__(self, folder: Path, family: str = "") -> None:
        """Reads only names and shapes.

        Args:
            family: of the model with image or audio parts that they are of; "": of none.
        Raises:
            ModelError: the files are damaged, or not those of the index.
        """
        headers = {(tensor.file.name, tensor.name): tensor for tensor in read_headers(folder)}
        index = read_index(folder)
        # Without an index, a name that is in several files is read from the last.
        listed = index or {name: file for file, name in headers}
        if missing := [name for name, file in listed.items() if (file, name) not in headers]:
            raise incomplete(folder, f"no {missing[0]!r:.100} in {listed[missing[0]]!r}")
        self._files = {name: folder / file for name, file in listed.items()}
        self._stored = {name: headers[file, name] for name, file in listed.items()}
        self.shapes = {name: headers[file, name].shape for name, file in listed.items()}
        self.family = family
        self._transposed: set[str] = set()

    def fit(self, name: str, key: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor holds a model's parameter; from then on `rows` gives it in that form.

        Args:
            name: of the parameter. key: of the tensor. shape: of the parameter.
        """
        stored = self.shapes[key]
        if stored == shape or not is_other_form(name, stored, shape, self.family):
            return stored == shape
        if is_transposed(name, stored, shape):
            self._transposed.add(key)
        return True

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `first` to `last` of a tensor, float32."""
        with open_tensors(self._files[name]) as opened:
            rows: Tensor = opened.get_slice(name)[first:last]
            rows = rows.transpose(1, 2) if name in self._transposed else rows
            return rows.to(torch.float32)

    def is_equal(self, first: str, second: str) -> bool:
        """Whether two tensors are the same."""
        return is_equal(self._stored[first], self._stored[second])


class MetaModel:
    """A model without weights, and the files to fill it from.

    Attributes:
        model: parameters on the meta device, buffers real; float32, in eval mode.
        missing: parameters that the files do not have: a new scalar head.
        unties: the files have other numbers for weights that the config ties.
    """

    def __init__(
        self, model: PreTrainedModel, files: WeightFiles, *, trust_remote_code: bool = False
    ) -> None:
        """Matches the model's names with those of the files.

        Raises:
            KeyError: they do not match one to one.
        """
        self.model = model
        self._files = files
        self._trust_remote_code = trust_remote_code
        self._keys: dict[str, str] = {}
        self.missing: list[str] = []
        prefix = f"{model.base_model_prefix}."
        state = model.state_dict(keep_vars=True)
        self._buffers = {name for name, _ in model.named_buffers() if name in state}
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        shapes |= {name: tuple(state[name].shape) for name in self._buffers}
        stored = decoder_names(files.shapes, shapes, files.family)
        without: list[str] = []
        for name, shape in shapes.items():
            names = [stored[n] for n in (name, name.removeprefix(prefix)) if n in stored]
            found = [key for key in names if shape and files.fit(name, key, shape)]
            if found:
                self._keys[name] = found[0]
            elif name.startswith(_HEAD):
                self.missing.append(name)
            elif name not in self._buffers:  # older files lack some, which the model then computes
                without.append(name)
        self.unties = self._has_other_numbers(stored)
        used = set(self._keys.values())
        left = _left_over(model, {n: k for n, k in stored.items() if k not in used}, prefix)
        # Some families' files call the vocabulary head by another name (GPT-NeoX: embed_out).
        if len(without) == len(left) == 1 and files.shapes[left[0]] == shapes[without[0]]:
            self._keys[without[0]] = left.pop()
        elif without:
            raise KeyError(without[0])
        rows = model.config.get_text_config().vocab_size
        if scalar_head(model) is not None and self.missing:  # a language model's vocabulary head
            left = [key for key in left if files.shapes[key][:1] != (rows,)]
        if left:
            raise KeyError(left[0])

    def _has_other_numbers(self, stored: dict[str, str]) -> bool:
        """Whether the second name of a tied weight is in the files, with another tensor."""
        first: dict[int, str] = {}
        names = self.model.named_parameters(remove_duplicate=False)
        pairs = [(first.setdefault(id(weight), name), name) for name, weight in names]
        return any(
            not self._files.is_equal(self._keys[known], stored[name])
            for known, name in pairs
            if known != name and known in self._keys and name in stored
        )

    def adapt(self, start: CheckpointRef) -> None:
        """Put the adapter that the model starts from on it, live, with memory of its own.

        A scalar model's adapter brings its head; a language model's adapter does not.

        Raises:
            ModelError: as `adapter.load_adapter`.
        """
        assert start.adapter is not None
        head = scalar_head(self.model)
        if head is not None and not start.classifies:
            config, remote = self.model.config, self._trust_remote_code
            adapted = build_model(config, on_meta=True, trust_remote_code=remote)
            keep_layer_numbers(adapted, self._files.shapes)
            load_adapter(adapted, start.adapter)
            take_backbone(self.model, adapted)
            return
        if head is not None:
            head.to_empty(device="cpu")
            self.missing = []
            self._keys = {n: k for n, k in self._keys.items() if not n.startswith(_HEAD)}
        load_adapter(self.model, start.adapter)

    @torch.no_grad()
    def fill_buffers(self) -> str:
        """Read the buffers from the files, whole. `fill` does so too.

        Returns:
            the name of one that is not finite, or none.
        """
        buffers, unsound = dict(self.model.named_buffers()), ""
        for name in self._buffers & self._keys.keys():
            values = self._files.rows(self._keys[name], 0, len(buffers[name]))
            buffers[name].copy_(values)
            unsound = unsound if is_finite(values) else name
        return unsound

    @torch.no_grad()
    def fill(self, pieces: Pieces) -> str:
        """Read the parameters, which have memory by now, from the files.

        Args:
            pieces: gives the part of a parameter that is on this rank, and its first row.
        Returns:
            the name of a weight that is not finite, in what this rank has read; or none.
        """
        parameters = dict(self.model.named_parameters())
        unsound = self.fill_buffers()
        for name, key in self._keys.items():
            if name in self._buffers:
                continue
            # An adapted layer keeps the names (lora), a quantized one has them below it (frozen).
            if name not in parameters:
                weight = self.model.get_submodule(name)
                assert isinstance(weight, PackedWeight), name
                if not weight.fill(partial(self._files.rows, key), pieces):
                    unsound = name
                continue
            piece, first = pieces(parameters[name])
            if piece.numel():
                rows = self._files.rows(key, first, first + piece.shape[0])
                piece.copy_(rows)
                if not is_finite(rows):
                    unsound = name
        return unsound


def empty_causal_lm(
    path: str | Path, *, dropout: float = 0.0, trust_remote_code: bool = False
) -> MetaModel | None:
    """As `load.load_causal_lm`, without its weights; None if files and model do not match one to
    one, or it is an adapter's folder.

    Raises:
        ModelError: not a decoder, or damaged files.
    """
    return _empty(path, False, dropout, trust_remote_code)


def empty_scalar_model(
    path: str | Path, *, dropout: float = 0.0, trust_remote_code: bool = False
) -> MetaModel | None:
    """As `empty_causal_lm`, with a scalar head; one that the files lack is `missing`.

    Raises:
        ModelError: not a decoder, or damaged files.
    """
    return _empty(path, True, dropout, trust_remote_code)


def _empty(
    path: str | Path, scalar: bool, dropout: float, trust_remote_code: bool
) -> MetaModel | None:
    opened = open_decoder(path, scalar=scalar, dropout=dropout, trust_remote_code=trust_remote_code)
    source, config = opened.base, opened.config
    if opened.adapter is not None:
        return None
    files = WeightFiles(files_of(source), whole_family(source))
    stored = config.dtype
    if scalar and config.num_labels != 1:
        one_output(config)

    def matched() -> MetaModel:
        made = build_model(config, scalar=scalar, on_meta=True, trust_remote_code=trust_remote_code)
        made.name_or_path = source.name
        keep_saved_dtype(made, stored)
        keep_layer_numbers(made, files.shapes)
        if not scalar:
            take_generation_config(made, source)
        return MetaModel(made, files, trust_remote_code=trust_remote_code)

    try:
        empty = matched()
        if empty.unties:  # as from_pretrained does
            config.get_text_config().tie_word_embeddings = False
            empty = matched()
    except KeyError:
        return None
    return None if empty.missing and has_scalar_head(source, opened.config) else empty


def _left_over(model: PreTrainedModel, keys: dict[str, str], prefix: str) -> list[str]:
    """Keys of files that the model neither has nor ignores as from_pretrained does: second names
    of tied weights, and what its classes name.

    Args:
        keys: by the names that they have in a model.
    """
    ignored = [
        re.compile(pattern)
        for part in (model, model.base_model)
        for pattern in getattr(part, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied |= {name.removeprefix(prefix) for name in tied}
    return sorted(
        key
        for name, key in keys.items()
        if name not in tied and not any(p.search(key) for p in ignored)
    )
