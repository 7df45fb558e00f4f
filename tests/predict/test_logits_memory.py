"""What the vocabulary head holds at once in a step, counted, beside the formula."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tandem.config.lora import LoraConfig
from tandem.memory.model import Layout
from tandem.memory.shape import shape_of
from tandem.memory.work import logits_bytes
from tandem.models.lm_head import vocabulary_head
from tandem.models.lora import add_lora
from tandem.objectives.logprobs import token_logprobs
from tandem.ops import logits, native
from tests.predict.test_pair_memory import _WithGradients

BUDGET = 1 << 20
VOCABULARY, WIDTH = 4096, 16
IN_BUDGET = BUDGET // (4 * VOCABULARY)
"""Tokens whose logits are made at once."""


def counted(config: LlamaConfig, trained: Sequence[int], tokens: int) -> int:
    """The most bytes beside weights, of the head's forward and backward on some states."""
    model = AutoModelForCausalLM.from_config(config)
    add_lora(model, LoraConfig(rank=2), 0, tokens=trained)
    head = vocabulary_head(model)
    states = torch.randn(tokens, WIDTH, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (tokens,))
    with _WithGradients(model) as alive:
        logprobs, _ = token_logprobs(
            head, states, targets, vocabulary=VOCABULARY, weights=head.weights
        )
        logprobs.sum().backward()
    return alive.peak


@pytest.mark.skipif(not native.available(), reason="plain torch keeps the logits and more")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [IN_BUDGET // 2, 3 * IN_BUDGET])
def test_trained_rows_take_a_copy_of_the_logits(
    tied: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logits.BUDGET_BYTES, "cpu", BUDGET)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1,
        vocab_size=VOCABULARY, tie_word_embeddings=tied,
    )  # fmt: skip
    predicted, found = [], []
    for trained in ((), (4, 9)):
        layout = Layout(on_cpu=True, lora_rank=2, token_rows=len(trained))
        predicted.append(logits_bytes(shape_of(config), tokens, layout, backward=True))
        found.append(counted(config, trained, tokens))
    assert predicted[1] - predicted[0] == pytest.approx(found[1] - found[0], rel=0.02)
    assert predicted[1] == pytest.approx(found[1], rel=0.15)
