"""Weights straight from safetensors into where they belong: no rank ever holds a whole model.

A model is made without weights (its parameters on the meta device, its buffers real), adapted,
quantized, split over the ranks, and filled: of every weight a rank reads its own rows from the
files and nothing else, and quantizes those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from tandem.models.adapter import load_adapter
from tandem.models.checkpoint_ref import CheckpointRef
from tandem.models.classifiers import require_classifier
from tandem.models.folder import incomplete, read_headers, read_index
from tandem.models.hf_logging import quiet
from tandem.models.load import attention_for, name_backbone, require_decoder, set_dropout
from tandem.models.lora import SCALAR_HEAD, scalar_head
from tandem.models.quantized import PackedWeight, Pieces
from tandem.models.scalar import one_output, take_backbone
from tandem.models.source import (
    Located,
    keep_saved_dtype,
    load_config,
    locate,
    read_adapter_config,
)

_HEAD = f"{SCALAR_HEAD}."


class WeightFiles:
    """The safetensors files of a model folder, read row by row."""

    def __init__(self, folder: Path) -> None:
        """Reads names and shapes alone.

        Raises:
            ModelError: the files are not whole, or not those of the index.
        """
        headers = {(tensor.file.name, tensor.name): tensor for tensor in read_headers(folder)}
        index = read_index(folder)
        # Without an index a name that stands in several files is the last one's.
        listed = index or {name: file for file, name in headers}
        if missing := [name for name, file in listed.items() if (file, name) not in headers]:
            raise incomplete(folder, f"no {missing[0]!r:.100} in {listed[missing[0]]!r}")
        self._files = {name: folder / file for name, file in listed.items()}
        self.shapes = {name: headers[file, name].shape for name, file in listed.items()}

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `first` to `last` of a tensor, float32."""
        with safe_open(self._files[name], framework="pt") as opened:
            rows: Tensor = opened.get_slice(name)[first:last]
            return rows.to(torch.float32)


class MetaModel:
    """A model without weights, and what is needed to fill it.

    Attributes:
        model: parameters on the meta device, buffers real; float32, in eval mode.
        missing: parameters that the files do not have: a new scalar head.
    """

    def __init__(
        self, model: PreTrainedModel, files: WeightFiles, *, trust_remote_code: bool = False
    ) -> None:
        """`model`'s names are matched with the files'.

        Raises:
            KeyError: they cannot be matched one to one.
        """
        self.model = model
        self._files = files
        self._trust_remote_code = trust_remote_code
        self._keys: dict[str, str] = {}
        self.missing: list[str] = []
        prefix = f"{model.base_model_prefix}."
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        without: list[str] = []
        for name, shape in shapes.items():
            names = [name, name.removeprefix(prefix)]
            found = [key for key in names if files.shapes.get(key) == shape]
            if found:
                self._keys[name] = found[0]
            elif name.startswith(_HEAD):
                self.missing.append(name)
            else:
                without.append(name)
        # Some families' files call the vocabulary head by another name (GPT-NeoX: embed_out).
        left = [
            key
            for key in files.shapes.keys() - self._keys.values()
            if without and files.shapes[key] == shapes[without[0]]
        ]
        if len(without) == len(left) == 1:
            self._keys[without[0]] = left[0]
        elif without:
            raise KeyError(without[0])

    def adapt(self, start: CheckpointRef) -> None:
        """Put the adapter that the model starts from on it, live, with memory of its own.

        A scalar model's adapter brings its head; a language model's on a scalar model does not.

        Raises:
            ModelError: as `adapter.load_adapter`.
        """
        assert start.adapter is not None
        head = scalar_head(self.model)
        if head is not None and not start.classifies:
            config, remote = self.model.config, self._trust_remote_code
            adapted = _without_weights(AutoModelForCausalLM, config, remote)
            load_adapter(adapted, start.adapter)
            take_backbone(self.model, adapted)
            return
        if head is not None:
            head.to_empty(device="cpu")
            self.missing = []
            self._keys = {n: k for n, k in self._keys.items() if not n.startswith(_HEAD)}
        load_adapter(self.model, start.adapter)

    @torch.no_grad()
    def fill(self, pieces: Pieces) -> str:
        """Read the parameters, which have memory by now, from the files.

        Args:
            pieces: of a parameter, the memory that lies on this rank and its first row.
        Returns:
            the name of a weight to quantize that is not finite, as far as it lies here; or none.
        """
        parameters = dict(self.model.named_parameters())
        unsound = ""
        for name, key in self._keys.items():
            # An adapter keeps the base layer's names (lora), integers stand below them (frozen).
            if name not in parameters:
                weight = self.model.get_submodule(name)
                assert isinstance(weight, PackedWeight), name
                if not weight.fill(partial(self._files.rows, key), pieces):
                    unsound = name
                continue
            piece, first = pieces(parameters[name])
            if piece.numel():
                piece.copy_(self._files.rows(key, first, first + piece.shape[0]))
        return unsound


