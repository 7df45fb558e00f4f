"""Quantized frozen weights: the numbers of the weights that they stand for, and no second copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tandem.config.schema import (
    LoraConfig,
    SamplingConfig,
)
from tandem.engine.forward import response_logprobs, sequence_scores
from tandem.errors import ModelError, NumericsError
from tandem.generation.generator import generate
from tandem.generation.stops import Stops
from tandem.models.adapter import load_adapter
from tandem.models.frozen import FrozenConv1D, FrozenLinear, freeze_quantized
from tandem.models.load import load_causal_lm
from tandem.models.lora import (
    adapters_off,
    add_lora,
    lora_layers,
    lora_parameters,
)
from tandem.models.quantized import KINDS, PackedWeight
from tandem.models.save import save_model
from tandem.models.selfcheck import check_twin
from tandem.models.twin import shares_every_tensor, supports_packing, twin_of
from tandem.ops import native
from tandem.types import PromptRow, Source

from .families import FAMILIES, merged_state_dict, ragged_batch, tiny_model, tiny_scalar, tokenizer

CONFIG = LoraConfig(rank=3, alpha=6.0)
BYTES = {"int8": 1 + 4 / 256, "nf4": 0.5 + 2 / 64}
STOPS = Stops((2,), 0, lambda ids: " ".join(map(str, ids)))
needs_native = pytest.mark.skipif(not native.available(), reason=native.why_not())
kinds = pytest.mark.parametrize("kind", KINDS)


def bloom() -> PreTrainedModel:
    """A family that the twin does not compute."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("bloom", vocab_size=99, hidden_size=32, n_layer=2, n_head=4)
    return AutoModelForCausalLM.from_config(config).eval()


def packed_weights(model: nn.Module) -> list[PackedWeight]:
    return [module for module in model.modules() if isinstance(module, PackedWeight)]


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """The model with adapters that act."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def pair(
    plain: PreTrainedModel, kind: str, *, rank: int = 3
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model quantized, and in full with the numbers that its integers stand for."""
    quantized, full = copy.deepcopy(plain), plain
    for model in (quantized, full):
        model.requires_grad_(False)
        if rank:
            add_lora(model, LoraConfig(rank=rank, alpha=6.0), seed=1)
            moved(model)
    for name in freeze_quantized(quantized, kind):
        weight = full.get_submodule(name).weight
        weight.data = PackedWeight(weight.data, kind).dequantized()
    return quantized, full


def logprobs(model: PreTrainedModel) -> Tensor:
    return response_logprobs(model, ragged_batch((9, 5, 12, 3)))[0]


def own_logits(model: PreTrainedModel) -> Tensor:
    return model(ragged_batch((7, 7)).token_ids, use_cache=False).logits


def gradients(model: PreTrainedModel, forward: Callable[[PreTrainedModel], Tensor]) -> list[Tensor]:
    """The output, and the adapters' gradients of its weighted sum."""
    output = forward(model)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    (output.float() * weights).sum().backward()
    found = [p.grad for p in lora_parameters(model)]
    assert all(g is not None for g in found)
    model.zero_grad(set_to_none=True)
    return [output.detach(), *(g for g in found if g is not None)]


def all_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@kinds
@pytest.mark.parametrize("name", [*FAMILIES, "bloom"])
def test_forward_and_gradients_are_those_of_the_weights_it_stands_for(name: str, kind: str) -> None:
    quantized, full = pair(bloom() if name == "bloom" else tiny_model(name), kind)
    assert supports_packing(quantized) == (name != "bloom")
    for forward in (own_logits, logprobs):
        assert all_equal(gradients(quantized, forward), gradients(full, forward))
    with adapters_off(quantized), adapters_off(full), torch.no_grad():
        off = logprobs(quantized)
        assert torch.equal(off, logprobs(full)), "the reference is adapters off"
    assert not torch.equal(off, logprobs(quantized))


@kinds
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_without_adapters_too(name: str, kind: str) -> None:
    quantized, full = pair(bloom() if name == "bloom" else tiny_model(name), kind, rank=0)
    with torch.no_grad():
        assert torch.equal(own_logits(quantized), own_logits(full))
        assert torch.equal(logprobs(quantized), logprobs(full))


@kinds
def test_a_reward_model(family: str, kind: str) -> None:
    quantized, full = pair(tiny_scalar(family), kind, rank=0)
    assert type(quantized.score) is nn.Linear
    with torch.no_grad():
        batch = ragged_batch()
        assert torch.equal(sequence_scores(quantized, batch), sequence_scores(full, batch))


@kinds
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_quantized_gradients_in_bf16_are_those_of_the_written_out_weights(
    name: str, kind: str
) -> None:
    quantized, full = pair(tiny_model(name).bfloat16(), kind)
    assert all_equal(gradients(quantized, logprobs), gradients(full, logprobs))


@needs_native
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_one_copy_trains_and_generates(name: str, dtype: torch.dtype, kind: str) -> None:
    quantized, _ = pair(tiny_model(name).to(dtype), kind)
    rows = [
        PromptRow(tuple(range(4, 4 + n)), (), {}, Source("test", "test", n)) for n in (5, 17, 1)
    ]
    made = generate(quantized, rows, SamplingConfig(max_new_tokens=12), STOPS, seed=3, step=1)
    scored, _ = response_logprobs(quantized, made.batch)
    assert scored.requires_grad
    assert torch.equal(made.rollout_logprobs, scored.detach())
    twins, ours = packed_weights(twin_of(quantized)), packed_weights(quantized)
    assert len(ours) == len(twins) > 0
    assert all(
        a.packed is b.packed and a.scales is b.scales for a, b in zip(ours, twins, strict=True)
    )
    assert shares_every_tensor(quantized)
    assert check_twin(quantized).bitwise


