"""A model whose weights lie as decoding reads them: the same bits from one copy."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.config.schema import SamplingConfig
from tandem.engine.forward import response_logprobs
from tandem.errors import ModelError
from tandem.generation.generator import generate
from tandem.generation.laying_out import lay_out_model
from tandem.generation.make_runner import make_runner
from tandem.generation.native_runner import NativeRunner, projections, runs_natively
from tandem.generation.runner import TwinRunner, new_memory
from tandem.generation.stops import Stops
from tandem.models.flops import sequence_flops
from tandem.models.frozen import FrozenLinear, freeze_quantized
from tandem.models.laid_out import LaidOutWeight, lay_out
from tandem.models.load import new_causal_lm
from tandem.models.lora import adaptable, add_lora, lora_parameters
from tandem.ops import dense, native
from tandem.types import PromptRow, Rollout, Source

from ..models.families import perturbed, tiny_model
from ..models.hybrid_families import HYBRIDS, hybrid_config

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


@pytest.mark.parametrize("family", ["gemma2", "opt", "qwen3_5_text", "longcat_flash"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapted", [False, True])
def test_families_without_a_decoder_of_one_call_keep_their_bits_too(
    family: str, dtype: torch.dtype, adapted: bool
) -> None:
    """Layer by layer; but for a router whose family reads the weight itself."""
    if family in HYBRIDS:
        model = perturbed(new_causal_lm(hybrid_config(family), seed=3)).to(dtype)
    else:
        model = tiny_model(family).to(dtype)
    model.eval().requires_grad_(False)
    if adapted:
        add_lora(model, LoraConfig(rank=3), seed=0)
        for parameter in lora_parameters(model):
            parameter.data += 0.1
        model.to(dtype).requires_grad_(False)
    made, read = answers(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert lay_out_model(model)
    layers = {name: model.get_submodule(name) for name in adaptable(model)}
    plain = [name for name, m in layers.items() if type(m.weight) is not LaidOutWeight]
    assert all("router" in name for name in plain)
    assert bool(plain) == (family == "longcat_flash")
    again, read_again = answers(model)
    assert torch.equal(again.batch.token_ids, made.batch.token_ids)
    assert torch.equal(again.rollout_logprobs, made.rollout_logprobs)
    assert torch.equal(read_again, read)
    if not adapted:
        assert state_of(model) == state_of_tensors(before)


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


@pytest.mark.parametrize("adapted", [False, True])
def test_what_a_runner_copies_must_fit(adapted: bool) -> None:
    """A quarter of what is free; of a model that is laid out the head and adapters."""
    model: Any = frozen_model("llama", torch.float32)
    if adapted:
        add_lora(model, LoraConfig(rank=3), seed=0)
        model.requires_grad_(False)
    head = model.lm_head.weight.numel()
    adapters = sum(p.numel() for p in lora_parameters(model)) if adapted else 0
    both = head + adapters + sum(module.weight.numel() for module in linears(model))
    for laid_out, count in ((False, both), (True, head + adapters)):
        assert lay_out_model(model) if laid_out else True
        assert runs_natively(model, 16 * count)
        assert not runs_natively(model, 16 * count - 1)


@pytest.mark.parametrize(
    "why", ["family", "trained", "laid out already", "a layer in two places", "a hook"]
)
def test_what_cannot_be_laid_out_stays(why: str) -> None:
    # GPT-2's layers are no nn.Linear.
    model: Any = tiny_model("gpt2") if why == "family" else tiny_model("llama", **WIDE)
    model.requires_grad_(why == "trained")
    again = why == "laid out already"
    if again:
        assert lay_out_model(model)
    elif why == "a layer in two places":
        first, second = model.model.layers
        second.mlp.up_proj = first.mlp.up_proj
    elif why == "a hook":
        model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: None)
    modules = list(model.modules())
    assert lay_out_model(model) == again
    assert list(model.modules()) == modules


def test_it_is_saved_as_it_was(tmp_path: Path) -> None:
    model = frozen_model("llama", torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert lay_out_model(model)
    assert state_of(model) == state_of_tensors(before)
    model.save_pretrained(tmp_path)
    assert state_of_tensors(load_file(tmp_path / "model.safetensors")) == state_of_tensors(before)


def state_of(model: PreTrainedModel) -> dict[str, list[Any]]:
    return state_of_tensors(model.state_dict())


def state_of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def test_another_type_is_refused() -> None:
    """By a model that was cast afterwards, and in autocast, which would read words as numbers."""
    model = frozen_model("llama", torch.float32)
    lay_out_model(model)
    ids = torch.tensor([[3, 4]])
    with (
        torch.autocast("cpu", torch.float16),
        torch.no_grad(),
        pytest.raises(ModelError, match=r"must meet torch\.float32 on cpu; got"),
    ):
        model.model.layers[0].mlp.up_proj(torch.ones(1, 64, dtype=torch.float16))
    with pytest.raises(ModelError, match=r"must meet torch\.float32 on cpu; got torch\.bfloat16"):
        model.bfloat16()(ids)
    with pytest.raises(ModelError, match=r"laid out for decoding\. Quantize it before"):
        freeze_quantized(model, "int8")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what is resident")
def test_what_was_freed_leaves_the_process() -> None:
    code = """
import torch
from pathlib import Path
from tandem.generation.laying_out import lay_out_model
from tandem.models.load import new_causal_lm
from transformers import LlamaConfig

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

sizes = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, vocab_size=256)
made = []
for _ in range(3):  # each of 88 MB
    model = new_causal_lm(LlamaConfig(num_attention_heads=8, **sizes), 0).requires_grad_(False)
    assert lay_out_model(model)
    made.append(resident())
print(made)
assert max(made) < made[0] + 30
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_sizes_that_panels_do_not_divide_and_quantized_weights_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits are those of before either way; how wide a panel is depends on the processor."""
    copied: list[tuple[int, ...]] = []
    pack = dense.pack_weight

    def packed(weight: Tensor) -> Tensor:
        copied.append(tuple(weight.shape))
        return pack(weight)

    monkeypatch.setattr(dense, "pack_weight", packed)
    odd = frozen_model("llama", torch.float32, hidden_size=36, intermediate_size=40, head_dim=10)
    quantized = frozen_model("llama", torch.float32)
    freeze_quantized(quantized, "int8")
    for model in (odd, quantized):
        made, read = answers(model)
        assert lay_out_model(model)
        copied.clear()
        again, read_again = answers(model)
        assert torch.equal(again.batch.token_ids, made.batch.token_ids)
        assert torch.equal(read_again, read)
    assert not any(isinstance(m.weight, LaidOutWeight) for m in linears(quantized))
    assert not copied, "integers are read as they are, those of the head too"
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
