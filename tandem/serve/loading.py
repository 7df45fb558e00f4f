"""Models from where they are found: weights, tokenizer, renderer, and how tokens read."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.checkpoint.beside import verify_beside
from tandem.checkpoint.state import SavedState, take_newest
from tandem.config.schema import RunConfig
from tandem.data.chat.own_template import OwnTemplate, put_template, read_template
from tandem.data.render import IN_MEMORY, Renderer
from tandem.data.trained_tokens import tokens_to_train
from tandem.errors import CheckpointError, ModelError
from tandem.generation.laying_out import lay_out_model
from tandem.generation.limits import max_positions, vocabulary_size
from tandem.models.adapter import load_adapter
from tandem.models.checkpoint_ref import model_folders
from tandem.models.eos import load_stop_ids
from tandem.models.load import check_vocabulary, load_causal_lm, load_tokenizer, open_decoder
from tandem.models.lora import add_lora
from tandem.models.quantized import Layout
from tandem.models.scalar import load_scalar_model
from tandem.models.source import Located, load_config, locate, positions_in, whole_model
from tandem.serve.place import Place, put, read_from
from tandem.serve.sources import BASE, ModelSource
from tandem.serve.token_bytes import TokenBytes

_KEPT_RENDERERS = 8
"""Renderers with variables set that are kept for a model, for the next request like it."""
_NOT_LINEAR = ("embed", "wte", "wpe", ".experts.")
"""In the names of matrices that are looked up, or stacked in the model."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How models are loaded. verify: check files against their manifests."""

    place: Place
    trust_remote_code: bool = False
    verify: bool = True

    def dtype_of(self, source: ModelSource) -> torch.dtype:
        """The type that a model will compute in.

        Raises:
            ModelError: there is no such model.
        """
        return self.place.dtype_of(
            source.base or source.path, trust_remote_code=self.trust_remote_code
        )


