"""What a critic starts from where none is given."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.data.render import Renderer
from tandem.engine.placement import Model
from tandem.engine.reference import another
from tandem.errors import ModelError


def critic_start(
    actor: Model,
    reward_model: Any,
    tokenizer: PreTrainedTokenizerBase,
    reward_tokenizer: PreTrainedTokenizerBase | None,
) -> Model:
    """The reward model, if it has the policy's tokenizer, else the actor: a name to load again, or
    a copy of a module.

    Raises:
        ModelError: the actor is a module, and no reward model shares its tokenizer.
    """
    shares_tokenizer = reward_tokenizer is not None and Renderer(reward_tokenizer).renders_like(
        Renderer(tokenizer)
    )
    if isinstance(reward_model, PreTrainedModel | str) and shares_tokenizer:
        return another(reward_model)
    if isinstance(actor, str):
        return actor
    raise ModelError(
        "RLHFEngine must get critic= where the actor is a module and no reward model shares "
        "its tokenizer; got none. Pass a folder or a model with a scalar head."
    )