def empty_causal_lm(
    path: str | Path, *, dropout: float = 0.0, trust_remote_code: bool = False
) -> MetaModel | None:
    """As `load.load_causal_lm`, without its weights; None where files and model do not match one to
    one (an adapter's folder, a family whose weights are stored otherwise).

    Raises:
        ModelError: not a decoder, or damaged files.
    """
    return _empty(path, AutoModelForCausalLM, dropout, trust_remote_code)


def empty_scalar_model(
    path: str | Path, *, dropout: float = 0.0, trust_remote_code: bool = False
) -> MetaModel | None:
    """As `scalar.load_scalar_model`, without its weights; a head that the files lack is `missing`.

    Raises:
        ModelError: not a decoder, or damaged files.
    """
    return _empty(path, AutoModelForSequenceClassification, dropout, trust_remote_code)


def _empty(
    path: str | Path, kind: type, dropout: float, trust_remote_code: bool
) -> MetaModel | None:
    source = locate(path)
    if read_adapter_config(source) is not None:
        return None
    config = load_config(source, trust_remote_code=trust_remote_code)
    require_decoder(config, source.name)
    if kind is AutoModelForSequenceClassification:
        require_classifier(config, source.name)
    set_dropout(config, dropout)
    files = WeightFiles(_folder(source))
    stored = config.dtype
    model = _without_weights(kind, config, trust_remote_code)
    model.name_or_path = source.name
    keep_saved_dtype(model, stored)
    if kind is AutoModelForCausalLM:
        _take_generation_config(model, source)
    try:
        return MetaModel(model, files, trust_remote_code=trust_remote_code)
    except KeyError:
        return None


def _take_generation_config(model: PreTrainedModel, source: Located) -> None:
    """What from_pretrained does too: stop tokens and the like come from a file of their own."""
    with quiet(), suppress(OSError):  # a folder need not have one
        model.generation_config = GenerationConfig.from_pretrained(
            source.name, local_files_only=source.offline
        )


def _folder(source: Located) -> Path:
    if source.folder is not None:
        return source.folder
    patterns = ["*.safetensors", "*.json"]
    return Path(
        snapshot_download(source.name, allow_patterns=patterns, local_files_only=source.offline)
    )


def _without_weights(
    kind: type, config: PreTrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    if kind is AutoModelForSequenceClassification and config.num_labels != 1:
        one_output(config)
    with _parameters_on_meta(), quiet(), torch.random.fork_rng(devices=[]):
        model = kind.from_config(  # type: ignore[attr-defined]
            config,
            dtype=torch.float32,
            attn_implementation=attention_for(config),
            trust_remote_code=trust_remote_code,
        )
    assert isinstance(model, PreTrainedModel)
    name_backbone(model)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within: parameters lose their memory as they are registered; buffers keep theirs.

    Buffers that no file holds (rotation tables) are computed when a module is made, so a model made
    wholly on the meta device would lack them.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
