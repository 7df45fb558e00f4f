"""Operations against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.models.flops import sequence_flops
from tandem.models.lora import add_lora
from tandem.ops import dense

from .families import VOCABULARY, tiny_model, tiny_scalar


def flops_per_token(
    model: PreTrainedModel, length: int, *, backward: bool = False, logits: bool = True
) -> float:
    num_logits = length if logits else 0
    return sequence_flops(model, [length], num_logits, backward=backward) / length


def counted(model: torch.nn.Module, length: int, backward: bool) -> float:
    """torch's count of matrix products per token."""
    with FlopCounterMode(display=False) as counter:
        output = model(torch.randint(VOCABULARY, (1, length)), use_cache=False).logits
        if backward:
            output.sum().backward()
    return counter.get_total_flops() / length


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3", "gemma2"])
def test_operations_against_torchs_counter(family: str, backward: bool) -> None:
    options = {"n_embd": 64} if family == "gpt2" else {"hidden_size": 64, "intermediate_size": 256}
    if family == "gemma2":
        options |= {"sliding_window": 64}
    model = tiny_model(family, **options)
    model.set_attn_implementation("eager")
    length = 24
    # torch counts the masked half of attention too: 4 * layers * width * length, 3x with backward
    width = model.config.num_attention_heads * getattr(model.config, "head_dim", 16)
    masked = 4 * 2 * width * (length - (length + 1) / 2) * (3 if backward else 1)
    expected = counted(model, length, backward) - masked
    ours = flops_per_token(model, length, backward=backward)
    assert ours == pytest.approx(expected, rel=0.02)


def test_frozen_weights_cost_no_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's counter knows torch's own operations alone.
    monkeypatch.setattr(dense, "_native", lambda x: False)
    model = tiny_model("llama", hidden_size=64, intermediate_size=256)
    model.set_attn_implementation("eager")
    full = flops_per_token(model, 24, backward=True)
    add_lora(model, LoraConfig(rank=1), seed=0)
    ours = flops_per_token(model, 24, backward=True)
    masked = 4 * 2 * 32 * (24 - 12.5) * 3
    assert ours < 0.8 * full
    assert ours == pytest.approx(counted(model, 24, True) - masked, rel=0.1)


def test_the_head_and_the_window_count_where_they_act() -> None:
    model = tiny_model("llama")
    with_head, without = (flops_per_token(model, 8, logits=x) for x in (True, False))
    assert with_head - without == 2 * VOCABULARY * 32
    assert flops_per_token(tiny_scalar("llama"), 8) == without + 2 * 32
    mistral = tiny_model("mistral")
    assert flops_per_token(mistral, 3) == flops_per_token(mistral, 60)
    assert flops_per_token(model, 3) < flops_per_token(model, 60)
    half = tiny_model("gemma2")  # every other layer slides, window 4
    assert flops_per_token(half, 60) - flops_per_token(half, 4) == 4 * 32 * (60 - 4) / 2
