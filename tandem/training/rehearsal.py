"""The largest micro-batches of an RL stage, before its first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.divergence import compared_with_reference, release_reference
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.oom import MicroBatchBudget
from tandem.engine.update import rehearse, training_mode
from tandem.training.algorithm import Algorithm
from tandem.types import PromptRow, TokenBatch


def rehearse_updates(
    engine: RLHFEngine,
    budget: MicroBatchBudget,
    minibatch_size: int,
    algorithm: Algorithm,
    prompts: Sequence[PromptRow],
    answer: int,
) -> None:
    """Run the largest micro-batches that can come forward and backward, for nothing: what does not
    fit into memory is known before the first step.

    Args:
        minibatch_size: answers of an update, over all ranks.
        answer: most tokens that follow a prompt.
    Raises:
        OutOfMemoryError: it does not.
    """
    length = max(len(prompt) for prompt in prompts) + answer
    device = engine.device

    # No rank gets more answers of a minibatch than this.
    share = -(-minibatch_size // engine.world.size)

    def batch(max_tokens: int) -> TokenBatch:
        rows = max(1, min(max_tokens // length, share))
        response = torch.zeros((rows, length), dtype=torch.bool, device=device)
        response[:, length - answer :] = True
        ids = torch.full((rows, length), engine.renderer.pad_token_id, device=device)
        # No two rows share their prompt: the most that a micro-batch can take.
        vocabulary = engine.actor.config.get_text_config().vocab_size
        ids[:, 0] = torch.arange(rows, device=device) % vocabulary
        return TokenBatch(ids, torch.ones_like(response), response)

    def actor_loss(max_tokens: int) -> Tensor:
        with_entropy, tokens = algorithm.entropy_coef > 0, batch(max_tokens)
        if algorithm.divergence and engine.has_reference:
            found = compared_with_reference(
                engine,
                tokens,
                algorithm.divergence,
                learns_logprobs=algorithm.is_rewarded,
                with_entropy=with_entropy,
            )
            return found.logprobs.sum() + found.kl_sum
        return engine.actor_logprobs(tokens, with_entropy=with_entropy)[0].sum()

    def critic_loss(max_tokens: int) -> Tensor:
        return engine.values(batch(max_tokens)).sum()

    with training_mode(*engine.trained_models):
        rehearse(budget, engine.actor_learner, actor_loss)
        release_reference(engine)
        if engine.critic_learner is not None:
            rehearse(budget, engine.critic_learner, critic_loss)
