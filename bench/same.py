"""Proof that Tandem and the plain loop do the same work and compute the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.plain_hf_ppo import Sequences
from bench.sides import Done, PlainSide, TandemSide, run_config
from bench.work import Start, Work, start
from tandem.config.schema import num_updates
from tandem.types import Experience

AGREEMENT = {"fp32": 1e-4, "bf16": 3e-2}
"""How far the two sides may be apart, relative to the plain loop's number."""

CHECK_LEARNING_RATE = 1e-3
"""Large enough that ratios and values reach their clips in the second epoch."""


def require_same_work(work: Work, tandem: Done, plain: Done) -> None:
    """Both sides answered the same prompts with as many tokens and took as many steps.

    Raises:
        RuntimeError: they did not.
    """
    updates = float(num_updates(run_config(work), 1))
    pairs = {
        "prompts": (tandem.prompts, plain.prompts),
        "answers' lengths": (tandem.lengths, plain.lengths),
        "optimizer steps": (tandem.metrics["updates"], plain.metrics["updates"]),
        "optimizer steps of the work": (updates, plain.metrics["updates"]),
    }
    if work.mode == "forced":
        asked = (work.max_new_tokens,) * work.num_prompts
        pairs["forced lengths"] = (asked, tandem.lengths)
    for name, (left, right) in pairs.items():
        if left != right:
            raise RuntimeError(f"{name} must be the same on both sides; got {left} and {right}.")


def agreement(work: Work) -> dict[str, float]:
    """Both sides score and learn from one rollout of Tandem's; how far they end apart.

    The actor is first moved away from the reference, so that the KL counts, and the learning
    rate is large, so that the second epoch clips. Each number is the size of the difference over
    the size of the plain loop's own (the policy loss, a mean near 0: the difference).

    Raises:
        RuntimeError: one of them is more than AGREEMENT apart.
    """
    work = replace(
        work,
        actor_learning_rate=CHECK_LEARNING_RATE,
        critic_learning_rate=CHECK_LEARNING_RATE,
        epochs=2,
        minibatch_size=work.num_prompts,  # the order of rows does not matter then
    )
    begin = start(work)
    tandem = TandemSide(work, begin)
    plain = PlainSide(work, begin, ())
    _move(tandem.engine.actor)
    _move(plain.loop.actor)
    made = tandem.make()
    scored = plain.loop.score(padded_left(made, begin))
    mask, plain_mask = made.batch.response_mask, scored.sequences.response_mask
    apart = {
        name: _apart(getattr(made, name)[mask], getattr(scored, name)[plain_mask])
        for name in ("old_logprobs", "ref_logprobs", "values", "advantages", "returns")
    }
    apart["scores"] = _apart(made.scores, scored.scores)
    ours = tandem.trainer.train_rlhf(made, step=1)
    theirs = plain.loop.train(scored)
    apart["policy_loss"] = abs(ours["policy_loss"] - theirs["policy_loss"])
    for name in ("value_loss", "actor_grad_norm", "critic_grad_norm"):
        apart[name] = abs(ours[name] - theirs[name]) / abs(theirs[name])
    apart["actor_weights"] = _apart(_weights(tandem.engine.actor), _weights(plain.loop.actor))
    apart["critic_weights"] = _apart(_weights(tandem.engine.critic), _weights(plain.loop.critic))
    for name, distance in apart.items():
        # A ratio at its clip falls to either side by the last bit, and Adam makes a whole step of
        # it: after one epoch the actors' weights are 5e-6 apart, after the second 7e-4.
        limit = AGREEMENT[work.dtype] * (10 if name.startswith("actor_") else 1)
        if not distance <= limit:
            raise RuntimeError(
                f"{name} must agree to {limit:g} on both sides; got {distance:.3g} apart."
            )
    return apart


def padded_left(made: Experience, begin: Start) -> Sequences:
    """Tandem's right-padded rollout as the plain loop lays it out."""
    batch = made.batch
    prompt_tokens = [len(row) for row in begin.prompts]
    answer_tokens = batch.response_mask.sum(dim=1).tolist()
    left, right = max(prompt_tokens), max(answer_tokens)
    pad = begin.tokenizer.pad_token_id
    token_ids = torch.full((len(batch), left + right), pad, device=batch.token_ids.device)
    attention_mask = torch.zeros_like(token_ids, dtype=torch.bool)
    response_mask = torch.zeros_like(attention_mask)
    for i, (prompt, answer) in enumerate(zip(prompt_tokens, answer_tokens, strict=True)):
        here = slice(left - prompt, left + answer)
        token_ids[i, here] = batch.token_ids[i, : prompt + answer]
        attention_mask[i, here] = True
        response_mask[i, left : left + answer] = True
    return Sequences(token_ids, attention_mask, response_mask)


@torch.no_grad()
def _move(model: PreTrainedModel) -> None:
    """The same noise on the same weights, of a tenth of their size."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.add_(0.1 * noise * parameter.square().mean().sqrt())


def _weights(model: PreTrainedModel) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
