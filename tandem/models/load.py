"""Language models and tokenizers in: any Hugging Face decoder, every weight accounted for.

`load_causal_lm` and `scalar.load_scalar_model` load a whole model through transformers. A run loads
through `meta_init` instead, and comes here only for models whose files need converting.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tandem.errors import ModelError
from tandem.models.adapter import load_adapter
from tandem.models.build import (
    attention_for,
    build_model,
    name_backbone,
    require_decoder,
    set_dropout,
)
from tandem.models.classifiers import one_output, require_classifier
from tandem.models.composite import (
    KEY_MAPPING,
    decoder_names,
    is_beside_parts,
    is_other_form,
    other_parts,
)
from tandem.models.folder import read_headers
from tandem.models.hf_logging import quiet
from tandem.models.image_tokens import without_image_tokens
from tandem.models.rewritten import read_rewritten
from tandem.models.source import (
    Located,
    adapter_base,
    files_of,
    keep_layer_numbers,
    keep_saved_dtype,
    load_config,
    locate,
    read_adapter_config,
    read_names,
    require_config,
    whole_family,
)
from tandem.models.validate_checkpoint import check_finite, is_panic
from tandem.text import cause_of


@dataclass(frozen=True, slots=True)
class Opened:
    """A decoder that can be loaded. base: where its weights are. adapter: the folder of an adapter
    to put on them."""

    base: Located
    config: PreTrainedConfig
    adapter: str | None


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name; an adapter without one gets its base's.

    Raises:
        ModelError: there is no model, or no tokenizer that transformers can read.
    """
    source = locate(path)
    adapter = read_adapter_config(source)
    if adapter is not None and not (Path(source.name) / "tokenizer_config.json").is_file():
        source = adapter_base(source, adapter)
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(
                source.repository, trust_remote_code=trust_remote_code, **source.options
            )
    except BaseException as error:  # tokenizer files are of many formats, and so are their errors
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        require_config(source)
        raise ModelError(
            f"model {source.name!r} must have a tokenizer that transformers reads; got: "
            f"{cause_of(error)}. Put tokenizer.json and tokenizer_config.json in the folder."
        ) from error
    return without_image_tokens(tokenizer, source)


def open_decoder(
    path: str | Path, *, scalar: bool = False, dropout: float = 0.0, trust_remote_code: bool = False
) -> Opened:
    """Find a model, read its config and check it, before any weight is read.

    Args:
        scalar: it is to have a scalar head; else a vocabulary head.
        dropout: what every dropout rate of the config becomes.
    Raises:
        ModelError: there is no such model, or it is not a decoder.
    """
    source = locate(path)
    adapter = read_adapter_config(source)
    base = source if adapter is None else adapter_base(source, adapter)
    config = load_config(base, trust_remote_code=trust_remote_code)
    require_decoder(config, base.name)
    if scalar:
        require_classifier(config, base.name)
    set_dropout(config, dropout)
    return Opened(base, config, None if adapter is None else source.name)


def check_causal_lm(path: str | Path, *, trust_remote_code: bool = False) -> None:
    """Refuse a model that is no decoder or has no safetensors weights, before any is read.

    Raises:
        ModelError: as `load_causal_lm`.
    """
    require_safetensors(open_decoder(path, trust_remote_code=trust_remote_code).base)


