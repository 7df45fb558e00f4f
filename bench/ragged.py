"""Rows of ragged lengths for the training benches, and the steps that both sides take over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from tandem.types import Source, TokenRow

PAD, EOS = 0, 2

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-2.2m": {
        "vocab_size": 2048,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "tie_word_embeddings": True,
    },
    "llama-22m": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
}


def llama_config(shape: Mapping[str, Any], **more: Any) -> LlamaConfig:
    """The config of that shape, with the ids that the rows of `ragged_rows` keep free."""
    return LlamaConfig(**shape, pad_token_id=PAD, bos_token_id=None, eos_token_id=EOS, **more)


def ragged_rows(
    num_rows: int,
    vocab_size: int,
    *,
    prompt_tokens: tuple[int, int] = (32, 64),
    max_answer_tokens: int = 128,
    seed: int = 1,
) -> list[TokenRow]:
    """Prompts of equally likely lengths, then answers of geometric lengths with EOS as the last.

    Answers are cut at `max_answer_tokens`; their mean is about half of it, as in generation.py.
    Ids are random and never PAD, which Hugging Face's reward models tell a row's end by.
    """
    generator = torch.Generator().manual_seed(seed)
    p = 1.594 / max_answer_tokens
    rows = []
    for i in range(num_rows):
        least, most = prompt_tokens
        prompt = int(torch.randint(least, most + 1, (), generator=generator))
        uniform = float(torch.rand((), generator=generator))
        answer = min(max_answer_tokens, 1 + int(math.log1p(-uniform) / math.log1p(-p)))
        ids = torch.randint(EOS + 1, vocab_size, (prompt + answer,), generator=generator).tolist()
        rows.append(
            TokenRow(
                token_ids=(*ids[:-1], EOS),
                response_mask=(False,) * prompt + (True,) * answer,
                source=Source("bench", "bench", i + 1),
            )
        )
    return rows


def apart(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The size of the difference of all these tensors over the size of the others."""
    left, right = (torch.cat([t.detach().float().flatten() for t in ts]) for ts in (ours, theirs))
    return float((left - right).norm() / right.norm())