@kinds
def test_adapters_may_come_before_or_after(family: str, kind: str) -> None:
    before, _ = pair(tiny_model(family), kind)
    after = tiny_model(family).requires_grad_(False)
    names = freeze_quantized(after, kind)
    add_lora(after, CONFIG, seed=1)
    assert all_equal(gradients(before, logprobs), gradients(moved(after), logprobs))
    assert {n for n, _ in lora_layers(after)} <= set(names)
    assert [p for p in after.parameters() if p.requires_grad] == lora_parameters(after)


def test_all_linear_layers_but_a_tied_head_are_quantized(family: str) -> None:
    model = tiny_model(family)
    add_lora(model, LoraConfig(rank=2, targets=("0.self_attn.q_proj",)), seed=0) if (
        family == "llama"
    ) else model.requires_grad_(False)
    head = model.get_output_embeddings()
    is_tied = head.weight is model.get_input_embeddings().weight
    linear = [
        n
        for n, m in model.named_modules()
        if hasattr(m, "weight")
        and m.weight.dim() == 2
        and not isinstance(m, nn.Embedding)
        and "lora_" not in n
        and not (is_tied and m is head)
    ]
    embedding = model.get_input_embeddings().weight
    assert freeze_quantized(model, "int8") == linear
    assert model.get_input_embeddings().weight is embedding
    assert isinstance(model.get_output_embeddings(), FrozenLinear) != is_tied
    kind = FrozenConv1D if family == "gpt2" else FrozenLinear
    assert type(model.get_submodule(linear[-2])) is kind


@kinds
def test_state_goes_round(kind: str) -> None:
    quantized, _ = pair(tiny_model("gpt2"), kind)
    state = {name: tensor.clone() for name, tensor in quantized.state_dict().items()}
    assert "transformer.h.0.attn.c_attn.weight.packed" in state
    other, _ = pair(tiny_model("gpt2", initializer_range=0.4), kind)
    assert not torch.equal(logprobs(other), logprobs(quantized))
    other.load_state_dict(state)
    assert torch.equal(logprobs(other), logprobs(quantized))


@kinds
@pytest.mark.parametrize("rank", [0, 3])
def test_saved_in_full(tmp_path: Path, family: str, kind: str, rank: int) -> None:
    quantized, full = pair(tiny_model(family), kind, rank=rank)
    before = {name: tensor.clone() for name, tensor in quantized.state_dict().items()}
    merged, expected = merged_state_dict(quantized), merged_state_dict(full)
    assert merged.keys() == tiny_model(family).state_dict().keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    save_model(quantized, tokenizer(), tmp_path / "model", base_path="the/base")
    opened = load_causal_lm(tmp_path / "model")
    assert all(torch.equal(opened.state_dict()[name], expected[name]) for name in expected)
    assert all(torch.equal(quantized.state_dict()[name], before[name]) for name in before)
    if not rank:
        return
    written = (tmp_path / "model" / "adapter" / "adapter_config.json").read_text()
    assert '"the/base"' in written
    again = tiny_model(family).requires_grad_(False)
    freeze_quantized(again, kind)
    load_adapter(again, tmp_path / "model" / "adapter")
    assert torch.equal(logprobs(again), logprobs(quantized))


def test_what_cannot_be_done() -> None:
    model = tiny_model("llama")
    before = logprobs(model).detach()
    with pytest.raises(ModelError, match=r"must be one of int8, nf4; got 'int3'"):
        freeze_quantized(model, "int3")
    with pytest.raises(
        ModelError, match=r"got model.layers.0.self_attn.q_proj, which is trained.*--lora.rank"
    ):
        freeze_quantized(model, "int8")
    model.requires_grad_(False)
    last = model.get_submodule("model.layers.1.mlp.down_proj")
    value = last.weight[0, 0].item()
    last.weight[0, 0] = torch.nan
    with pytest.raises(NumericsError, match=r"finite; got model.layers.1.mlp.down_proj"):
        freeze_quantized(model, "int8")
    last.weight[0, 0] = value
    assert torch.equal(logprobs(model), before), "what is refused changes nothing"
    freeze_quantized(model, "int8")
    with pytest.raises(ModelError, match=r"which is quantized to int8 already"):
        freeze_quantized(model, "nf4")
    with pytest.raises(ModelError, match=r"quantized weight must stay frozen"):
        model.requires_grad_(True)
    with pytest.raises(ModelError, match=r"quantized weight must stay frozen"):
        copy.deepcopy(model).requires_grad_(True)
    model.requires_grad_(False)


def test_a_model_without_linear_layers_of_its_own() -> None:
    model = tiny_model("qwen2").requires_grad_(False)
    model.model.layers = nn.ModuleList()
    with pytest.raises(ModelError, match=r"needs linear layers to quantize; Qwen2ForCausalLM has"):
        freeze_quantized(model, "int8")