@dataclass(eq=False)
class Loaded:
    """A language model that can answer.

    version: of its files when they were read. step: of the checkpoint that it is, 0 for a
    finished model.
    """

    source: ModelSource
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    version: str
    step: int = 0
    _renderers: dict[tuple[tuple[str, str], ...], Renderer] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What bytes a token stands for."""
        return TokenBytes(self.tokenizer)

    def rendering(self, variables: tuple[tuple[str, str], ...]) -> Renderer:
        """The renderer with variables of the chat template set; it takes a moment for new ones.

        Raises:
            ModelError: the template does not read one, or cannot be used with it.
        """
        if not variables:
            return self.renderer
        with self._lock:
            if variables not in self._renderers:
                tokenizer = copy(self.tokenizer)
                name = "the model's chat template"
                own = put_template(tokenizer, OwnTemplate(name, "", variables=variables))
                made = Renderer(tokenizer, self.renderer.stop_token_ids, own)
                self._renderers[variables] = made
            while len(self._renderers) > _KEPT_RENDERERS:
                del self._renderers[next(iter(self._renderers))]
            return self._renderers[variables]

    @property
    def vocabulary(self) -> int:
        """How many tokens the model has."""
        return vocabulary_size(self.model)

    @property
    def positions(self) -> int | None:
        """Most tokens of prompt and answer; None without a limit."""
        return max_positions(self.model)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a plain text without a terminator, BOS first if the tokenizer adds one; control
        strings in it are spelled out.

        Raises:
            DataError: the tokenizer refuses the text.
        """
        return tuple(self.renderer.document(text, IN_MEMORY).token_ids[:-1])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, control tokens shown by name."""
        text = self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return str(text)


@dataclass(eq=False)
class LoadedScalar:
    """A reward model or a critic, and how its conversations are rendered."""

    source: ModelSource
    model: PreTrainedModel
    renderer: Renderer

    @property
    def positions(self) -> int | None:
        """Most tokens of prompt and answer; None without a limit."""
        return max_positions(self.model)


def load_policy(
    source: ModelSource, settings: LoadSettings, config: RunConfig | None = None
) -> Loaded:
    """A policy with its weights.

    Args:
        config: of the run, for a stage that is not finished and for what the run started from,
            whose tokenizers have not been saved with the run's chat template.
    Raises:
        ModelError, CheckpointError: it cannot be used.
    """
    version = source.version()
    _verify(source, settings)
    tokenizer = load_tokenizer(_tokenizer_of(source), trust_remote_code=settings.trust_remote_code)
    if config is not None and (source.checkpoints is not None or source.name == BASE):
        put_template(tokenizer, read_template(config.dataset.own_template))
    dtype = settings.dtype_of(source)
    model = _policy_weights(source, dtype, settings)
    step = 0
    if source.checkpoints is not None:
        step = _take_checkpoint(model, source, config, tokenizer)
    check_vocabulary(model, tokenizer)
    stop_ids = load_stop_ids(source.base or source.path)
    renderer = Renderer(tokenizer, stop_ids)
    put(model, settings.place.device, dtype, settings.place.weights)
    lay_out_model(model)
    return Loaded(source, model, tokenizer, renderer, version, step)


def load_scorer(source: ModelSource, settings: LoadSettings) -> LoadedScalar:
    """A reward model or critic; it must have its head.

    Raises:
        ModelError, CheckpointError: it cannot be used.
    """
    _verify(source, settings)
    remote = settings.trust_remote_code
    tokenizer = load_tokenizer(_tokenizer_of(source), trust_remote_code=remote)
    if source.base:
        model = load_scalar_model(source.base, seed=0, trust_remote_code=remote)
        load_adapter(model, source.path)
    else:
        model = load_scalar_model(
            source.path, seed=0, from_causal_lm=None, trust_remote_code=remote
        )
    put(model, settings.place.device, settings.dtype_of(source))
    return LoadedScalar(source, model, Renderer(tokenizer))


def check_there(source: ModelSource, settings: LoadSettings) -> None:
    """Read a model's config alone, so that a misspelled name is told before anything else.

    Raises:
        ModelError: there is no such model, or it is not a decoder.
    """
    open_decoder(source.base or source.path, trust_remote_code=settings.trust_remote_code)


def is_in_hub(name: str) -> bool:
    """Whether the hub, which is asked, or its cache has a model of that name."""
    try:
        return locate(name).folder is None
    except ModelError:
        return False


def weight_bytes(
    source: ModelSource, settings: LoadSettings, *, quantizes: bool
) -> tuple[int, torch.dtype] | None:
    """Bytes that a local model's weights will take, by its files, and in which type; None for a hub
    name, and where it cannot be read, which is told when the model is loaded.

    quantizes: matrices but embeddings and experts become what the settings say.
    """
    folder = Path(source.base or source.path).expanduser()
    if not folder.is_dir():
        return None
    from tandem.models.folder import read_headers

    if not (folder / "config.json").is_file():
        return None
    try:
        dtype = settings.dtype_of(source)
    except ModelError:
        return None
    kind = settings.place.weights if quantizes else ""
    size = 0
    for tensor in read_headers(folder):
        shape = torch.Size(tensor.shape)
        is_linear = len(shape) == 2 and not any(word in tensor.name for word in _NOT_LINEAR)
        if kind and is_linear:
            size += sum(Layout(kind, shape).sizes())
        else:
            size += shape.numel() * dtype.itemsize
    return size, dtype


def positions_of(source: ModelSource, settings: LoadSettings) -> int | None:
    """Most tokens of a local model's sequences, by its config; None without a limit, for a hub
    name, and where the config cannot be read, which is told when the model is loaded."""
    located = Located(str(Path(source.base or source.path).expanduser()))
    try:
        located = whole_model(located)
        if located.folder is None:
            return None
        return positions_in(load_config(located, trust_remote_code=settings.trust_remote_code))
    except ModelError:
        return None


def _policy_weights(
    source: ModelSource, dtype: torch.dtype, settings: LoadSettings
) -> PreTrainedModel:
    remote = settings.trust_remote_code
    if not source.base:
        path = source.path
        if source.checkpoints is None:  # whose adapters are put on what it started from
            path = read_from(path, settings.place.weights)
        return load_causal_lm(path, dtype=dtype, trust_remote_code=remote)
    model = load_causal_lm(source.base, dtype=dtype, trust_remote_code=remote)
    load_adapter(model, source.path)
    return model


def _verify(source: ModelSource, settings: LoadSettings) -> None:
    if settings.verify:
        if source.base:
            verify_beside(Path(source.path))
            return
        for folder in model_folders(source.path):
            verify_beside(folder)


def _tokenizer_of(source: ModelSource) -> str:
    """An adapter whose base was moved may have its own tokenizer; else it is the base's."""
    if source.base and not (Path(source.path) / "tokenizer_config.json").is_file():
        return source.base
    return source.path


def _take_checkpoint(
    model: PreTrainedModel,
    source: ModelSource,
    config: RunConfig | None,
    tokenizer: PreTrainedTokenizerBase,
) -> int:
    """Put the newest complete checkpoint's weights into a model; returns its step."""
    assert source.checkpoints is not None
    step, notes = take_newest(
        source.checkpoints, lambda state: _fill(model, state, source, config, tokenizer)
    )
    if step is None:
        raise CheckpointError(
            f"{source.checkpoints} must hold a complete checkpoint; got none"
            f"{f' ({notes[-1]})' if notes else ''}. Wait for the next one."
        )
    return step


@torch.no_grad()
def _fill(
    model: PreTrainedModel,
    state: SavedState,
    source: ModelSource,
    config: RunConfig | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    saved = state.tensors[source.part]
    parameters = dict(model.named_parameters())
    adapts = any(".lora_A." in name for name in saved)
    if adapts and not any(".lora_A." in name for name in parameters):
        assert config is not None
        add_lora(model, config.lora, config.seed, tokens_to_train(config.lora, tokenizer))
        parameters = dict(model.named_parameters())
    unknown = sorted(name for name in saved if name not in parameters)
    if unknown or not saved:
        raise ModelError(
            f"{source.checkpoints} must hold weights of {source.path!r}; got "
            f"{unknown[0] if unknown else 'none'}. It cannot be served before its stage is "
            "finished."
        )
    for name, tensor in saved.items():
        parameters[name].copy_(tensor.whole())
