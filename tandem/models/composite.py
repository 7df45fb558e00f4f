"""The text decoder of a checkpoint that has parts for images or sound beside it.

Such a config (Gemma 3, Qwen 3.5, Mistral Small 3.1) holds the decoder's as `text_config`. Where
that belongs to a family with a language model class of its own, the decoder is loaded by that class
and the other parts are not read. What is saved is a checkpoint of that class, which
AutoModelForCausalLM opens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from tandem.models.folder import is_equal, read_headers

_DECODER = r"^(?:model\.)?(?:language_model|text_model)\."
_HEADS = ("lm_head.", "score.")
KEY_MAPPING = {
    rf"{_DECODER}(?:model\.)?(lm_head|score)\.": r"\1.",
    rf"{_DECODER}(?:model\.)?": "model.",
}
"""For from_pretrained: the decoder's names in such files to those of its own class."""
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def text_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The config of the text decoder, where it is another than the config and has a class of its
    own; without what belongs to the whole model (`text_part`)."""
    text = getattr(config, "text_config", None)
    if (
        not isinstance(text, PreTrainedConfig)
        or config.is_encoder_decoder
        or text.is_encoder_decoder
        or text.model_type == config.model_type
        or text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        or text.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        or config.model_type.endswith("_assistant")  # reads another model's states
    ):
        return None
    return text


def without_text_class(config: PreTrainedConfig) -> str:
    """The family of a text decoder beside other parts that has no class of its own; else ""."""
    text = getattr(config, "text_config", None)
    if not isinstance(text, PreTrainedConfig) or text.model_type == config.model_type:
        return ""
    return text.model_type if text_config(config) is None else ""


def text_part(config: PreTrainedConfig, folder: Path | None) -> PreTrainedConfig:
    """The config to load a model by: the text decoder's, if the model has other parts, else the
    config itself.

    Special tokens, tied embeddings and types are the whole model's.

    Args:
        folder: its files, which say whether a head is tied; None: the config alone does.
    """
    text = text_config(config)
    if text is None:
        return config
    for name in _TOKENS:
        ids = getattr(config, name, None)
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if listed and max(listed) < text.vocab_size:  # some defaults are of a larger vocabulary
            setattr(text, name, ids)
    text.architectures = config.architectures
    if config.num_labels is not None:
        text.num_labels = config.num_labels
    text.dtype = text.dtype or config.dtype
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    tied = getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    text.tie_word_embeddings = bool(tied) and not (folder is not None and _has_own_head(folder))
    return text


def decoder_names(stored: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """The names that tensors of files have in a model, each with its name in the files.

    Where files have the decoder under a name of its own, as beside other parts, these are its
    names there without that, and the other parts' are left out.

    Args:
        stored: names in the files. own: the model's.
    """
    stored = list(stored)
    if not is_beside_parts(stored) or is_beside_parts(own):
        return {name: name for name in stored}
    found = {re.sub(_DECODER, "", name): name for name in stored if re.match(_DECODER, name)}
    return found | {name: name for name in stored if name.startswith(_HEADS)}


def own_name(name: str) -> str:
    """A layer's name in the decoder's own class, from its name beside other parts or from that."""
    short = re.sub(_DECODER, "", name)
    return short if short == name or short.startswith(("model.", *_HEADS)) else f"model.{short}"


def name_beside_parts(config: PreTrainedConfig, stored: Iterable[str], *, scalar: bool) -> str:
    """What the decoder's name `model` becomes in the module that the Auto classes make of a whole
    model: `model` again where they make one of the decoder alone.

    Args:
        config: the whole model's. stored: the names in its files.
        scalar: of a sequence-classification model.
    """
    mapping = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if scalar else MODEL_FOR_CAUSAL_LM_MAPPING
    kind: Any = mapping.get(type(config), None)
    alone = getattr(kind, "config_class", None) is type(text_config(config))
    if text_config(config) is None or alone or (scalar and kind is None):
        return "model"
    is_text_model = any(re.match(r"(?:model\.)?text_model\.", name) for name in stored)
    return f"model.{'text' if is_text_model else 'language'}_model"


def is_beside_parts(stored: Iterable[str]) -> bool:
    """Whether files have the decoder under the name that it has beside other parts."""
    return any(re.match(_DECODER, name) for name in stored)


def other_parts(stored: Iterable[str]) -> set[str]:
    """The names of tensors in files that are not the decoder's."""
    stored = set(stored)
    return stored - set(decoder_names(stored, ()).values())


def _has_own_head(folder: Path) -> bool:
    """Whether the files have a vocabulary head with other numbers than the embedding. Configs of
    such models say by default that it is tied, and transformers looks too."""
    found = {
        re.sub(_DECODER, "", tensor.name).removeprefix("model."): tensor
        for tensor in read_headers(folder)
    }
    head, embedding = found.get("lm_head.weight"), found.get("embed_tokens.weight")
    return head is not None and (embedding is None or not is_equal(head, embedding))
