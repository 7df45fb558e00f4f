"""The tokens that `lora.train_tokens` names, as a tokenizer and its chat template have them."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from transformers import PreTrainedTokenizerBase

from tandem.config.dataset import CONTROL
from tandem.config.lora import LoraConfig
from tandem.data.excerpt import excerpt
from tandem.data.render import Renderer
from tandem.errors import ConfigError


def tokens_to_train(lora: LoraConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """`token_ids_of` the knob, with a tokenizer that has its chat template; none without LoRA."""
    if not lora.rank or not lora.train_tokens:
        return ()
    return token_ids_of(lora.train_tokens, Renderer(tokenizer))


def token_ids_of(names: Sequence[str], renderer: Renderer) -> tuple[int, ...]:
    """The ids of named tokens, ascending.

    Args:
        names: of the vocabulary; `control` are the template's `control_ids`, even where the
            vocabulary has that word.
    Raises:
        ConfigError: a name that is not one token of the vocabulary.
    """
    found: set[int] = set()
    vocabulary = renderer.vocabulary
    for name in names:
        if name == CONTROL:  # first, as GPT-2's and SmolLM2's vocabularies have that word too
            found.update(renderer.control_ids)
        elif name in vocabulary:
            found.add(vocabulary[name])
        else:
            near = get_close_matches(name, [*vocabulary, CONTROL], 1)
            advice = f"Did you mean {excerpt(near[0])}?" if near else f"Use {CONTROL}, or a token."
            raise ConfigError(
                "lora.train_tokens must name tokens of the tokenizer's vocabulary, or be "
                f"{CONTROL}; got {excerpt(name)}, which is not one token. {advice}"
            )
    return tuple(sorted(found))
