"""Floating-point operations of PPO's forwards and backwards, for TFLOP/s."""

from __future__ import annotations

from transformers import PreTrainedModel

from tandem.engine.forward import groups_of
from tandem.engine.hybrid import RLHFEngine
from tandem.models.beginnings import common_tokens
from tandem.models.flops import sequence_flops
from tandem.models.packed import computed_tokens, narrows
from tandem.models.twin import decodes
from tandem.types import Experience, Rollout, TokenBatch


def batch_flops(
    model: PreTrainedModel, batch: TokenBatch, *, backward: bool = False, ends: bool = False
) -> float:
    """`sequence_flops` of a batch whose response tokens go through the vocabulary head, or with
    `ends` its rows' last tokens through a scalar one; what several rows begin with counts once
    where the model runs it once, and tokens count that are computed."""
    # First, as it is what all ranks' weights may be gathered for.
    groups = groups_of(batch, [model])
    prompts = [group.prompt_tokens for group in groups for _ in group.rows[1:]]
    again = [*prompts, *common_tokens(groups)]
    real, asked = computed_tokens(model, batch, ends=ends)
    lengths = real.sum(dim=1).tolist()
    # Of rows of one prompt, each asks for the state of the prompt's last token.
    wanted = int(asked.sum()) - (0 if ends else len(prompts))
    leaves_out = wanted > 0 and narrows(model)
    flops = sequence_flops(
        model,
        lengths,
        batch.num_response_tokens,
        backward=backward,
        unread=sum(lengths) - sum(again) - wanted if leaves_out else 0,
    )
    return flops - sequence_flops(model, again, 0, backward=backward) if again else flops


def generation_flops(engine: RLHFEngine, rollout: Rollout) -> float:
    """Of each prompt, once where its samples share it, and of every token of an answer but the
    last, which is drawn and not run. A prompt's last token goes through the head as well."""
    actor, batch = engine.actor, rollout.batch
    lengths = batch.lengths()
    flops = sequence_flops(actor, (lengths - 1).tolist(), batch.num_response_tokens)
    if engine.settings.hybrid_engine and decodes(actor):
        samples = engine.settings.sampling.samples_per_prompt
        prompts = batch.response_mask.int().argmax(dim=1).tolist()  # up to the first answer
        again = [length for i, length in enumerate(prompts) if i % samples]
        flops -= sequence_flops(actor, again, len(again))
    return flops


def scoring_flops(engine: RLHFEngine, rollout: Rollout, experience: Experience) -> float:
    """Of reference and critic, of the actor unless the sampler's log-probs serve, and of the reward
    model over all answers. Where that has a tokenizer of its own, the actor's tokens count.

    The critic counts if the experience has values.
    """
    # With adapters the reference is the actor without them.
    flops = 0.0
    if engine.has_reference:
        flops += batch_flops(engine.reference or engine.actor, experience.batch)
    if engine.critic is not None and experience.values is not None:
        flops += batch_flops(engine.critic, experience.batch)
    if not engine.trusts_sampler:
        flops += batch_flops(engine.actor, experience.batch)
    if engine.scorer is not None:
        flops += sum(
            batch_flops(model, rollout.batch, ends=True)
            for model in engine.scorer.models
            if isinstance(model, PreTrainedModel)
        )
    return flops


def update_flops(
    engine: RLHFEngine,
    batch: TokenBatch,
    *,
    actor: bool,
    replayed: bool = False,
    compares: bool = False,
) -> float:
    """Of one update: forward and backward of the critic, if any, and of the actor if it learns;
    without the forward of the actor's layers where it was `replayed`, with that of the reference
    where it `compares` (an exact divergence)."""
    models = [m for m in engine.trained_models if actor or m is not engine.actor]
    flops = sum(batch_flops(model, batch, backward=True) for model in models)
    if compares and actor:
        flops += _reference_flops(engine, batch)
    if replayed:
        flops -= batch_flops(engine.actor, batch)
        flops += sequence_flops(engine.actor, [], batch.num_response_tokens)
    return flops


def mixture_flops(engine: RLHFEngine, texts: TokenBatch, *, compares: bool) -> float:
    """Of an update's mixed-in texts: forward and backward of the actor, and the reference's forward
    where they are learned from it."""
    flops = batch_flops(engine.actor, texts, backward=True)
    return flops + _reference_flops(engine, texts) if compares else flops


def _reference_flops(engine: RLHFEngine, batch: TokenBatch) -> float:
    """Of the reference's forward; 0 if there is none."""
    return batch_flops(engine.reference or engine.actor, batch) if engine.has_reference else 0.0
