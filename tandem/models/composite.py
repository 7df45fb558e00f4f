"""The text decoder of a checkpoint that has parts for images or sound beside it.

Such a config (Gemma 3, Qwen 3.5, Mistral Small 3.1) holds the decoder's as `text_config`. Where
that belongs to a family with a language model class of its own, or equals one (`text_families`),
the decoder is loaded by that class and the other parts are not read. What is saved is a checkpoint
of that class, which AutoModelForCausalLM opens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
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
from tandem.models.text_families import IMAGE_ROWS, equal_config, has_equal, holder

_DECODER = r"^(?:thinker\.)?(?:model\.)?(?:language_model|text_model)\."
_OWN = r"^(?:thinker\.)?(?=(?:model|lm_head|score)\.)"
_PARTS = ("visual.", "audio_tower.", "thinker.")
"""What Qwen's files call other parts where the decoder has the names of its own class."""
_HEADS = ("lm_head.", "score.")
_CROSSING = ".cross_attn."
_LAYER = r"(?:^|\.)layers\.(\d+)\."
KEY_MAPPING = {
    rf"{_DECODER}(?:model\.)?(lm_head|score)\.": r"\1.",
    rf"{_DECODER}(?:model\.)?": "model.",
    r"^thinker\.(model|lm_head|score)\.": r"\1.",
}
"""For from_pretrained: the decoder's names in such files to those of its own class."""
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_OPENS_NONE = ("emu3",)
"""Families whose language model class finds none of its weights in a whole model's files."""


def text_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The config of the text decoder, where it is another than the config and has a class of its
    own or equals a family that has; without what belongs to the whole model (`text_part`)."""
    text = getattr(config, "text_config", None)
    if (equal := equal_config(config)) is not None:
        return equal
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
    """The family of a text decoder beside other parts that has no class of its own and equals none;
    else ""."""
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
    text.architectures = config.architectures
    config = holder(config)
    for name in _TOKENS:
        ids = getattr(config, name, None)
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if listed and max(listed) < text.vocab_size:  # some defaults are of a larger vocabulary
            setattr(text, name, ids)
    if config.num_labels is not None:
        text.num_labels = config.num_labels
    text.dtype = text.dtype or config.dtype
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    tied = getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    text.tie_word_embeddings = bool(tied) and not (folder is not None and _has_own_head(folder))
    return text


def decoder_names(stored: Iterable[str], own: Iterable[str], family: str = "") -> dict[str, str]:
    """The names that tensors of files have in a model, each with its name in the files.

    Where files have the decoder beside other parts, these are its names without that, its layers
    are counted without those for images, and the other parts' tensors are left out.

    Args:
        stored: names in the files. own: the model's.
        family: of the model with other parts that config.json tells of; "" if it tells of none.
    """
    stored, own = list(stored), list(own)
    if not is_beside_parts(stored, family) or is_beside_parts(own):
        return {name: name for name in stored}
    decoder = _DECODER if any(re.match(_DECODER, name) for name in stored) else _OWN
    found = {re.sub(decoder, "", name): name for name in stored if re.match(decoder, name)}
    heads = {re.sub(_OWN, "", name): name for name in stored}
    found |= {name: key for name, key in heads.items() if name.startswith(_HEADS)}
    numbers = layer_numbers(stored)
    if not numbers or any(_CROSSING in name for name in own):
        return found
    return {counted: key for name, key in found.items() if (counted := _renumbered(name, numbers))}


def own_name(name: str, numbers: Sequence[int] = ()) -> str:
    """A layer's name in the decoder's own class, from its name beside other parts or from that.

    Args:
        numbers: `layer_numbers` of the model that the name is from.
    """
    short = re.sub(_OWN, "", re.sub(_DECODER, "", name))
    if short != name and not short.startswith(("model.", *_HEADS)):
        short = f"model.{short}"
    return (_renumbered(short, numbers) or name) if numbers else short


def names_beside_parts(
    config: PreTrainedConfig, stored: Iterable[str], *, scalar: bool
) -> Callable[[str], str]:
    """From a layer's name in the decoder's own class to its name in the module that transformers
    makes of a whole model: the Auto class of the task, or where that has none or finds no weights,
    the one for images and text.

    Args:
        config: the whole model's. stored: the names in its files.
        scalar: of a sequence-classification model.
    """
    stored = list(stored)
    mapping = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if scalar else MODEL_FOR_CAUSAL_LM_MAPPING
    kind: Any = mapping.get(type(config), None)
    text = getattr(holder(config), "text_config", None)
    alone = getattr(kind, "config_class", None) is type(text)
    alone = alone and config.model_type not in _OPENS_NONE
    numbers = layer_numbers(stored)
    root, before = "", "model."
    if text_config(config) is not None and not alone and not (scalar and kind is None):
        is_text_model = any(re.match(r"(?:model\.)?text_model\.", name) for name in stored)
        before = f"model.{'text' if is_text_model else 'language'}_model."
        root = "thinker." if holder(config) is not config else ""

    def there(name: str) -> str:
        if numbers:
            name = re.sub(_LAYER, lambda found: f".layers.{numbers[int(found[1])]}.", name)
        return root + re.sub(r"^model\.", before, name)

    return there


def layer_numbers(stored: Iterable[str]) -> list[int]:
    """The decoder's layers for text, as files count them that have layers for images between
    these, which attend to nothing else; [] for other files."""
    layers, crossing = set(), set()
    for name in stored:
        if re.match(_DECODER, name) and (found := re.search(_LAYER, name)):
            layers.add(int(found[1]))
            if _CROSSING in name:
                crossing.add(int(found[1]))
    return sorted(layers - crossing) if crossing else []


def is_transposed(name: str, stored: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether files have the experts' matrices of a layer with inputs and outputs exchanged, as
    Qwen3-VL's do. Where both are as many they are not, as transformers takes them.

    Args:
        name: in the model. stored: the tensor's shape in the files. own: the parameter's.
    """
    experts = name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
    return experts and stored != own and (stored[0], *reversed(stored[1:])) == own


