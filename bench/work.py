"""The work of one PPO step that both sides do: models from a config, prompts, knobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tandem.data.embedded.tokenizer import build_tokenizer
from tandem.types import Message, PromptRow, Source

Mode = Literal["forced", "ragged"]

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "a": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "tie_word_embeddings": False,
    },
    "b": {
        "vocab_size": 32000,
        "hidden_size": 288,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "tie_word_embeddings": True,
    },
}
"""a: Llama of 0.94M parameters. b: of 15.2M, the shape of stories15M."""

MICRO_BATCH_TOKENS = {"a": 1536, "b": 768}
"""Padded tokens per forward: what the plain loop is fastest with, 16 and 8 rows."""

TANDEM_MICRO_BATCH_TOKENS = {"a": 1536, "b": 384}
"""Tokens per forward of Tandem's: fewer where the logits of that many rows are what memory goes to;
it is a little faster with 768, as the plain loop."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One PPO step: models, prompts, lengths and knobs. The same for both sides.

    mode: forced: no answer may end, all have max_new_tokens. ragged: answers end after lengths
        from a geometric distribution, cut at max_new_tokens, with half of that as their mean.
    prompt_tokens: each prompt's length in tokens, or the lengths that prompts take in turn.
    micro_batch_tokens: tokens per forward; of the plain loop alone if Tandem has its own.
    """

    shape: Mapping[str, Any]
    mode: Mode = "forced"
    num_prompts: int = 64
    prompt_tokens: tuple[int, ...] = (32,)
    max_new_tokens: int = 64
    epochs: int = 1
    minibatch_size: int = 64
    micro_batch_tokens: int
    tandem_micro_batch_tokens: int | None = None
    actor_learning_rate: float = 1e-6
    critic_learning_rate: float = 1e-5
    dtype: Literal["fp32", "bf16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 1


@dataclass(frozen=True)
class Start:
    """Where both sides start: models on the CPU that nobody changes, tokenizer and prompts.

    The critic starts as the reward model.
    """

    actor: PreTrainedModel
    reward_model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: tuple[PromptRow, ...]


def start(work: Work) -> Start:
    """Random weights, and prompts of random ids, from the work's seed."""
    tokenizer = build_tokenizer(min(512, work.shape["vocab_size"]))
    settings = {
        **work.shape,
        "max_position_embeddings": max(work.prompt_tokens) + work.max_new_tokens,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(work.seed)
    actor = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    reward_model = LlamaForSequenceClassification(
        LlamaConfig(**settings | {"num_labels": 1})
    ).eval()
    if work.mode == "ragged":
        _let_answers_end(actor, tokenizer.eos_token_id, work.max_new_tokens)
    return Start(actor, reward_model, tokenizer, _prompts(work, len(tokenizer)))


def _prompts(work: Work, tokenizer_size: int) -> tuple[PromptRow, ...]:
    generator = torch.Generator().manual_seed(work.seed)
    rows = []
    for i in range(work.num_prompts):
        num_tokens = work.prompt_tokens[i % len(work.prompt_tokens)]
        ids = torch.randint(5, tokenizer_size, (num_tokens,), generator=generator)  # no controls
        rows.append(
            PromptRow(
                tuple(ids.tolist()), (Message("user", "?"),), {}, Source("bench", "bench", i + 1)
            )
        )
    return tuple(rows)


def _let_answers_end(actor: PreTrainedModel, eos_token_id: int, max_new_tokens: int) -> None:
    """Give EOS about the same probability p at every token, by a frozen bias of the head.

    The lengths of answers are then geometric, and the mean of the ones cut at n tokens is
    (1 - (1 - p)^n) / p, which is n / 2 at p = 1.594 / n.
    """
    head = actor.get_output_embeddings()
    biased = nn.Linear(head.in_features, head.out_features)
    biased.weight = head.weight  # the same tensor, so that a tied head stays tied
    p = 1.594 / max_new_tokens
    with torch.no_grad():
        biased.bias.zero_()
        biased.bias[eos_token_id] = math.log(p / (1 - p) * (head.out_features - 1))
    biased.bias.requires_grad_(False)
    actor.set_output_embeddings(biased)
