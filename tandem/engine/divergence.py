"""The actor's log-probs and its divergence from the reference, from one forward of each."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.engine.forward import head_logprobs, scored
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.placement import onload
from tandem.models.lm_head import vocabulary_head
from tandem.models.lora import adapters_off
from tandem.models.modes import evaluating
from tandem.models.packed import at_responses, predictor_states
from tandem.models.replayed import KeptStates
from tandem.models.twin import compares_once
from tandem.objectives.divergence import Divergence, Predictions, exact_divergence
from tandem.objectives.logprobs import scatter_to_tokens
from tandem.parallel.shard import shards_of
from tandem.types import TokenBatch


@dataclass(frozen=True, slots=True)
class Compared:
    """Of a batch: log-probs and entropy of its response tokens, (B, T) float32, 0 off them; each
    token's divergence, of the same shape, without gradient; their weighted sum, (); and, if they
    were asked for, the reference's log-probs, (B, T) without gradient."""

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor
    kl_sum: Tensor
    ref_logprobs: Tensor | None = None


def compared_with_reference(
    engine: RLHFEngine,
    batch: TokenBatch,
    divergence: Divergence,
    *,
    token_weights: Tensor | None = None,
    learns_logprobs: bool = True,
    with_entropy: bool = False,
    with_reference: bool = False,
    kept: KeptStates | None = None,
) -> Compared:
    """The actor's numbers at the sampling temperature, with gradient, and the divergence from the
    reference over the vocabulary that both have.

    Args:
        token_weights: (B, T) or (B, 1), what each response token counts in the sum; None: 1.
        learns_logprobs: log-probs and entropy have a gradient, as the KL has.
        with_reference: the reference's log-probs too, as `RLHFEngine.reference_logprobs`.
        kept: as of `RLHFEngine.actor_logprobs`.
    """
    actor, other = engine.actor, _Other(engine)
    temperature = engine.settings.sampling.temperature
    vocabulary = min(m.config.get_text_config().vocab_size for m in (actor, other.model))
    mask = batch.response_mask

    @compares_once
    def forward(model: PreTrainedModel, theirs: Tensor) -> tuple[Tensor, ...]:
        states = predictor_states(model, batch, kept)
        head = vocabulary_head(model)
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns_logprobs):
            logprobs, entropy = head_logprobs(
                model, batch, states, temperature=temperature, with_entropy=with_entropy
            )
        ones = torch.ones(mask.shape, device=states.device)
        counted = ones if token_weights is None else ones * token_weights
        counted = at_responses(counted, mask, len(states))
        kl_sum, kl = exact_divergence(
            Predictions(head, states),
            Predictions(other.logits, theirs),
            counted,
            divergence,
            vocabulary=vocabulary,
            weights=head.weights,
            temperature=temperature,
        )
        placed = [scatter_to_tokens(values, mask) for values in (logprobs, entropy, kl)]
        return (*placed, kl_sum)

    found: list[tuple[Tensor, ...]] = []
    of_reference: list[Tensor] = []

    def states() -> Tensor:
        theirs = other.states(batch)
        if with_reference:
            of_reference.append(other.logprobs(batch, theirs))
        return theirs

    def beside(theirs: Tensor) -> None:
        # What a split model's forward returns has it gathered again in the backward pass, which
        # does not need the reference.
        found.append(shards_of(actor).forward(lambda: forward(actor, theirs)))

    if other.model is actor:
        beside(shards_of(actor).forward(states))
    else:
        with onload(other.model):
            shards_of(other.model).forward(lambda: beside(states()))
    return Compared(*found[0], *of_reference)


def release_reference(engine: RLHFEngine) -> None:
    """Free what of a split reference is still whole after its last forward of an update."""
    if engine.reference is not None:
        shards_of(engine.reference).reshard()


class _Other:
    """The reference: a model, or the actor with its adapters off."""

    def __init__(self, engine: RLHFEngine) -> None:
        self.model = engine.reference or engine.actor
        self._temperature = engine.settings.sampling.temperature
        self._within = (
            nullcontext if engine.reference is not None else partial(adapters_off, engine.actor)
        )

    def states(self, batch: TokenBatch) -> Tensor:
        """(R, D) of the batch's response tokens, without gradient."""
        with torch.no_grad(), self._within():
            return predictor_states(self.model, batch)

    def logprobs(self, batch: TokenBatch, states: Tensor) -> Tensor:
        """(B, T) of the batch's response tokens, without gradient."""
        with torch.no_grad(), self._within():
            found, _ = head_logprobs(
                self.model, batch, states, temperature=self._temperature, with_entropy=False
            )
        return scatter_to_tokens(found, batch.response_mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, V) of such states."""
        with self._within():
            return vocabulary_head(self.model)(hidden)


def heldout_divergence(
    engine: RLHFEngine, batch: TokenBatch, divergence: Divergence, max_tokens: int
) -> tuple[float, Tensor]:
    """The divergence per response token of a batch, nats, and log(actor / reference) of each token,
    (B, T), from one forward of each model; no gradient."""

    def forward(part: TokenBatch) -> tuple[Tensor, ...]:
        found = compared_with_reference(engine, part, divergence, with_reference=True)
        assert found.ref_logprobs is not None
        return found.kl, found.logprobs - found.ref_logprobs

    with evaluating(engine.actor):
        kl, ratios = scored(batch, max_tokens, forward, engine.policy_models)
    return float(kl.sum()) / max(1, batch.num_response_tokens), ratios
