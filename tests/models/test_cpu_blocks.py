"""Decoder blocks on a CPU: which run as three operations, and the same bits as module by module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.config.parallel import Recompute
from tandem.models.frozen import freeze_quantized
from tandem.models.lora import adapters_off, add_lora, keep_start, lora_layers
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.twin import twin_of
from tandem.ops import layer, native
from tandem.ops.attention_context import Packed, Wanted, attending
from tests.models.families import tiny_model

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())

LENGTHS = [5, 20, 11]
FAMILIES = ["llama", "mistral", "qwen2", "gemma"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each block that ran as three operations: its rows."""
    found: list[int] = []
    own = layer.after_attention

    def counted(attended: Tensor, *others: Any, recomputes: bool) -> Tensor:
        found.append(attended.shape[1])
        return own(attended, *others, recomputes=recomputes)

    monkeypatch.setattr(layer, "after_attention", counted)
    return found


def hidden_of(model: PreTrainedModel) -> Tensor:
    count = sum(LENGTHS)
    ids = torch.arange(count)[None] * 7 % 90 + 3
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    ends = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    with attending(Packed(ends, max(LENGTHS))):
        twin = twin_of(model)
        return twin.base_model(input_ids=ids, position_ids=positions).last_hidden_state


def both_ways(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Hidden states and gradients as the blocks run, and module by module."""
    found = []
    for takes in (layer.takes, lambda x: False):
        with monkeypatch.context() as patched:
            patched.setattr(layer, "takes", takes)
            model.zero_grad()
            made = hidden_of(model)
            generator = torch.Generator().manual_seed(0)
            (made * torch.randn(made.shape, generator=generator).to(made)).sum().backward()
            named = model.named_parameters()
            found.append((made, {n: p.grad for n, p in named if p.grad is not None}))
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_three_operations_of_the_same_bits(
    family: str, dtype: torch.dtype, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family).to(dtype)
    layers = model.config.num_hidden_layers
    with torch.no_grad():
        scored = hidden_of(model)
    assert calls == [sum(LENGTHS)] * layers
    (ours, gradients), (plain, expected) = both_ways(model, monkeypatch)
    assert len(calls) == 2 * layers
    assert torch.equal(ours, plain)
    assert torch.equal(ours, scored)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        error = (gradient - expected[name]).norm() / max(expected[name].norm(), 1e-3)
        assert error < (1e-5 if dtype == torch.float32 else 3e-2), name


@torch.no_grad()
def adapt(model: PreTrainedModel, rank: int = 3, **knobs: Any) -> None:
    add_lora(model, LoraConfig(rank=rank, **knobs), seed=0)
    generator = torch.Generator().manual_seed(1)
    for _, adapted in lora_layers(model):  # zero at first
        noise = torch.randn(adapted.lora_B.weight.shape, generator=generator)
        adapted.lora_B.weight.copy_(0.3 * noise)


@pytest.mark.parametrize("quantized", ["", "int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_with_adapters_are_three_operations_of_the_same_bits(
    family: str, dtype: torch.dtype, quantized: str, calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = tiny_model(family)
    adapt(model)
    keep_start(model)
    model.to(dtype)
    if quantized:
        freeze_quantized(model, quantized)
    with torch.no_grad():
        scored = hidden_of(model)
        with adapters_off(model):
            reference = hidden_of(model)
    layers = model.config.num_hidden_layers
    assert calls == [sum(LENGTHS)] * 2 * layers
    (ours, gradients), (plain, expected) = both_ways(model, monkeypatch)
    assert len(calls) == 3 * layers
    assert torch.equal(ours, plain)
    assert torch.equal(ours, scored)
    assert torch.equal(ours, reference)  # the start is a copy of what is trained
    assert gradients.keys() == expected.keys()
    assert len(gradients) == 2 * len(lora_layers(model))
    for name, gradient in gradients.items():
        error = (gradient - expected[name]).norm() / max(expected[name].norm(), 1e-3)
        assert error < (1e-5 if dtype == torch.float32 else 4e-2), name


def test_some_layers_may_have_adapters(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    adapt(model, targets=["k_proj", "down_proj"])
    for recompute in (None, "attention", "mlp", "layers"):
        if recompute is not None:
            enable_gradient_checkpointing(model.train(), recompute)  # type: ignore[arg-type]
        calls.clear()
        (ours, gradients), (plain, expected) = both_ways(model, monkeypatch)
        times = 2 if recompute == "layers" else 1
        assert len(calls) == times * model.config.num_hidden_layers
        assert torch.equal(ours, plain)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def test_quantized_weights_without_adapters(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen2").requires_grad_(False)
    freeze_quantized(model, "int8")
    model.base_model.embed_tokens.weight.requires_grad_(True)
    (ours, gradients), (plain, expected) = both_ways(model, monkeypatch)
    assert len(calls) == model.config.num_hidden_layers
    assert torch.equal(ours, plain)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def with_dropout_before_adapters(model: PreTrainedModel) -> None:
    adapt(model, dropout=0.5)


def with_adapters_of_another_type(model: PreTrainedModel) -> None:
    adapt(model)
    for _, adapted in lora_layers(model):
        adapted.lora_A.bfloat16(), adapted.lora_B.bfloat16()


def with_another_module_before_adapters(model: PreTrainedModel) -> None:
    adapt(model)
    for _, adapted in lora_layers(model):
        adapted.lora_dropout = nn.Identity()  # type: ignore[assignment]


def sharing_an_adapter(model: PreTrainedModel) -> None:
    adapt(model)
    for block in model.base_model.layers:
        block.mlp.up_proj.lora_A.weight = block.mlp.gate_proj.lora_A.weight


def with_a_backward_hook_on_an_adapter(model: PreTrainedModel) -> None:
    adapt(model)
    for name, module in twin_of(model).named_modules():
        if name.endswith("o_proj.lora_A"):
            module.register_full_backward_hook(lambda *_: None)


def with_a_hook_on_an_adapter(model: PreTrainedModel) -> None:
    adapt(model)
    for name, module in twin_of(model).named_modules():
        if name.endswith("gate_proj.lora_B"):
            module.register_forward_hook(lambda *_: None)


def with_a_hook(model: PreTrainedModel) -> None:
    for block in twin_of(model).base_model.layers:
        block.mlp.up_proj.register_forward_hook(lambda *_: None)


def with_a_forward_of_its_own(model: PreTrainedModel) -> None:
    for block in model.base_model.layers:
        block.mlp.forward = lambda x: torch.zeros_like(x)


def sharing_a_weight(model: PreTrainedModel) -> None:
    for block in model.base_model.layers:
        block.mlp.up_proj.weight = block.mlp.gate_proj.weight


def with_a_bias_in_its_mlp(model: PreTrainedModel) -> None:
    for block in model.base_model.layers:
        block.mlp.down_proj.bias = nn.Parameter(torch.ones(model.config.hidden_size))


@pytest.mark.parametrize(
    "change",
    [
        with_dropout_before_adapters,
        with_adapters_of_another_type,
        with_another_module_before_adapters,
        sharing_an_adapter,
        with_a_hook_on_an_adapter,
        with_a_backward_hook_on_an_adapter,
        with_a_hook,
        with_a_forward_of_its_own,
        sharing_a_weight,
        with_a_bias_in_its_mlp,
    ],
)
def test_other_blocks_run_module_by_module(
    change: Callable[[PreTrainedModel], None], calls: list[int]
) -> None:
    model = tiny_model("llama").train()
    change(model)
    hidden_of(model)
    assert not calls


def test_norms_of_queries_run_module_by_module(calls: list[int]) -> None:
    hidden_of(tiny_model("qwen3"))
    assert not calls


@pytest.mark.parametrize("part", ["mlp", "attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_parts_give_the_same_gradients(
    part: Recompute, dtype: torch.dtype, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama").to(dtype).train()
    (plain, expected), _ = both_ways(model, monkeypatch)
    enable_gradient_checkpointing(model, part)
    (ours, gradients), _ = both_ways(model, monkeypatch)
    assert len(calls) == 2 * model.config.num_hidden_layers
    assert torch.equal(ours, plain)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())


def test_recomputed_layers_run_as_three_operations_twice(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama").train()
    enable_gradient_checkpointing(model)
    (ours, gradients), (plain, expected) = both_ways(model, monkeypatch)
    assert len(calls) == 2 * model.config.num_hidden_layers
    assert torch.equal(ours, plain)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kept", ["buffer", "pruned"])
def test_a_bias_that_is_no_parameter_is_added(calls: list[int], kept: str) -> None:
    model = tiny_model("llama", attention_bias=True).eval()
    linear: Any = model.get_submodule("model.layers.0.self_attn.o_proj")
    if kept == "buffer":
        bias = linear.bias.detach().clone()
        del linear.bias
        linear.register_buffer("bias", bias)
    else:
        prune.identity(linear, "bias")
    found = hidden_of(model)
    assert len(calls) == model.config.num_hidden_layers - 1
    assert torch.equal(found, hidden_of(tiny_model("llama", attention_bias=True).eval()))


def test_a_last_block_without_wanted_tokens_has_gradients_of_zero(calls: list[int]) -> None:
    model = tiny_model("llama")
    adapt(model)
    nobody = Wanted(torch.empty(0, dtype=torch.int64))
    ids = torch.arange(7)[None] + 3
    ends = torch.tensor([0, 7], dtype=torch.int32)
    with attending(Packed(ends, 7, wanted=nobody)):
        states = twin_of(model).base_model(input_ids=ids, position_ids=torch.arange(7)[None])
    states.last_hidden_state.sum().backward()
    assert len(calls) == model.config.num_hidden_layers - 1
    given = [p.grad for p in model.parameters() if p.grad is not None]
    assert given
    assert not any(gradient.any() for gradient in given)