def outline(
    path: str | Path, *, scalar: bool = False, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A model without memory for its weights, by its config alone: its layers and their names.

    Raises:
        ModelError: as `open_decoder`.
    """
    config = open_decoder(path, scalar=scalar, trust_remote_code=trust_remote_code).config
    if scalar:
        one_output(config)
    return build_model(config, scalar=scalar, on_meta=True, trust_remote_code=trust_remote_code)


def load_causal_lm(
    path: str | Path,
    *,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A decoder with its vocabulary head, in eval mode.

    A folder that holds a LoRA adapter loads the base it names and puts the adapter on it, live.

    Args:
        path: folder or hub name.
        dropout: what every dropout rate of the model becomes; layers are never skipped whole.
        dtype: of the weights, each rounded as it is read; adapters are float32.
        trust_remote_code: let the folder bring its own Python code.
    Raises:
        ModelError: not a decoder, pickled weights, damaged files, weights missing or left over.
    """
    opened = open_decoder(path, dropout=dropout, trust_remote_code=trust_remote_code)
    model = load_weights(
        opened.base, opened.config, dtype=dtype, trust_remote_code=trust_remote_code
    )
    if opened.adapter is not None:
        load_adapter(model, opened.adapter)
    return model


def load_weights(
    source: Located,
    config: PreTrainedConfig,
    *,
    scalar: bool = False,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A model by transformers' from_pretrained: in eval mode, from safetensors alone.

    Raises:
        ModelError: pickled weights, damaged or truncated files, tensors of the wrong shape, NaN;
            or the files lack a weight of the model, or have one that it does not know.
    """
    require_safetensors(source)
    names = read_names(source)
    family = whole_family(source)
    others = other_parts(names, family)
    is_named_otherwise = bool(others or (family and is_beside_parts(names, family)))
    kind: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    stored = config.dtype  # what makes a model writes the type that it is told into the config
    tensors = None if scalar else read_rewritten(source, config, dtype)
    if tensors is not None:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        with quiet():
            model, report = kind.from_pretrained(
                source.repository if tensors is None else None,
                config=config,
                dtype=dtype,
                attn_implementation=attention_for(config),
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
                **source.options,
                **_read_by(tensors, is_named_otherwise),
            )
    except Exception as error:  # a family's own code may raise anything for a wrong value
        _require_sizes(source, config, scalar, trust_remote_code, error)
        raise ModelError(
            f"weights of {source.name!r} must be complete safetensors files that fit config.json; "
            f"got: {cause_of(error)}. Copy or save the model again."
        ) from error
    missing, unexpected = set(report["missing_keys"]), set(report["unexpected_keys"])
    if is_named_otherwise:
        unexpected -= others
        model.__dict__.pop("_weight_conversions", None)  # it is saved under its own class's names
    check_finite(model, source.name)
    if missing or unexpected:
        raise ModelError(
            f"weights of {source.name!r} must be those of a {config.model_type} language model; "
            f"got {_some(missing)} missing and {_some(unexpected)} left over (the folder says "
            f"architectures={config.architectures}). Give a causal language model's folder, or "
            "save it again."
        )
    model.name_or_path = source.name
    if tensors is not None:
        take_generation_config(model, source)
    keep_saved_dtype(model, stored)
    keep_layer_numbers(model, names)
    name_backbone(model)
    _tie_as_loaded(model)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _read_by(tensors: dict[str, torch.Tensor] | None, is_named_otherwise: bool) -> dict[str, Any]:
    """Arguments of from_pretrained that say where tensors are from."""
    if tensors is not None:
        return {"state_dict": tensors}
    return {"key_mapping": KEY_MAPPING} if is_named_otherwise else {}


def take_generation_config(model: PreTrainedModel, source: Located) -> None:
    """As from_pretrained does: stop tokens and the like come from a file of their own."""
    with quiet(), suppress(OSError):  # a folder need not have one
        model.generation_config = GenerationConfig.from_pretrained(
            source.repository, **source.options
        )


def _require_sizes(
    source: Located,
    config: PreTrainedConfig,
    scalar: bool,
    trust_remote_code: bool,
    error: Exception,
) -> None:
    """Say which tensor of the files has another size than the model's, if one has."""
    files = {tensor.name: tensor.shape for tensor in read_headers(files_of(source))}
    try:
        model = build_model(
            config, scalar=scalar, on_meta=True, trust_remote_code=trust_remote_code
        )
    except Exception:  # no model of this config: the error tells more
        return
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    family = whole_family(source)
    for name, key in decoder_names(files, own, family).items():
        shape = own.get(name, files[key])
        if shape != files[key] and not is_other_form(name, files[key], shape, family):
            raise ModelError(
                f"weights of {source.name!r} must have the sizes that config.json says; got {name} "
                f"of {files[key]} instead of {shape}. Correct config.json, or save the model "
                "again."
            ) from error


def _tie_as_loaded(model: PreTrainedModel) -> None:
    """Where the files' head has other numbers than the embedding, from_pretrained ties none,
    whatever the config says; it says so too then."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    ties = head is not None and getattr(config, "tie_word_embeddings", False)
    if ties and head.weight is not model.get_input_embeddings().weight:
        config.tie_word_embeddings = False


def new_causal_lm(config: PreTrainedConfig, seed: int, *, dropout: float = 0.0) -> PreTrainedModel:
    """A model with random weights, the same for the same seed; float32, in eval mode.

    The config's dropout rates are overwritten; torch's random state stays as it was.

    Raises:
        ModelError: the config is not a decoder's.
    """
    require_decoder(config, config.model_type)
    set_dropout(config, dropout)
    return build_model(config, seed=seed)


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for.

    Raises:
        ModelError: the largest id is outside the embedding.
    """
    rows = embedding_rows(model)
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise ModelError(
            f"tokenizer ids must be below the model's {rows} embeddings; got {largest} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}). Use the tokenizer that came with "
            "the model."
        )


def require_embeddings(model: PreTrainedModel, token_ids: torch.Tensor) -> None:
    """Refuse token ids that a model has no embedding for: what a policy draws is of its tokenizer,
    but a rollout may come from elsewhere.

    Raises:
        ModelError: there is one.
    """
    rows = embedding_rows(model)
    largest = int(token_ids.max()) if token_ids.numel() else 0
    if largest >= rows:
        raise ModelError(
            f"token ids must be below the {rows} embeddings of {str(model.name_or_path)!r}, which "
            f"reads the policy's answers; got {largest}. Let rollouts have tokens of the policy's "
            "tokenizer alone, or give a model with as many embeddings as the policy's."
        )


def embedding_rows(model: PreTrainedModel) -> int:
    """How many token ids the model has an embedding for."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def require_safetensors(source: Located) -> None:
    """Refuse a local folder without weights in safetensors."""
    if source.folder is None or any(source.folder.glob("*.safetensors")):
        return
    pickled = sorted(
        p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in source.folder.glob(pattern)
    )
    if pickled:
        raise ModelError(
            f"model {source.name!r} must have safetensors weights; got {pickled[0]}, a pickle, "
            'which can run code when it is read. If you trust it, convert it: python -c "from '
            "transformers import AutoModelForCausalLM as M; M.from_pretrained("
            f"{source.name!r}, use_safetensors=False).save_pretrained('NEW_FOLDER')\" and copy "
            "the tokenizer's files there."
        )
    raise ModelError(
        f"model {source.name!r} must hold *.safetensors files; got none. Give the folder that "
        "save_pretrained wrote."
    )


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"{len(names)} ({shown}{', ...' if len(names) > 3 else ''})" if names else "none"
