"""Blocks on a GPU: how many kernels they launch, what they keep, and the same numbers as before."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, Qwen2Config, Qwen3Config

from tandem.config.parallel import Recompute
from tandem.config.schema import SamplingConfig
from tandem.generation.gpu_graphs import NoWaiting
from tandem.generation.sampler import Sampler
from tandem.models.gpu_blocks import join_projections
from tandem.models.quantized import PackedWeight
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.twin import base_forward, twin_of
from tandem.ops.attention import attend
from tandem.ops.attention_context import (
    AttentionSpec,
    Before,
    Decode,
    KVMemory,
    LayerShape,
    Packed,
    attending,
)
from tandem.ops.dense import token_logprobs
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
    shapes = [LayerShape(heads, width, width)] * layers
    memory = addressed(KVMemory(shapes, 8, dtype=torch.bfloat16, device=meta))
    ids = torch.zeros((1, 64), dtype=torch.long, device=meta)
    tables = torch.zeros((64, 16), dtype=torch.int32, device=meta)
    joined = join_projections(model)
    assert joined == layers * (1 if name == "opt" else 2)
    with torch.no_grad(), attending(Decode(ids[0], tables, memory)), Launches() as launches:
        base_forward(twin, ids, ids)
    return launches


def addressed(memory: KVMemory) -> AddressedMemory:
    """As `AddressedMemory`, whose addresses the meta device does not have."""
    made = object.__new__(AddressedMemory)
    made.num_blocks, made.shapes, made.dtype = memory.num_blocks, memory.shapes, torch.bfloat16
    made.layers = [(torch.empty(1, dtype=torch.int64, device="meta"),) * 2] * len(memory.layers)
    return made


KERNELS = {"llama": 9, "llama-3": 9, "qwen2": 9, "qwen3": 14, "opt": 9}


@pytest.fixture(autouse=True)
def _meta(monkeypatch: pytest.MonkeyPatch) -> None:
    on_meta(monkeypatch)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_decodes_in_few_kernels(name: str) -> None:
    one, two = decoding(name, 1), decoding(name, 2)
    launched = two.seen - one.seen
    assert launched.total() <= KERNELS[name], launched


def trained(name: str, layers: int, recompute: Recompute | None = None) -> tuple[int, Launches]:
    """Bytes that a forward of 8,192 tokens keeps, and what its backward launches."""
    model = model_of(name, layers).train()
    if recompute is not None:
        enable_gradient_checkpointing(model, recompute)
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


KEPT = {
    ("llama", "layers"): 135, ("llama", "mlp"): 572, ("llama", "attention"): 630,
    ("llama-3", "mlp"): 471, ("llama-3", "attention"): 739,
}  # fmt: skip


@pytest.mark.parametrize(("name", "recompute"), KEPT)
def test_what_a_7b_layer_keeps_with_checkpointing(name: str, recompute: Recompute) -> None:
    """Megabytes of 8,192 tokens."""
    one, two = (trained(name, layers, recompute)[0] for layers in (1, 2))
    assert (two - one) / 1e6 <= KEPT[name, recompute]


class NoWaitingForMeta(NoWaiting):
    """The meta device is the GPU: what the host does by itself, as drawing for OPT's layer drop in
    transformers 5.17, waits for nothing."""

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if given and all(x.device.type == "cpu" for x in given):
            return operation(*args, **(kwargs or {}))
        return super().__torch_dispatch__(operation, types, args, kwargs)


@pytest.mark.parametrize("name", ["llama-3", "opt"])
def test_nothing_waits_in_prefill_and_update(name: str) -> None:
    model, meta = model_of(name).train(), torch.device("meta")
    heads = 8 if name == "llama-3" else 32
    width = model.config.hidden_size // 32
    memory = KVMemory([LayerShape(heads, width, width)] * 2, 8, dtype=torch.bfloat16, device=meta)
    ids = torch.zeros((1, 64), dtype=torch.long, device=meta)
    ends = torch.zeros(5, dtype=torch.int32, device=meta)
    tables = torch.zeros((4, 2), dtype=torch.int32, device=meta)
    twin = twin_of(model)
    before = Before(tables, [16, 0, 16, 0], [16] * 4, meta)
    new = before.tables_of_new()
    before.written_out()  # once a forward, before its layers
    for step in (Packed(ends, 16, memory, tables), Packed(ends, 32, memory, new, before=before)):
        with NoWaitingForMeta(), torch.no_grad(), attending(step):
            base_forward(twin, ids, ids)
    with NoWaitingForMeta():
        with attending(Packed(ends, 16)):
            out = base_forward(twin, ids, ids)
        out.backward(torch.empty_like(out))


@pytest.mark.parametrize(
    ("width", "rule"), [(64, {"softcap": 20.0}), (64, {"sinks": True}), (20, {})]
)
def test_parts_of_prompts_are_one_kernel_whatever_the_heads(
    width: int, rule: dict[str, Any]
) -> None:
    meta, heads = torch.device("meta"), 4
    if "sinks" in rule:
        rule = {"sinks": torch.zeros(heads, device=meta)}
    memory = KVMemory([LayerShape(heads, width, width)], 8, dtype=torch.bfloat16, device=meta)
    tables = torch.zeros((3, 4), dtype=torch.int32, device=meta)
    before = Before(tables, [16, 0, 32], [8, 40, 8], meta)
    ends = torch.zeros(4, dtype=torch.int32, device=meta)
    step = Packed(ends, 40, memory, before.tables_of_new(), before=before)
    q = torch.empty((56, heads, width), dtype=torch.bfloat16, device=meta)
    with NoWaiting(), attending(step), Launches() as launches:
        attend(0, q, q, q, AttentionSpec(width**-0.5, **rule))
    assert launches.seen == {"tandem.store_kv_gpu": 1, "tandem.continued_attention_gpu": 1}


def test_sampling_is_two_kernels_whatever_the_rule() -> None:
    logits = torch.empty((64, 32_000), dtype=torch.bfloat16, device="meta")
    keys = torch.zeros(64, dtype=torch.int64, device="meta")
    for rule in ({}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "min_new_tokens": 4}):
        sampler = Sampler(SamplingConfig(**rule), (2,), torch.device("meta"), 32_000)
        with Launches() as launches:
            sampler.draw(logits, keys, keys)
        assert launches.seen == {"tandem.sample_gpu": 2}


def test_decoding_with_nf4_moves_little_more_than_its_integers() -> None:
    """Bytes a weight of what one product of 16 rows reads and writes."""
    packed = PackedWeight(torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"), "nf4")
    x = torch.empty((16, 4096), dtype=torch.bfloat16, device="meta")
    with Launches() as launches, torch.no_grad():
        out = packed.product(x, None, turned=False, product=torch.nn.functional.linear)
    assert launches.seen == {"tandem.packed_linear": 1}
    moved = sum(t.nbytes for t in (packed.packed, packed.scales, x, out))
    assert moved / packed.numel() <= 0.7


def test_scoring_tokens_is_one_kernel_and_keeps_the_logits_alone() -> None:
    logits = torch.empty((64, 32_000), dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.zeros(64, dtype=torch.int64, device="meta")
    with Launches() as launches, kept() as storages:
        made = token_logprobs(logits * 1, targets, keep_logits=False)
    assert launches.seen == {"aten.mul": 1, "tandem.logprobs_gpu": 1}
    assert sum(storages.values()) < logits.nbytes + 4096
    with Launches() as launches:
        torch.autograd.backward(made, [torch.ones_like(part) for part in made])
    assert launches.seen["tandem.logprobs_backward_gpu"] == 1
