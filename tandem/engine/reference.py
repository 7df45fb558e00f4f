"""The frozen policy that the KL and the losses on preferences compare the actor with."""

from __future__ import annotations

import copy

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.config.engine import EngineSettings
from tandem.engine.placement import Model, Placement
from tandem.errors import ConfigError, ModelError
from tandem.models.load import check_vocabulary, load_tokenizer


def start_of_reference(
    actor: Model, given: Model | None, settings: EngineSettings, *, needed: bool
) -> Model | None:
    """What the actor is compared with; None where that is nothing, or the actor without its
    adapters.

    Raises:
        ConfigError: there is none that could follow the actor, as it should.
    """
    if settings.moving.update_every and (given is not None or not needed):
        raise ConfigError(
            "RLHFEngine must compare the actor with where it starts if reference.update_every "
            f"moves the reference; got {'another model' if needed else 'has_reference=False'}. "
            "Set reference.update_every 0."
        )
    if not needed:
        return None
    return another(actor) if given is None and settings.lora.rank == 0 else given


def another(model: Model) -> Model:
    """The same to load again, or a copy of a module."""
    return model if isinstance(model, str) else copy.deepcopy(model)


def place_reference(
    placement: Placement,
    reference: PreTrainedModel | str | None,
    own: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel | None:
    """A reference on the ranks, in host memory if `parallel.offload` says so; None of none.

    Args:
        own: the policy's tokenizer, where the reference may be of another.
    Raises:
        ModelError: it cannot be used, or does not have the policy's tokens.
    """
    if reference is None:
        return None
    settings = placement.settings
    if own is not None and isinstance(reference, str):
        require_same_tokens(reference, own, trust_remote_code=settings.trust_remote_code)
    on_host = "reference" in settings.parallel.offload
    model = placement.policy(reference, trained=False, on_host=on_host)
    if own is not None:
        check_vocabulary(model, own)
    return model


def require_same_tokens(
    model: str,
    own: PreTrainedTokenizerBase,
    *,
    role: str = "reference model",
    trust_remote_code: bool = False,
) -> None:
    """Refuse a model whose tokenizer has not all the policy's tokens, or other ids for them.

    Args:
        role: of the model, for the message.
    Raises:
        ModelError: it has not.
    """
    known = load_tokenizer(model, trust_remote_code=trust_remote_code).get_vocab()
    others = {token: id for token, id in own.get_vocab().items() if known.get(token) != id}
    if others:
        token = min(others, key=lambda token: others[token])
        there = known.get(token)
        raise ModelError(
            f"{role} {model!r} must have the policy's tokens, which it reads; got others for "
            f"{len(others)} of {len(own.get_vocab())}, the first {token!r}, {others[token]} here "
            f"and {'absent' if there is None else there} there. Use a model of the same tokenizer."
        )
