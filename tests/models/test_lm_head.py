"""Hidden states and the head alone give the full forward's logits."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.lora import LoraConfig
from tandem.errors import ModelError, NumericsError
from tandem.models.lm_head import (
    VocabularyHead,
    check_head,
    vocabulary_head,
    vocabulary_logits,
)
from tandem.models.lora import add_lora
from tandem.models.packed import hidden_states

from .families import CAUSAL_ONLY, FAMILIES, ragged_batch, scaled, tiny_model


@pytest.mark.parametrize("family", [*FAMILIES, *CAUSAL_ONLY])
def test_hidden_states_and_head_are_the_full_logits(family: str) -> None:
    model = tiny_model(family)
    batch = ragged_batch()
    with torch.no_grad():
        full = model(batch.token_ids, attention_mask=batch.attention_mask.long()).logits
        ours = vocabulary_logits(model, hidden_states(model, batch))
    # Each side's own rounding is up to 1e-6 of the largest (Granite's, against float64).
    assert scaled(ours, full[batch.attention_mask], 2e-6)
    check_head(model)


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("adapted", [False, True])
def test_gradients_are_those_of_the_full_forward(family: str, adapted: bool) -> None:
    model = tiny_model(family)
    if adapted:
        add_lora(model, LoraConfig(rank=2), seed=0)
    model.train()
    batch = ragged_batch()
    mask = batch.attention_mask
    full = model(batch.token_ids, attention_mask=mask.long()).logits[mask]
    expected = _gradients(model, full.log_softmax(-1).square().sum())
    hidden = hidden_states(model, batch)
    ours = _gradients(model, vocabulary_logits(model, hidden).log_softmax(-1).square().sum())
    assert ours.keys() == expected.keys()
    # A gradient that is zero by the formula (OPT's key biases) is rounding of the others' size.
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in ours.items():
        apart = float((gradient - expected[name]).abs().max())
        assert apart <= 1e-4 * float(expected[name].abs().max()) + 1e-6 * largest, name


def test_parameters_are_shared_and_followed() -> None:
    model = tiny_model("llama")
    head = vocabulary_head(model)
    hidden = torch.randn(3, 32)
    before = head(hidden)
    with torch.no_grad():
        model.lm_head.weight *= 2
    assert torch.equal(head(hidden), 2 * before)
    assert vocabulary_head(model) is head
    assert list(model._modules) == ["model", "lm_head"], "the model itself is unchanged"
    assert type(model.model).__name__ == "LlamaModel"


def test_the_cache_keeps_no_model_alive() -> None:
    model = tiny_model("llama")
    vocabulary_head(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_without_its_base_in_place() -> None:
    model = tiny_model("llama")
    model.base_model_prefix = "elsewhere"
    with pytest.raises(ModelError, match="'llama' must keep its base model as 'elsewhere'"):
        VocabularyHead(model)


def test_a_head_that_reads_more_than_the_last_hidden_state() -> None:
    model = tiny_model("llama")
    forward = type(model).forward

    def skipping(self: object, input_ids: Tensor | None = None, **kwargs: object) -> object:
        output = forward(self, input_ids, **kwargs)
        return output if input_ids is None else SimpleNamespace(logits=output.logits + 1)

    model.__class__ = type("Skipping", (type(model),), {"forward": skipping})
    with pytest.raises(ModelError, match="'llama' must follow from its last hidden states; got a"):
        check_head(model)


def test_a_forward_that_needs_token_ids() -> None:
    model = tiny_model("llama")
    forward = type(model).forward

    def needy(self: object, input_ids: Tensor | None = None, **kwargs: object) -> object:
        logits = forward(self, input_ids, **kwargs).logits
        return SimpleNamespace(logits=logits[: input_ids.shape[0]])

    model.__class__ = type("Needy", (type(model),), {"forward": needy})
    with pytest.raises(ModelError, match="must follow from its last hidden states; got Attr"):
        check_head(model)


def test_a_model_that_sees_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").train()
    norm = model.model.norm
    monkeypatch.setattr(norm, "forward", lambda h: h + h.mean(dim=1, keepdim=True))
    with pytest.raises(ModelError, match="must not depend on later tokens or right padding"):
        check_head(model)
    assert model.training, "the mode is restored"


def test_a_model_that_float16_cannot_hold_is_told_so() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = 1e6
    check_head(model.bfloat16())
    with pytest.raises(NumericsError, match=r"must be finite; got some .* torch.float16. Use --dt"):
        check_head(model.half())


def test_a_family_whose_own_forward_mixes_types_is_refused_in_half_precision() -> None:
    """XGLM adds a float32 table of positions to its embeddings."""
    settings = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
    config = AutoConfig.for_model("xglm", vocab_size=99, **settings)
    model = AutoModelForCausalLM.from_config(config)
    check_head(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    with pytest.raises(ModelError, match=r"'xglm' must compute in torch.bfloat16.*--dtype fp32"):
        check_head(model)