def has_image_rows(name: str, stored: tuple[int, ...], own: tuple[int, ...], family: str) -> bool:
    """Whether files of a family have rows of tokens for images behind an embedding's own, which the
    vocabulary head has no outputs for, as Llama 3.2 Vision's do. Arguments as for `is_transposed`.
    """
    if not name.endswith("embed_tokens.weight") or stored[1:] != own[1:]:
        return False
    return family in IMAGE_ROWS and stored[0] - own[0] == IMAGE_ROWS[family]


def is_other_form(name: str, stored: tuple[int, ...], own: tuple[int, ...], family: str) -> bool:
    """Whether files of a family with other parts have a parameter in one of these forms. Arguments
    as for `is_transposed`."""
    if not has_equal(family):
        return False
    return is_transposed(name, stored, own) or has_image_rows(name, stored, own, family)


def _renumbered(name: str, numbers: Sequence[int]) -> str:
    """A name with its layer counted as the decoder does; "" for a layer that it does not have."""
    found = re.search(_LAYER, name)
    if found is None:
        return name
    if int(found[1]) not in numbers:
        return ""
    return f"{name[: found.start(1)]}{numbers.index(int(found[1]))}{name[found.end(1) :]}"


def is_beside_parts(stored: Iterable[str], family: str = "") -> bool:
    """Whether files have the decoder under the name that it has beside other parts, or, of a family
    that has them, such parts beside it."""
    parts = _PARTS if has_equal(family) else ()
    return any(re.match(_DECODER, name) or name.startswith(parts) for name in stored)


def other_parts(stored: Iterable[str], family: str = "") -> set[str]:
    """The names of tensors in files that are not the decoder's. `family` as for `decoder_names`."""
    stored = set(stored)
    return stored - set(decoder_names(stored, (), family).values())


def _has_own_head(folder: Path) -> bool:
    """Whether the files have a vocabulary head with other numbers than the embedding. Configs of
    such models say by default that it is tied, and transformers looks too."""
    found = {
        re.sub(_OWN, "", re.sub(_DECODER, "", tensor.name)).removeprefix("model."): tensor
        for tensor in read_headers(folder)
    }
    head, embedding = found.get("lm_head.weight"), found.get("embed_tokens.weight")
    return head is not None and (embedding is None or not is_equal(head, embedding))
