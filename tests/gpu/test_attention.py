"""Attention on a GPU against its definition: packed forward and backward, KV memory, decoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.ops import attention
from tandem.ops.attention_context import (
    BLOCK_TOKENS,
    AttentionSpec,
    Before,
    Decode,
    KVMemory,
    LayerShape,
    Packed,
    attending,
)
from tests.gpu.conftest import DEVICE

BF16 = torch.bfloat16
LENGTHS = [3, 70, 1, 200]


def random(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE, BF16)


def plain(q: Tensor, k: Tensor, v: Tensor, kind: AttentionSpec) -> Tensor:
    """One sequence in float32, by the definition: q (T, Hq, D), k and v (T, Hkv, D)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * kind.scale
    if kind.softcap:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    at = torch.arange(len(q), device=q.device)
    seen = at[:, None] >= at
    if kind.window:
        seen &= at[:, None] - at < kind.window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("kind", [(64**-0.5,), (64**-0.5, 33), (64**-0.5, 0, 20.0)], ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["one to one", "grouped"])
def test_packed_forward_and_backward(heads: tuple[int, int], kind: tuple[float, ...]) -> None:
    spec = AttentionSpec(*kind)  # type: ignore[arg-type]
    n = sum(LENGTHS)
    q, k, v = (random(n, h, 64).requires_grad_() for h in (heads[0], heads[1], heads[1]))
    weight = random(n, heads[0], 64)
    step = Packed.of_lengths(LENGTHS, DEVICE)
    found = attention.varlen_attention(q, k, v, step, spec)
    gradients = torch.autograd.grad(found, (q, k, v), weight)
    parts = [
        plain(*rows, spec) for rows in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    ]
    expected = torch.cat(parts)
    wanted = torch.autograd.grad(expected, (q, k, v), weight.float())
    assert float((found - expected).detach().abs().max()) < 3e-2
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 3e-2


@pytest.mark.parametrize("width", [64, 128])
def test_what_prefill_stores_is_what_decoding_reads(width: int) -> None:
    heads, kv_heads, lengths = 8, 2, [17, 40]
    memory = KVMemory([LayerShape(kv_heads, width, width)], 40, dtype=BF16, device=DEVICE)
    k, v = random(sum(lengths), kv_heads, width), random(sum(lengths), kv_heads, width)
    tables = torch.tensor([[5, 1, 9, 0], [2, 30, 7, 8]], dtype=torch.int32, device=DEVICE)
    assert tables.shape[1] * BLOCK_TOKENS >= max(lengths) + 1
    attention.store_kv(k, v, memory, 0, tables, Packed.of_lengths(lengths, DEVICE).cu_seqlens)
    q, k1, v1 = (random(2, h, width) for h in (heads, kv_heads, kv_heads))
    kind = AttentionSpec(width**-0.5)
    step = Decode(torch.tensor(lengths, device=DEVICE), tables, memory)
    found = attention.paged_attention(q, k1, v1, step, 0, kind)
    for i, (keys, values) in enumerate(zip(k.split(lengths), v.split(lengths), strict=True)):
        keys, values = torch.cat([keys, k1[i : i + 1]]), torch.cat([values, v1[i : i + 1]])
        queries = torch.zeros(len(keys), heads, width, device=DEVICE, dtype=BF16)
        queries[-1] = q[i]
        expected = plain(queries, keys, values, kind)[-1]
        assert float((found[i] - expected).abs().max()) < 3e-2


@pytest.mark.parametrize("kind", [(64**-0.5,), (64**-0.5, 33), (64**-0.5, 0, 20.0)], ids=str)
def test_a_prompts_part_sees_what_memory_holds_before_it(kind: tuple[float, ...]) -> None:
    """Two sequences go on behind 48 and 16 tokens, one begins; flash attention, or one by one."""
    spec, heads, kv_heads = AttentionSpec(*kind), 8, 2  # type: ignore[arg-type]
    lengths, starts = [70, 20, 200], [48, 0, 16]
    q, k, v = ([random(length, h, 64) for length in lengths] for h in (heads, kv_heads, kv_heads))
    memory = KVMemory([LayerShape(kv_heads, 64, 64)], 40, dtype=BF16, device=DEVICE)
    tables = torch.randperm(39)[:39].view(3, 13).to(DEVICE, torch.int32)
    counts = [length - start for length, start in zip(lengths, starts, strict=True)]
    before = Before(tables, starts, counts, DEVICE)
    old = Packed.of_lengths(starts, DEVICE)
    k_old, v_old = (
        torch.cat([row[:n] for row, n in zip(rows, starts, strict=True)]) for rows in (k, v)
    )
    attention.store_kv(k_old, v_old, memory, 0, tables, old.cu_seqlens)
    plainly = Packed.of_lengths(counts, DEVICE)
    step = Packed(plainly.cu_seqlens, 200, memory, before.tables_of_new(), before=before)
    q_new, k_new, v_new = (
        torch.cat([row[n:] for row, n in zip(rows, starts, strict=True)]) for rows in (q, k, v)
    )
    with attending(step):
        found = attention.attend(0, q_new, k_new, v_new, spec)
    wanted = [plain(*rows, spec)[n:] for *rows, n in zip(q, k, v, starts, strict=True)]
    assert float((found - torch.cat(wanted)).abs().max()) < 3e-2
