"""Some answers of a rollout, and several rollouts as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tandem.types import Rollout, TokenBatch


def selected(rollout: Rollout, rows: Tensor) -> Rollout:
    """The answers at `rows` (M,) int64, trimmed to the longest of them."""
    batch = rollout.batch.select(rows)
    width = batch.token_ids.shape[1]
    kept = rows.tolist()
    return Rollout(
        batch=batch,
        **{name: getattr(rollout, name)[rows, :width] for name in Rollout.PER_TOKEN},
        finished=rollout.finished[rows],
        prompts=tuple(rollout.prompts[i] for i in kept),
        responses=tuple(rollout.responses[i] for i in kept),
        group=rollout.group[rows],
        rank_seconds=rollout.rank_seconds,
    )


def answer_masks(rollout: Rollout) -> Iterator[Tensor]:
    """Of each row the tokens of its answer, (T,) bool on the host; in a conversation, whose prompt
    holds earlier answers, of the last one."""
    mask = rollout.batch.on_host().response_mask
    for row, prompt in enumerate(rollout.prompts):
        own = mask[row].clone()
        own[: len(prompt)] = False
        yield own


def at_tokens(rollout: Rollout, numbers: Sequence[Sequence[float]]) -> Tensor | None:
    """Numbers of the tokens of each row's answer (`answer_masks`) at these tokens, (B, T) float32,
    0 elsewhere. A row may have none; None where there are no rows of them."""
    if not numbers:
        return None
    placed = torch.zeros(rollout.batch.token_ids.shape)
    for row, own in enumerate(answer_masks(rollout)):
        if numbers[row]:
            placed[row, own] = torch.tensor(numbers[row], dtype=torch.float32)
    return placed.to(rollout.rollout_logprobs.device)


def joined(rollouts: Sequence[Rollout], pad_token_id: int) -> Rollout:
    """All answers of several rollouts, in order; groups are numbered on."""
    if len(rollouts) == 1:
        return rollouts[0]
    width = max(rollout.batch.token_ids.shape[1] for rollout in rollouts)

    def together(columns: Sequence[Tensor], fill: float) -> Tensor:
        padded = [
            torch.nn.functional.pad(column, (0, width - column.shape[1]), value=fill)
            for column in columns
        ]
        return torch.cat(padded)

    batches = [rollout.batch for rollout in rollouts]
    sizes = [int(rollout.group.max()) + 1 for rollout in rollouts]
    before = [0, *accumulate(sizes)]
    return Rollout(
        batch=TokenBatch(
            together([batch.token_ids for batch in batches], pad_token_id),
            together([batch.attention_mask for batch in batches], False),
            together([batch.response_mask for batch in batches], False),
        ),
        **{
            name: together([getattr(rollout, name) for rollout in rollouts], 0.0)
            for name in Rollout.PER_TOKEN
        },
        finished=torch.cat([rollout.finished for rollout in rollouts]),
        prompts=tuple(prompt for rollout in rollouts for prompt in rollout.prompts),
        responses=tuple(text for rollout in rollouts for text in rollout.responses),
        group=torch.cat(
            [rollout.group + start for rollout, start in zip(rollouts, before, strict=False)]
        ),
        rank_seconds=tuple(
            map(sum, zip(*(rollout.rank_seconds for rollout in rollouts), strict=True))
        ),
    )
