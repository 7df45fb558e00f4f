"""A model's repeated blocks, which are gathered, recomputed or offloaded one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from tandem.errors import ModelError


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's attention: query heads, the width of each, key/value heads. No heads: a family
    without attention, whose width is that of its states."""

    queries: int
    width: int
    keys: int


def attention_heads(config: PreTrainedConfig) -> list[Heads]:
    """Of each layer of a text model; in some families (Gemma 4) layers differ."""
    layers = range(config.num_hidden_layers)
    own = config.per_layer_config if getattr(config, "is_heterogeneous", False) else None
    return [_heads(config if own is None else own[i], config) for i in layers]


def _heads(layer: Any, config: Any) -> Heads:
    queries = int(getattr(layer, "num_attention_heads", None) or 0)
    width = getattr(layer, "head_dim", None) or config.hidden_size // max(1, queries)
    return Heads(queries, int(width), int(getattr(layer, "num_key_value_heads", None) or queries))


def decoder_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's blocks, in order.

    Raises:
        ModelError: the base model has no list with as many modules as its config has layers.
    """
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    # LongCat counts attention in num_hidden_layers, twice a block, and blocks in num_layers.
    for count in (layers, getattr(config, "num_layers", layers)):
        for module in model.base_model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return list(module)
    raise ModelError(
        f"family {model.config.model_type!r} must keep its {layers} blocks in one list; got none "
        "of that length. It cannot be split over ranks: use --actor-zero-stage 0 and "
        "--critic-zero-stage 0."
    )


def is_split(model: nn.Module) -> bool:
    """Whether hooks of FSDP2 gather a model's weights."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def has_experts(model: PreTrainedModel) -> bool:
    """Whether tokens are sent to some of several modules, by the names of modules and classes."""
    return any(
        "expert" in f"{name}.{type(module).__name__}".lower()
        for name, module in model.named_modules()
    )
