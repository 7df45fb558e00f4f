"""A model's repeated blocks, which are gathered, recomputed or offloaded one at a time."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from tandem.errors import ModelError


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
