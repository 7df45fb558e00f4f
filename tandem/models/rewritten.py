"""A decoder's tensors by its own names and in its own form, where files have them in another.

from_pretrained maps names by patterns; what it cannot is done here: layers counted without those
for images, embeddings without rows for them, experts' matrices the other way round.
`meta_init.WeightFiles` does the same row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tandem.models.build import build_model
from tandem.models.composite import decoder_names, has_image_rows, is_transposed, layer_numbers
from tandem.models.folder import read_headers
from tandem.models.source import Located, files_of, whole_family
from tandem.models.text_families import has_equal
from tandem.tensor_files import open_tensors


def read_rewritten(
    source: Located, config: PreTrainedConfig, dtype: torch.dtype
) -> dict[str, Tensor] | None:
    """The tensors for a language model of `config`; None where from_pretrained finds them itself.

    Args:
        dtype: that they become.
    Raises:
        ModelError: a file is damaged.
    """
    family = whole_family(source)
    if not has_equal(family):
        return None
    files = {tensor.name: tensor for tensor in read_headers(files_of(source))}
    model = build_model(config, on_meta=True)
    own = {name: tuple(value.shape) for name, value in model.named_parameters()}
    prefix = f"{model.base_model_prefix}."
    names = decoder_names(files, own, family)
    keys = {name if name in own else f"{prefix}{name}": key for name, key in names.items()}
    pairs = [(name, files[key].shape, own.get(name, ())) for name, key in keys.items()]
    if not layer_numbers(files) and not any(is_transposed(*pair) for pair in pairs):
        return None
    found = {}
    for name, stored, shape in pairs:
        with open_tensors(files[keys[name]].file) as opened:
            tensor: Tensor = opened.get_tensor(keys[name])
        if is_transposed(name, stored, shape):
            tensor = tensor.transpose(1, 2)
        elif has_image_rows(name, stored, shape, family):
            tensor = tensor[: shape[0]]
        # A copy, because the file may be replaced while the model is in use.
        found[name] = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
    return found
