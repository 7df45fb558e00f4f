"""A model whose weights lie as decoding reads them: the same bits from one copy."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.schema import LoraConfig, SamplingConfig
from tandem.engine.forward import response_logprobs
from tandem.errors import ModelError
from tandem.generation.generator import Stops, generate
from tandem.generation.laying_out import lay_out_model
from tandem.generation.native_runner import NativeRunner, projections, runs_natively
from tandem.generation.runner import TwinRunner, new_memory
from tandem.generation.runners import make_runner
from tandem.models.frozen import FrozenLinear, freeze_quantized
from tandem.models.laid_out import LaidOutWeight, lay_out
from tandem.models.lora import add_lora, lora_parameters
from tandem.models.summary import sequence_flops
from tandem.ops import native
from tandem.types import PromptRow, Rollout, Source

from ..models.families import tiny_model

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())

STOPS = Stops((2,), 0, lambda ids: " ".join(map(str, ids)))
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
"""Sizes that panels of 64 columns divide: 4 query heads and 2 key heads."""


def frozen_model(family: str, dtype: torch.dtype, **sizes: int) -> PreTrainedModel:
    return tiny_model(family, **(sizes or WIDE)).to(dtype).requires_grad_(False)


def answers(model: PreTrainedModel) -> tuple[Rollout, Tensor]:
    """Drawn by the runner, and read again by the modules."""
    rows = [
        PromptRow(tuple(range(4, 4 + n)), (), {}, Source("test", "test", n)) for n in (3, 17, 30)
    ]
    made = generate(model, rows, SamplingConfig(max_new_tokens=20), STOPS, seed=3)
    return made, response_logprobs(model, made.batch)[0]


def linears(model: Any) -> list[Any]:
    return [m for layer in model.model.layers for group in projections(layer) for m in group]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapted", [False, True])
def test_bits_stay_and_the_first_copy_goes(family: str, dtype: torch.dtype, adapted: bool) -> None:
    model = frozen_model(family, dtype)
    if adapted:
        add_lora(model, LoraConfig(rank=3), seed=0)
        for parameter in lora_parameters(model):
            parameter.data += 0.1
        model.to(dtype).requires_grad_(False)
    flops = sequence_flops(model, [20], 20)
    made, read = answers(model)
    weights = [weakref.ref(module.weight) for module in linears(model)]
    plain = [module.weight.clone() for module in linears(model)]
    assert lay_out_model(model)
    gc.collect()
    assert all(weight() is None for weight in weights)
    assert all(type(module.weight) is LaidOutWeight for module in linears(model))
    again, read_again = answers(model)
    assert torch.equal(again.batch.token_ids, made.batch.token_ids)
    assert torch.equal(again.rollout_logprobs, made.rollout_logprobs)
    assert torch.equal(read_again, read)
    assert torch.equal(
        read[made.batch.response_mask], made.rollout_logprobs[made.batch.response_mask]
    )
    assert type(make_runner(model, new_memory(model, 1), 16)) is NativeRunner
    for module, weight in zip(linears(model), plain, strict=True):
        assert torch.equal(module.plain_weight(), weight)
    assert sequence_flops(model, [20], 20) == flops


def test_a_runner_reads_the_very_memory() -> None:
    model: Any = frozen_model("llama", torch.float32)
    assert lay_out_model(model)
    attention = model.model.layers[0].self_attn
    group = attention.q_proj.weight.group
    assert attention.v_proj.weight.group is group
    before = answers(model)[0]
    group.mul_(0.5)  # what all three of them say
    after = answers(model)[0]
    assert not torch.equal(before.rollout_logprobs, after.rollout_logprobs)


def test_a_copy_of_the_head_alone_must_fit() -> None:
    model: Any = frozen_model("llama", torch.float32)
    count = sum(p.numel() for p in model.parameters())
    laid_out = sum(module.weight.numel() for module in linears(model))
    assert runs_natively(model, 16 * count)
    assert not runs_natively(model, 16 * count - 1)
    lay_out_model(model)
    assert runs_natively(model, 16 * (count - laid_out))


@pytest.mark.parametrize("why", ["family", "trained", "twice"])
def test_what_cannot_be_laid_out_stays(why: str) -> None:
    model = tiny_model("opt") if why == "family" else tiny_model("llama", **WIDE)
    model.requires_grad_(why == "trained")
    if why == "twice":
        assert lay_out_model(model)
    modules = list(model.modules())
    assert lay_out_model(model) == (why == "twice")
    assert list(model.modules()) == modules


def test_sizes_that_panels_do_not_divide_and_quantized_weights_stay_as_they_are() -> None:
    """The bits are those of before either way; how wide a panel is depends on the processor."""
    odd = frozen_model("llama", torch.float32, hidden_size=36, intermediate_size=40, head_dim=10)
    quantized = frozen_model("llama", torch.float32)
    freeze_quantized(quantized, "int8")
    for model in (odd, quantized):
        made, read = answers(model)
        assert lay_out_model(model)
        again, read_again = answers(model)
        assert torch.equal(again.batch.token_ids, made.batch.token_ids)
        assert torch.equal(read_again, read)
    assert not any(isinstance(m.weight, LaidOutWeight) for m in linears(quantized))
    assert lay_out([torch.ones(3, 8), torch.ones(5, 8)]) is None
    assert lay_out([torch.ones(3, 8)]) is not None


def test_layers_laid_out_apart_run_by_the_modules() -> None:
    model: Any = frozen_model("llama", torch.float32)
    made, read = answers(model)
    for name in ("q_proj", "k_proj", "v_proj"):
        attention = model.model.layers[1].self_attn
        module = attention.get_submodule(name)
        laid = lay_out([module.weight.detach()])
        assert laid is not None
        attention.set_submodule(name, FrozenLinear(module, laid[0]))
    assert type(make_runner(model, new_memory(model, 1), 16)) is TwinRunner
    assert torch.equal(answers(model)[1], read)
    assert torch.equal(answers(model)[0].rollout_logprobs, made.rollout_logprobs)


def test_no_gradient_passes() -> None:
    model: Any = frozen_model("llama", torch.float32)
    lay_out_model(model)
    embedded = model.model.embed_tokens(torch.tensor([[3, 4]])).requires_grad_()
    with pytest.raises(ModelError, match="laid out for decoding must not be trained through"):
        model(inputs_embeds=embedded)
