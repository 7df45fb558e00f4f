"""Text decoders that transformers has beside image or audio parts alone, as the family they equal.

Qwen2.5-VL's decoder has no language model class. On text alone it computes what Qwen2 does: the
three rows of its rotary positions are the same then, whichever frequencies take which. Llama 3.2
Vision skips its cross-attention layers where no image is given, and is Llama without them. Read in
transformers 5.17 and 5.23; tests/models/test_text_families.py compares the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig


@dataclass(frozen=True, slots=True)
class _Equal:
    """What a decoder equals.

    family: whose class it is loaded by. settings: fields of that family's config which the decoder
    has no choice of. renamed: fields that it calls otherwise, to its names. more: fields that the
    family's config takes without declaring them. rope: what rope_parameters mean where they do not
    say.
    """

    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    rope: Mapping[str, Any] = field(default_factory=dict)


_EXPERTS = ("head_dim", "num_experts", "num_local_experts")
_QWEN2 = _Equal("qwen2")
_QWEN3 = _Equal("qwen3", {"use_sliding_window": False})
_QWEN3_MOE = _Equal("qwen3_moe", {"use_sliding_window": False}, more=_EXPERTS)
_WHOLE_HEADS = {"partial_rotary_factor": 1.0}
_GLM4 = _Equal("glm4", {"attention_bias": True}, rope=_WHOLE_HEADS)
_EQUAL = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_omni": _QWEN2,
    "qwen2_5_omni_thinker": _QWEN2,
    "qwen3_vl": _QWEN3,
    # Its router divides the chosen probabilities by their sum, whatever the config says.
    "qwen3_vl_moe": _Equal(
        "qwen3_moe", {"use_sliding_window": False, "norm_topk_prob": True}, more=_EXPERTS
    ),
    "qwen3_omni_moe": _QWEN3_MOE,
    "qwen3_omni_moe_thinker": _QWEN3_MOE,
    "mllama": _Equal("llama", renamed={"attention_dropout": "dropout"}),
    "emu3": _Equal("llama"),
    "glm4v": _GLM4,
    "glm46v": _GLM4,
    "glmga": _GLM4,
    "glm_ocr": _Equal("glm4", {"attention_bias": False}, rope=_WHOLE_HEADS),
    "glm4v_moe": _Equal("glm4_moe", {"use_qk_norm": False}),
    "paddleocr_vl": _Equal("llama", renamed={"attention_bias": "use_bias", "mlp_bias": "use_bias"}),
    "granite4_vision": _Equal("granite"),
    "granite_docling": _Equal("granite"),
}
IMAGE_ROWS = {"mllama": 8}
"""Rows of a model's embedding behind those of its vocabulary head, for tokens of images."""
_OF_THE_CLASS = {"model_type", "architectures", "transformers_version", "id2label", "label2id"}
_OF_IMAGES = {"mrope_section", "mrope_interleaved", "interleaved", "type"}
"""In rope_parameters: which frequencies take which row of positions; an old name of rope_type."""


def holder(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config that has the text decoder's in it: of an omni model its thinker's."""
    thinker = getattr(config, "thinker_config", None)
    return thinker if isinstance(thinker, PreTrainedConfig) else config


def has_equal(family: str) -> bool:
    """Whether a model's text decoder is loaded as another family's."""
    return family in _EQUAL


def equal_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """A new config of the family that a model's text decoder equals; None if it equals none.

    Args:
        config: the whole model's.
    """
    equal = _EQUAL.get(config.model_type)
    text = getattr(holder(config), "text_config", None)
    if equal is None or not isinstance(text, PreTrainedConfig):
        return None
    kind = CONFIG_MAPPING[equal.family]
    given = text.to_dict()
    known = (kind().to_dict().keys() | set(equal.more)) - _OF_THE_CLASS
    settings = {
        name: given[name]
        for name in known & given.keys()
        if given[name] is not None or name.endswith("_token_id")
    }
    if hasattr(kind, "head_dim") and "head_dim" not in settings:
        settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    settings |= {name: given[old] for name, old in equal.renamed.items()} | dict(equal.settings)
    rope = {name: value for name, value in text.rope_parameters.items() if name not in _OF_IMAGES}
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    if crossing := given.get("cross_attention_layers"):
        layers = settings["num_hidden_layers"]
        settings["num_hidden_layers"] = layers - len({n for n in crossing if n < layers})
    return kind(**settings | {"rope_parameters": {**equal.rope, **rope}})
