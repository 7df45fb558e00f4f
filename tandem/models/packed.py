"""Forwards over packed sequences: only the real tokens of a batch, so no work on padding.

N is the number of real tokens, in the order of the batch's rows. Families that
cannot be packed (`twin.supports_packing`) run padded, and the real tokens are picked afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.errors import ShapeError
from tandem.models.twin import base_forward, supports_packing, twin_of
from tandem.ops.attention_context import Packed, attending
from tandem.types import TokenBatch


def hidden_states(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Last hidden states (N, D) of the real tokens of a batch, with gradient.

    Positions count from 0 in every row; a token sees its own row up to itself.
    """
    if not supports_packing(model):
        # No mask: a token of a causal model sees nothing to its right, where all padding is.
        padded = model.base_model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        return padded[batch.attention_mask]
    lengths = batch.lengths()
    places = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    positions = places.expand_as(batch.token_ids)[batch.attention_mask]
    step = Packed.of_lengths(lengths.tolist(), batch.token_ids.device)
    with attending(step):
        return base_forward(
            twin_of(model), batch.token_ids[batch.attention_mask][None], positions[None]
        )[0]


def real_positions(batch: TokenBatch) -> Tensor:
    """(B, T) int64: a real token's index among the N; meaningless at padding."""
    return batch.attention_mask.flatten().cumsum(0).view(batch.attention_mask.shape) - 1


def predictor_positions(batch: TokenBatch) -> Tensor:
    """For each response token, in the order of the mask: the index among the N of its predictor.

    A model's output at a token predicts the next one. This is the only place that shifts by one.

    Raises:
        ShapeError: the mask holds at index 0, which nothing precedes.
    """
    if bool(batch.response_mask[:, 0].any()):
        raise ShapeError(
            "response_mask must not hold at index 0; got a row that begins with a response. Give "
            "every row a token before its answer."
        )
    return real_positions(batch)[batch.response_mask] - 1


def last_positions(batch: TokenBatch) -> Tensor:
    """(B,) int64: the index among the N of each row's last real token."""
    return batch.lengths().cumsum(0) - 1
