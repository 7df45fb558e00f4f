"""Blocks on a GPU: how many kernels they launch, what they keep, and the same numbers as before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, Qwen2Config, Qwen3Config

from tandem.models.gpu_blocks import join_projections
from tandem.models.twin import base_forward, twin_of
from tandem.ops.attention_context import Decode, KVMemory, LayerShape, Packed, attending
from tandem.ops.paged_gpu import AddressedMemory
from tests.ops.counting import Launches, kept, on_meta

WIDE = {"num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 128}
CONFIGS = {
    "llama": LlamaConfig(hidden_size=4096, intermediate_size=11008, **WIDE),
    "llama-3": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, **WIDE
    ),
    "qwen2": Qwen2Config(hidden_size=2048, intermediate_size=5632, **WIDE),
    "qwen3": Qwen3Config(hidden_size=2048, intermediate_size=5632, head_dim=128, **WIDE),
    "opt": OPTConfig(hidden_size=2048, ffn_dim=8192, num_attention_heads=32, **WIDE),
}


def model_of(name: str, layers: int = 2) -> Any:
    config = copy.deepcopy(CONFIGS[name])
    config.num_hidden_layers = layers
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def decoding(name: str, layers: int) -> Launches:
    """One step of 64 rows through that many layers."""
    model = model_of(name, layers).eval()
    twin = twin_of(model)  # as in a session, made before
    heads = getattr(model.config, "num_key_value_heads", None) or 32
    width = model.config.hidden_size // model.config.num_attention_heads
    width = getattr(model.config, "head_dim", None) or width
    meta = torch.device("meta")
    memory = KVMemory([LayerShape(heads, width, width)] * 2, 8, dtype=torch.bfloat16, device=meta)
    addressed = object.__new__(AddressedMemory)
    addressed.num_blocks, addressed.shapes, addressed.dtype = 8, memory.shapes, torch.bfloat16
    addressed.layers = [(torch.empty(1, dtype=torch.int64, device=meta),) * 2] * 2
    ids = torch.zeros((1, 64), dtype=torch.long, device=meta)
    tables = torch.zeros((64, 16), dtype=torch.int32, device=meta)
    joined = join_projections(model)
    assert joined == layers * (1 if name == "opt" else 2)
    with torch.no_grad(), attending(Decode(ids[0], tables, addressed)), Launches() as launches:
        base_forward(twin, ids, ids)
    return launches


KERNELS = {"llama": 9, "llama-3": 9, "qwen2": 9, "qwen3": 14, "opt": 9}


@pytest.fixture(autouse=True)
def _meta(monkeypatch: pytest.MonkeyPatch) -> None:
    on_meta(monkeypatch)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_decodes_in_few_kernels(name: str) -> None:
    one, two = decoding(name, 1), decoding(name, 2)
    launched = two.seen - one.seen
    assert launched.total() <= KERNELS[name], launched


def trained(name: str, layers: int) -> tuple[int, Launches]:
    """Bytes that a forward of 8,192 tokens keeps, and what its backward launches."""
    model = model_of(name, layers).train()
    join_projections(model)
    meta = torch.device("meta")
    lengths = torch.zeros(17, dtype=torch.int32, device=meta)
    ids = torch.zeros((1, 8192), dtype=torch.long, device=meta)
    with attending(Packed(lengths, 512)), kept() as storages:
        out = base_forward(twin_of(model), ids, ids)
    with Launches() as launches:
        out.backward(torch.empty_like(out))
    assert all(p.grad is not None for p in model.base_model.parameters())
    return sum(storages.values()), launches


@pytest.mark.parametrize(("name", "megabytes"), [("llama", 1_000), ("llama-3", 1_000)])
def test_a_7b_layer_keeps_less_than_a_gigabyte_of_8192_tokens(name: str, megabytes: int) -> None:
    (one, few), (two, more) = trained(name, 1), trained(name, 2)
    assert (two - one) / 1e6 <= megabytes
    assert (more.seen - few.seen).total() <= 20, more.seen - few.seen
