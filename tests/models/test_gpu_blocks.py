"""Blocks on a GPU: how many kernels they launch, what they keep, and the same numbers as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, Qwen2Config, Qwen3Config

from tandem.models.twin import base_forward, twin_of
from tandem.ops.attention_context import Decode, KVMemory, LayerShape, Packed, attending
from tandem.ops.paged_gpu import AddressedMemory
from tests.ops.counting import Launches, kept, on_meta

WIDE = {"num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 128}
CONFIGS = {
    "llama": LlamaConfig(hidden_size=4096, intermediate_size=11008, **WIDE),
    "llama-3": LlamaConfig(hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, **WIDE),
    "qwen2": Qwen2Config(hidden_size=2048, intermediate_size=5632, **WIDE),
    "qwen3": Qwen3Config(hidden_size=2048, intermediate_size=5632, head_dim=128, **WIDE),
    "opt": OPTConfig(hidden_size=2048, ffn_dim=8192, num_attention_heads=32, **WIDE),
}


def model_of(name: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16)


def decoding(name: str, layers: int) -> Launches:
    """One step of 64 rows through that many layers."""
    model = model_of(name).eval()
    model.config.num_hidden_layers = layers
    if name == "opt":
        model.model.decoder.layers = model.model.decoder.layers[:layers]
    twin = twin_of(model)
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
    with torch.no_grad(), attending(Decode(ids[0], tables, addressed)), Launches() as launches:
        base_forward(twin, ids, ids)
    return launches
