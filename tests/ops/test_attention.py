"""The plain torch attention: what runs without a compiler, and on a GPU for decoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.ops import attention
from tandem.ops.attention import paged_attention, store_kv, varlen_attention
from tandem.ops.attention_context import AttentionSpec, Decode, KVMemory, LayerShape, Packed

KINDS = [
    AttentionSpec(0.3),
    AttentionSpec(0.3, window=5),
    AttentionSpec(0.3, softcap=2.0),
    AttentionSpec(0.3, sinks=torch.tensor([0.5, -1.0, 0.0, 2.0])),
]


def slow(q: Tensor, k: Tensor, v: Tensor, kind: AttentionSpec) -> Tensor:
    """One sequence, token by token, in float64."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for t in range(q.shape[0]):
        first = max(0, t + 1 - kind.window) if kind.window else 0
        for h in range(q.shape[1]):
            group = h // (q.shape[1] // k.shape[1])
            scores = k[first : t + 1, group].double() @ q[t, h].double() * kind.scale
            if kind.softcap:
                scores = kind.softcap * torch.tanh(scores / kind.softcap)
            if kind.sinks is not None:
                scores = torch.cat([scores, kind.sinks[h, None].double()])
            weights = scores.softmax(-1)[: t + 1 - first]
            out[t, h] = weights @ v[first : t + 1, group].double()
    return out


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_native", lambda dtype: False)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_and_decoding_against_a_slow_loop(kind: AttentionSpec) -> None:
    lengths = (19, 1, 33)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(53, 4, 8, generator=generator)
    k, v = torch.randn(53, 2, 8, generator=generator), torch.randn(53, 2, 6, generator=generator)
    expected = torch.cat(
        [slow(*part, kind) for part in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    )
    step = Packed.of_lengths(lengths, q.device)
    assert torch.allclose(varlen_attention(q, k, v, step, kind).double(), expected, atol=1e-5)

    memory = KVMemory([LayerShape(2, 8, 6)], 6, dtype=torch.float32, device=q.device)
    for part in memory.layers[0]:
        part.fill_(torch.nan)  # what stands where nothing was written must not matter
    tables = torch.tensor([[5, 0, 0], [1, 0, 0], [4, 2, 3]], dtype=torch.int32)
    tables[0, 1] = 0
    begun = [18, 0, 32]  # all but each sequence's last token
    keep = torch.cat([torch.arange(n) + s for n, s in zip(begun, (0, 19, 20), strict=True)])
    store_kv(k[keep], v[keep], memory, 0, tables, Packed.of_lengths(begun, q.device).cu_seqlens)
    last = torch.tensor([18, 19, 52])
    decode = Decode(torch.tensor(begun), tables, memory)
    out = paged_attention(q[last], k[last], v[last], decode, 0, kind)
    assert torch.allclose(out.double(), expected[last], atol=1e-5)


LENGTH, AT = 30, 13
ALONE = Packed.of_lengths([LENGTH], torch.device("cpu"))


def before_it_breaks(kind: AttentionSpec) -> tuple[torch.Tensor, ...]:
    """q, k, v of a sequence, its attention, and the gradient of q by the tokens before AT."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(LENGTH, 4, 8, generator=generator, requires_grad=True)
    k, v = (torch.randn(LENGTH, 2, width, generator=generator) for width in (8, 6))
    whole = varlen_attention(q, k, v, ALONE, kind)
    (pull,) = torch.autograd.grad(whole[:AT].sum(), q)
    return q, k, v, whole, pull


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_no_number_reaches_the_tokens_that_see_it_alone(
    kind: AttentionSpec, broken: float
) -> None:
    q, k, v, whole, pull = before_it_breaks(kind)
    v[AT, :, -1] = broken
    out = varlen_attention(q, k, v, ALONE, kind)
    sees = torch.arange(LENGTH) >= AT
    if kind.window:
        sees[AT + kind.window :] = False
    assert torch.equal(out[~sees], whole[~sees])
    assert not bool(out[sees, :, -1].isfinite().any())
    assert torch.allclose(out[sees, :, :-1], whole[sees, :, :-1])
    (got,) = torch.autograd.grad(out[:AT].sum(), q)
    assert torch.allclose(got, pull)

    memory = KVMemory([LayerShape(2, 8, 6)], 2, dtype=torch.float32, device=q.device)
    tables = torch.tensor([[1, 0]], dtype=torch.int32)
    for t in range(LENGTH):
        decode = Decode(torch.tensor([t]), tables, memory)
        with torch.no_grad():
            made = paged_attention(q[t, None], k[t, None], v[t, None], decode, 0, kind)
        assert bool(made[..., -1].isfinite().all()) == (not sees[t])
        assert torch.allclose(made[..., :-1], whole[t, None, :, :-1], atol=1e-6), t


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_no_number_reaches_the_tokens_that_see_it_alone(
    kind: AttentionSpec, broken: float
) -> None:
    q, k, v, _, pull = before_it_breaks(kind)
    k[AT, :, -1] = broken
    out = varlen_attention(q, k, v, ALONE, kind)
    torch.testing.assert_close(out.double(), slow(q, k, v, kind), atol=1e-5, rtol=0, equal_nan=True)
    assert bool(out[:AT].isfinite().all())
    (got,) = torch.autograd.grad(out[:AT].sum(), q)
    assert torch.allclose(got[:AT], pull[:AT], atol=1e-6)
