"""What a model can answer: its vocabulary, its positions, and how many answers side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.errors import ConfigError, FullError, GenerationError
from tandem.generation.blocks import affordable_slots, state_bytes
from tandem.generation.runner import kv_dtype
from tandem.models.source import positions_in
from tandem.models.twin import decodes, kv_shapes
from tandem.ops.logits import rows_at_once
from tandem.types import PromptRow


def max_positions(model: PreTrainedModel) -> int | None:
    """Most tokens that prompt and answer may have together; None where there is no limit."""
    return positions_in(model.config)


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many tokens the model has."""
    size: int = model.config.get_text_config().vocab_size
    return size


def rows_together(model: PreTrainedModel, wanted: int, free: int | None = None) -> int:
    """Answers that run side by side: those wanted, or as many as logits and states may be held of.

    A sampler's numbers are float32 whatever the model computes in.

    Args:
        free: bytes that states are measured from; what is free if None.
    """
    each = state_bytes(kv_shapes(model), kv_dtype(model)) if decodes(model) else 0
    rows = min(wanted, rows_at_once(vocabulary_size(model), torch.float32, model.device))
    return affordable_slots(rows, each, model.device, free)


def check_token_ids(size: int, token_ids: Sequence[int], where: str) -> None:
    """Refuse what no embedding is there for, of a vocabulary of this size.

    Raises:
        GenerationError: an id that the model does not have; `where` names the prompt.
    """
    for token in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token < size:
            raise GenerationError(
                f"{where}: token ids must be from 0 to {size - 1}, the model's; got {token}. "
                "Tokenize with the model's own tokenizer."
            )


def require_rendered(prompt: object) -> None:
    """Refuse what is no rendered prompt, such as its text.

    Raises:
        GenerationError: it is none.
    """
    if not isinstance(prompt, PromptRow):
        raise GenerationError(
            f"a prompt to answer must be a PromptRow; got {type(prompt).__name__}. Render it: "
            "engine.renderer.prompt(text)."
        )


def require_tokens(most: int) -> None:
    """Refuse answers without a token.

    Raises:
        ConfigError: answers have no room for one.
    """
    if most < 1:
        raise ConfigError(f"sampling.max_new_tokens must be >= 1; got {most}. Raise it.")


def check_prompts(model: PreTrainedModel, prompts: Sequence[PromptRow], new_tokens: int) -> None:
    """
    Raises:
        GenerationError: there is no prompt, one is empty, names tokens that the model does not
            have, or leaves no room for `new_tokens` more.
    """
    if not prompts:
        raise GenerationError("generate must get at least one prompt; got none.")
    require_tokens(new_tokens)
    limit, size = max_positions(model), vocabulary_size(model)
    for number, row in enumerate(prompts, 1):
        require_rendered(row)
        if len(row) == 0:
            raise GenerationError(
                f"{row.source}: a prompt must have tokens; got none in prompt {number} of "
                f"{len(prompts)}. Leave it out, or render it with a chat template."
            )
        check_token_ids(size, row.token_ids, str(row.source))
        if limit is not None and len(row) + new_tokens > limit:
            raise GenerationError(
                f"{row.source}: prompt and answer must fit the model's {limit} positions; got "
                f"{len(row)} + {new_tokens} tokens. Lower dataset.max_prompt_tokens or "
                "sampling.max_new_tokens."
            )


def answer_room(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    sampling: SamplingConfig,
    max_tokens: int | None,
) -> int:
    """The most tokens of an answer to this prompt.

    Raises:
        FullError: there is room for none.
    """
    limits = [limit for limit in (max_positions(model), max_tokens) if limit is not None]
    budget = min([sampling.max_new_tokens, *(limit - len(prompt_ids) for limit in limits)])
    if not prompt_ids or budget < 1:
        raise FullError(
            f"the conversation must leave room for an answer in {min(limits, default=None)} "
            f"positions; it has {len(prompt_ids)} tokens. Shorten it, or start a new one."
        )
    return budget
