"""Forwards over batches: log-probs, values and scores per token, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.data.loader import microbatches
from tandem.models.head import vocabulary_head
from tandem.models.packed import hidden_states, predictor_positions
from tandem.objectives.logprobs import scatter_to_tokens, token_logprobs
from tandem.types import TokenBatch


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Compute in `dtype` where that is safe; float32 computes as it is."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def response_logprobs(
    model: PreTrainedModel,
    batch: TokenBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each response token and the entropy it was chosen with, with gradient.

    Only response tokens go through the vocabulary head, in chunks.

    Returns:
        logprobs and entropy, (B, T) float32 nats, 0 off the response.
    """
    selected = hidden_states(model, batch)[predictor_positions(batch)]
    logprobs, entropy = token_logprobs(
        vocabulary_head(model),
        selected,
        batch.token_ids[batch.response_mask],
        vocabulary=model.config.get_text_config().vocab_size,
        temperature=temperature,
        with_entropy=with_entropy,
    )
    return (
        scatter_to_tokens(logprobs, batch.response_mask),
        scatter_to_tokens(entropy, batch.response_mask),
    )


def split_rows(batch: TokenBatch, max_tokens: int) -> list[Tensor]:
    """Row numbers of each micro-batch: similar lengths, at most `max_tokens` padded tokens."""
    groups = microbatches(batch.lengths().tolist(), max_tokens)
    return [torch.tensor(group, device=batch.token_ids.device) for group in groups]


@torch.no_grad()
def scored(
    batch: TokenBatch, max_tokens: int, forward: Callable[[TokenBatch], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Run `forward` micro-batch by micro-batch without gradient and put the parts together.

    Args:
        forward: a batch (b, t) to tensors of shape (b, t) or (b,).
    Returns:
        the same tensors for the whole batch, (B, T) or (B,), float32, 0 where nothing was written.
    """
    results: list[Tensor] = []
    for rows in split_rows(batch, max_tokens):
        part = batch.select(rows)
        outputs = forward(part)
        if not results:
            results = [
                torch.zeros(
                    batch.token_ids.shape if output.dim() == 2 else (len(batch),),
                    device=output.device,
                )
                for output in outputs
            ]
        for result, output in zip(results, outputs, strict=True):
            if output.dim() == 2:
                result[rows[:, None], torch.arange(output.shape[1], device=rows.device)] = (
                    output.float()
                )
            else:
                result[rows] = output.float()
    return tuple(results)
