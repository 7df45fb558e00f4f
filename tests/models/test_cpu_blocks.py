"""Decoder blocks on a CPU: which run as three operations, and the same bits as module by module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import PreTrainedModel

from tandem.config.parallel import Recompute
from tandem.config.schema import LoraConfig
from tandem.models.frozen import freeze_quantized
from tandem.models.lora import add_lora
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.twin import twin_of
from tandem.ops import layer, native
from tandem.ops.attention_context import Packed, attending
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


def with_adapters(model: PreTrainedModel) -> None:
    add_lora(model, LoraConfig(rank=2), seed=0)


def with_quantized_weights(model: PreTrainedModel) -> None:
    freeze_quantized(model.requires_grad_(False), "int8")


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
        with_adapters,
        with_quantized_weights,
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
