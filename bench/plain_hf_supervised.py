"""SFT and the reward model with plain Hugging Face parts: the loops that a careful user writes.

Rows padded on the right to the longest of their micro-batch, the attention mask, the model's own
logits of every position, cross-entropy that leaves out prompts, AdamW, clipping. The loss of a step
is a mean over all of its tokens (or pairs), whatever micro-batches it was cut into. Nothing here is
Tandem's but the rows, so that what Tandem is measured against stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tandem.types import PairRow, TokenRow

IGNORED = -100
"""A label that cross-entropy leaves out."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What both of these loops take.

    micro_batch_tokens: padded tokens per forward; at least one row (or pair) is taken.
    """

    micro_batch_tokens: int
    learning_rate: float
    betas: tuple[float, float]
    max_grad_norm: float
    pad_token_id: int
    bf16: bool = False


@dataclass(frozen=True)
class Step:
    """What one optimizer step reported."""

    loss: float
    grad_norm: float


def train_sft(
    model: PreTrainedModel, batches: Sequence[Sequence[TokenRow]], settings: Settings
) -> list[Step]:
    """One optimizer step for each batch: mean cross-entropy of the answers' tokens."""
    optimizer = adamw(model, settings.learning_rate, settings.betas)
    model.train()
    steps = []
    for batch in batches:
        count = sum(sum(row.response_mask) for row in batch)
        total = 0.0
        for rows in row_chunks(batch, settings.micro_batch_tokens):
            loss = language_loss(model, rows, settings) / count
            loss.backward()
            total += loss.item()
        steps.append(Step(total, update(model, optimizer, settings.max_grad_norm)))
    return steps


def train_reward(
    model: PreTrainedModel, batches: Sequence[Sequence[PairRow]], settings: Settings
) -> list[Step]:
    """One optimizer step for each batch: mean of -log sigmoid(chosen - rejected)."""
    optimizer = adamw(model, settings.learning_rate, settings.betas)
    model.train()
    steps = []
    for batch in batches:
        total = 0.0
        for pairs in pair_chunks(batch, settings.micro_batch_tokens):
            rows = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
            token_ids, attention_mask, _ = padded(rows, settings.pad_token_id, model.device)
            with autocast(model, settings.bf16):
                scores = model(input_ids=token_ids, attention_mask=attention_mask).logits[:, 0]
            chosen, rejected = scores.float().chunk(2)
            loss = -F.logsigmoid(chosen - rejected).sum() / len(batch)
            loss.backward()
            total += loss.item()
        steps.append(Step(total, update(model, optimizer, settings.max_grad_norm)))
    return steps


def language_loss(model: PreTrainedModel, rows: Sequence[TokenRow], settings: Settings) -> Tensor:
    """Sum of the cross-entropies of the rows' answers, from the logits of every position."""
    token_ids, attention_mask, labels = padded(rows, settings.pad_token_id, model.device)
    with autocast(model, settings.bf16):
        logits = model(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(),
        labels[:, 1:].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def row_chunks(rows: Sequence[TokenRow], max_tokens: int) -> Iterator[Sequence[TokenRow]]:
    """The rows in order, as many at a time as the longest of all fits into the tokens."""
    size = max(1, max_tokens // max(map(len, rows)))
    return (rows[i : i + size] for i in range(0, len(rows), size))


def pair_chunks(pairs: Sequence[PairRow], max_tokens: int) -> Iterator[Sequence[PairRow]]:
    """As `row_chunks`; a pair is two rows of the longer's length."""
    size = max(1, max_tokens // (2 * max(map(len, pairs))))
    return (pairs[i : i + size] for i in range(0, len(pairs), size))


def padded(
    rows: Sequence[TokenRow], pad_token_id: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """(b, t) ids, attention mask and labels, padded on the right to the longest row."""
    width = max(map(len, rows))
    token_ids = torch.full((len(rows), width), pad_token_id)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for i, row in enumerate(rows):
        ids = torch.tensor(row.token_ids)
        token_ids[i, : len(row)] = ids
        attention_mask[i, : len(row)] = 1
        labels[i, : len(row)] = torch.where(torch.tensor(row.response_mask), ids, IGNORED)
    return token_ids.to(device), attention_mask.to(device), labels.to(device)


def autocast(model: PreTrainedModel, bf16: bool) -> AbstractContextManager[object]:
    """bfloat16 where it is asked for."""
    return torch.autocast(model.device.type, dtype=torch.bfloat16) if bf16 else nullcontext()


def adamw(
    model: PreTrainedModel, learning_rate: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """Over all that is trained, without weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=learning_rate, betas=betas, weight_decay=0.0, fused=True)


def update(model: PreTrainedModel, optimizer: torch.optim.AdamW, max_grad_norm: float) -> float:
    """One clipped optimizer step; the gradient's norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()
