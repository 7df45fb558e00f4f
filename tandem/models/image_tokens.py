"""A tokenizer without the tokens for images that the text decoder has no outputs for.

Llama 3.2 Vision's `<|image|>` has a row in the embedding and none in the vocabulary head. Llama,
which the decoder is loaded as, has as many of both; the token comes before an image alone.
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer
from transformers import AutoConfig, PreTrainedTokenizerBase

from tandem.models.composite import text_config
from tandem.models.hf_logging import quiet
from tandem.models.source import Located, whole_family
from tandem.models.text_families import IMAGE_ROWS


def without_image_tokens(
    tokenizer: PreTrainedTokenizerBase, source: Located
) -> PreTrainedTokenizerBase:
    """The tokenizer, from which added tokens behind the head's last output are removed in place, if
    the model is of such a family.

    Args:
        source: the tokenizer's model.
    """
    if source.folder is not None and not (source.folder / "config.json").is_file():
        return tokenizer
    try:
        if whole_family(source) not in IMAGE_ROWS:
            return tokenizer
        with quiet():
            config = AutoConfig.from_pretrained(source.repository, **source.options)
    except (OSError, ValueError):  # a tokenizer alone; a broken config is told by its model
        return tokenizer
    text = text_config(config)
    core = getattr(tokenizer, "backend_tokenizer", None)
    if text is None or core is None:
        return tokenizer
    made = json.loads(core.to_str())
    behind = {token["content"] for token in made["added_tokens"] if token["id"] >= text.vocab_size}
    if behind:
        made["added_tokens"] = [t for t in made["added_tokens"] if t["content"] not in behind]
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(made))
        special = getattr(tokenizer, "_extra_special_tokens", [])
        tokenizer._extra_special_tokens = [token for token in special if str(token) not in behind]
    return tokenizer
