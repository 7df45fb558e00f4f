"""The GPU kernels against the plain path, values and gradients: on a GPU, else in Triton's
interpreter.

The interpreter needs TRITON_INTERPRET=1 in the environment before anything imports triton, and
numpy below 2.4 for triton 3.6 (docs/gpu_kernels.md says how). It rounds to bfloat16 by cutting off,
so what is rounded where is seen in float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.generation.runner import TwinRunner
from tandem.generation.sampler import truncated
from tandem.models.gpu_blocks import join_projections
from tandem.models.packed import hidden_states
from tandem.models.quantized import PackedWeight
from tandem.models.twin import kv_shapes
from tandem.ops import dense, gpu, native
from tandem.ops.attention import varlen_attention
from tandem.ops.attention_context import AttentionSpec, Decode, KVMemory, Packed
from tandem.ops.logits import HeadProduct
from tandem.types import TokenBatch
from tests.models.families import tiny_model
from tests.ops.test_paged_gpu import CASES, DEVICE, Rows, kernels

pytestmark = [
    kernels,
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]
DTYPES = (torch.float32, torch.float16)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "available", lambda: False)
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda on: monkeypatch.setattr(gpu, "fuses", lambda x: on)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def compare(ours: Any, plain: Any, inputs: list[Tensor]) -> None:
    """Outputs and gradients agree, relative to the largest number."""
    ours, plain = ([x] if isinstance(x, Tensor) else [*x] for x in (ours, plain))
    pulls = [torch.randn_like(x) for x in ours]
    got = [*ours, *torch.autograd.grad(ours, inputs, pulls, retain_graph=True)]
    want = [*plain, *torch.autograd.grad(plain, inputs, pulls, retain_graph=True)]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        scale = max(1.0, float(b.detach().abs().max()))
        assert float((a - b).detach().abs().max()) <= TOLERANCE[a.dtype] * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_residual_and_norm(kind: int, dtype: torch.dtype) -> None:
    from tandem.ops.layer_gpu import add_norm

    x, delta = normal(5, 20, dtype=dtype), normal(5, 20, dtype=dtype)
    weight, bias = normal(20, dtype=dtype), normal(20, dtype=dtype)

    def plain(h: Tensor) -> Tensor:
        if kind == 2:
            return F.layer_norm(h, (20,), weight, bias, 1e-5)
        return dense.rms_norm(h, weight, 1e-5, kind == 1)

    h = x + delta
    shift = bias if kind == 2 else None
    inputs = [x, delta, weight] + ([bias] if kind == 2 else [])
    compare(add_norm(x, delta, weight, shift, 1e-5, kind), (h, plain(h)), inputs)
    compare(add_norm(x, None, weight, shift, 1e-5, kind)[1], plain(x), [x, *inputs[2:]])
    add_norm(x, delta, weight.detach(), None, 1e-5, kind)[1].sum().backward()
    assert x.grad is not None


def test_a_row_of_a_norm_does_not_depend_on_others() -> None:
    from tandem.ops.layer_gpu import add_norm

    x, delta, weight = torch.randn(300, 20), torch.randn(300, 20), torch.randn(20)
    together = add_norm(x, delta, weight, None, 1e-5, 0)[1]
    alone = add_norm(x[7:8], delta[7:8], weight, None, 1e-5, 0)[1]
    assert torch.equal(alone, together[7:8])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [0, 1])
def test_gated_activation(kind: int, dtype: torch.dtype) -> None:
    from tandem.ops.layer_gpu import gated, gated_linear

    both, weight = normal(5, 74, dtype=dtype), normal(6, 37, dtype=dtype)
    gate, up = both.chunk(2, -1)
    plain = dense.geglu_tanh(gate, up) if kind else dense.swiglu(gate, up)
    compare(gated(both, kind), plain, [both])
    compare(gated_linear(both, weight, kind), F.linear(plain, weight), [both, weight])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_positions_of_part_of_a_head(dtype: torch.dtype) -> None:
    from tandem.ops.rotary_gpu import rotate

    qkv = normal(7, 8, 20, dtype=dtype)
    cos, sin = (torch.randn(7, 12).to(dtype) for _ in range(2))
    q, k, v = qkv.split((4, 2, 2), 1)
    compare(rotate(qkv, cos, sin, (4, 2)), (*dense.rotary(q, k, cos, sin), v), [qkv])


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_joined_products(joins: bool, biased: bool) -> None:
    from tandem.ops.joined import join, joined_linear, joined_view

    weights = [torch.nn.Parameter(torch.randn(n, 6)) for n in (4, 2, 2)]
    biases = [torch.nn.Parameter(torch.randn(n)) if biased else None for n in (4, 2, 2)]
    before = [weight.detach().clone() for weight in weights]
    if joins:
        assert join(weights)
        assert not biased or join([b for b in biases if b is not None])
        assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    assert (joined_view(weights) is not None) == joins
    x = normal(1, 5, 6)
    plain = torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], -1)
    inputs = [x, *weights, *(b for b in biases if b is not None)]
    compare(joined_linear(x, weights, biases), plain, inputs)


@pytest.mark.parametrize("name", ["one to one", "all", "float16"])
def test_attention_of_decoding_turns_its_queries_and_key(name: str) -> None:
    from tandem.ops.paged_gpu import paged_attention_gpu

    case = CASES[name]
    rows = Rows.of(case, (0, 16, 300))
    width = case.key_width // 2 // 2 * 2
    cos, sin = (torch.randn(3, width).to(case.dtype) for _ in range(2))
    layer = [memory.clone() for memory in rows.memory.layers[0]]
    turned = dense.rotary(rows.q, rows.k, cos, sin)
    step: Decode = rows.step
    expected = paged_attention_gpu(*turned, rows.v, *layer, step, case.kind())
    given = [memory.clone() for memory in rows.memory.layers[0]]
    got = paged_attention_gpu(rows.q, rows.k, rows.v, *given, step, case.kind(), (cos, sin))
    tolerance = TOLERANCE[case.dtype]
    assert torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=tolerance)
    for a, b in zip(given, layer, strict=True):
        assert torch.allclose(a.nan_to_num(7.0), b.nan_to_num(7.0), atol=tolerance)


@pytest.mark.parametrize(
    ("widths", "kind"),
    [
        ((8, 8), AttentionSpec(0.3)),
        ((20, 20), AttentionSpec(0.3, window=5, softcap=2.0)),
        ((24, 16), AttentionSpec(0.2, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    ],
)
def test_packed_attention(widths: tuple[int, int], kind: AttentionSpec, monkeypatch: Any) -> None:
    from tandem.ops import varlen_gpu

    monkeypatch.setattr(varlen_gpu, "tiles", lambda *_: (16, 4))
    lengths = (1, 16, 21)
    step = Packed.of_lengths(lengths, DEVICE)
    q, k = normal(38, 4, widths[0]), normal(38, 2, widths[0])
    v = normal(38, 2, widths[1])
    inputs = [q, k, v]
    if kind.sinks is not None:
        kind = replace(kind, sinks=kind.sinks.to(DEVICE).clone().requires_grad_())
        inputs.append(kind.sinks)
    ours = varlen_gpu.varlen_attention_gpu(q, k, v, step.cu_seqlens, kind)
    compare(ours, varlen_attention(q, k, v, step, kind), inputs)


def test_prompts_are_kept_where_their_tables_say() -> None:
    from tandem.ops.store_gpu import store_kv_gpu

    lengths, k, v = (1, 17, 16, 6), torch.randn(40, 2, 8), torch.randn(40, 2, 4)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    tables = torch.randperm(12)[:8].view(4, 2).int()
    keys, values = torch.full((12, 16, 2, 8), 7.0), torch.full((12, 16, 2, 4), 7.0)
    want_k, want_v = keys.clone(), values.clone()
    store_kv_gpu(k, v, keys, values, tables, ends)
    for row, length in enumerate(lengths):
        for t in range(length):
            block = tables[row, t // 16]
            want_k[block, t % 16], want_v[block, t % 16] = k[ends[row] + t], v[ends[row] + t]
    assert torch.equal(keys, want_k)
    assert torch.equal(values, want_v)


RULES = [
    (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1),
    (0.9, 20, 0.7, 0.05),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("edits", ["", "early stops", "biases"])
@pytest.mark.parametrize("num_ids", [120, 150])
def test_sampled_tokens_and_numbers_are_the_plain_paths(
    rule: tuple[float, int, float, float], edits: str, num_ids: int, monkeypatch: Any
) -> None:
    from tandem.ops import sampling_gpu

    monkeypatch.setattr(sampling_gpu, "CHUNK", 64)
    temperature, top_k, top_p, min_p = rule
    n, vocabulary = 8, 150
    logits = torch.randn(n, vocabulary) * 3
    logits[0, :100], logits[1] = -math.inf, 1.0  # whole chunks without probability; all equal
    logits[:, num_ids:] += 9.0  # likelier than the others
    keys, numbers = torch.randint(-(2**63), 2**63 - 1, (n,)), torch.arange(n)
    stops, earliest, changed = torch.tensor([3, 7]), 0, None
    expected = logits
    if edits == "early stops":
        earliest = 4
        expected = logits.clone()
        expected[:4, stops] = -math.inf
    if edits == "biases":
        changed = expected = logits + torch.randn(n, vocabulary)
    tokens, made = sampling_gpu.sample_gpu(
        logits, changed, keys, numbers, stops, earliest, temperature, top_k, top_p, min_p, num_ids
    )
    expected = expected[:, :num_ids]
    kept = truncated(expected, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    want, _, sampled, _ = dense.sample(kept, keys, numbers, temperature)
    logprobs, entropy = dense.token_logprobs(logits, tokens, temperature)
    assert torch.equal(tokens, want)
    assert torch.allclose(made, torch.stack([logprobs, sampled, entropy]), atol=3e-6)


def test_sampling_shows_a_nan_and_a_row_without_probability() -> None:
    from tandem.ops.sampling_gpu import sample_gpu

    logits = torch.randn(3, 20)
    logits[0, 5], logits[1] = -torch.nan, -math.inf
    keys = torch.arange(3)
    for top_k, top_p in ((0, 1.0), (3, 0.9)):
        for num_ids in (20, 4):  # the NaN is beyond 4
            _, made = sample_gpu(logits, None, keys, keys, keys, 0, 1.0, top_k, top_p, 0.0, num_ids)
            assert made[1].isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy(dtype: torch.dtype, temperature: float, monkeypatch: Any) -> None:
    from tandem.ops import logprobs_gpu

    monkeypatch.setattr(logprobs_gpu, "_BLOCK", 32)
    logits = normal(5, 100, dtype=dtype)
    banned = torch.zeros(100, dtype=torch.bool)
    banned[:40] = True
    targets = torch.randint(40, 100, (5,))
    masked = logits.masked_fill(banned, -math.inf)
    plain = dense.token_logprobs(masked, targets, temperature)
    for keep in (True, False):
        given = logits.masked_fill(banned, -math.inf)
        ours = logprobs_gpu.TokenLogprobs.apply(given, targets, temperature, True, keep)
        pulls = torch.randn(2, 5)
        (got,) = torch.autograd.grad(ours, logits, pulls.unbind())
        (want,) = torch.autograd.grad(plain, logits, pulls.unbind(), retain_graph=True)
        assert torch.allclose(torch.stack(ours), torch.stack(plain), atol=TOLERANCE[torch.float32])
        assert torch.allclose(got, want, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("capped", [False, True])
def test_the_vocabulary_head_in_tiles(
    dtype: torch.dtype, temperature: float, capped: bool, monkeypatch: Any
) -> None:
    """Blocks of 32 in tiles of 80 columns of 190, the last one ragged; one tile is all banned."""
    from tandem.ops import vocabulary_gpu

    monkeypatch.setattr(vocabulary_gpu, "_BLOCK", 32)
    monkeypatch.setattr(vocabulary_gpu, "tile_columns", lambda *_: 80)
    hidden, weight = normal(5, 24, dtype=dtype), normal(190, 24, dtype=dtype)
    bias = torch.zeros(190, dtype=dtype)
    if not capped:
        bias[:100] = -math.inf
    bias.requires_grad_()
    targets = torch.randint(100, 190, (5,))
    after = (lambda raw: 3.0 * torch.tanh(raw / 3.0)) if capped else None
    head = HeadProduct(weight, bias, after)
    ours = vocabulary_gpu.head_logprobs_gpu(head, hidden, targets, temperature, True)
    whole = F.linear(hidden, weight, bias)
    plain = dense.token_logprobs(after(whole) if after else whole, targets, temperature)
    assert torch.allclose(torch.stack(ours), torch.stack(plain), atol=TOLERANCE[torch.float32])
    pulls = torch.randn(2, 5).unbind()
    inputs = [hidden, weight, bias]
    got = torch.autograd.grad(ours, inputs, pulls)
    want = torch.autograd.grad(plain, inputs, pulls)
    for a, b in zip(got, want, strict=True):
        scale = max(1.0, float(b.abs().max()))
        assert a.dtype == b.dtype
        assert float((a - b).abs().max()) <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize(("kind", "inputs"), [("nf4", 128), ("int8", 512), ("nf4", 100)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_weights(
    kind: str, inputs: int, dtype: torch.dtype, fused: Callable[[bool], None]
) -> None:
    packed, bias = PackedWeight(torch.randn(40, inputs), kind), torch.randn(40).to(dtype)
    for rows in (5, 70):  # unpacked in registers; written out
        x = normal(rows, inputs, dtype=dtype)
        fused(True)
        ours = packed.product(x, bias, turned=False, product=F.linear)
        whole = packed.dequantized()
        fused(False)
        plain = packed.product(x, bias, turned=False, product=F.linear)
        assert torch.equal(whole, packed.dequantized())
        scale = float(plain.detach().abs().max())
        assert float((ours - plain).detach().abs().max()) <= TOLERANCE[dtype] * scale
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (ours, plain)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "mistral", "opt", "gemma2"])
def test_whole_models_have_the_plain_states_and_gradients(
    family: str, fused: Callable[[bool], None]
) -> None:
    """A forward and backward through all of it, projections apart."""
    model = tiny_model(family).eval()
    ids = torch.randint(4, 50, (2, 6))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 4:] = False
    batch = TokenBatch(ids, mask, mask & False)
    found = []
    for on in (False, True):
        fused(on)
        model.zero_grad()
        states = hidden_states(model, batch)
        states.pow(2).sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((states.detach(), gradients))
    (plain, wanted), (ours, got) = found
    assert torch.allclose(ours, plain, atol=1e-5)
    assert wanted.keys() == got.keys()
    for name, gradient in wanted.items():
        scale = max(1.0, float(gradient.abs().max()))
        assert float((got[name] - gradient).abs().max()) <= 1e-5 * scale, name


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_prompts_then_tokens_of_whole_models(family: str, fused: Callable[[bool], None]) -> None:
    """Prefill and two steps of decoding, with joined weights, against the model's own forward."""
    fused(True)
    model = tiny_model(family).eval()
    assert join_projections(model) > 0
    shape = kv_shapes(model)
    memory = KVMemory(shape, 6, dtype=torch.float32, device=torch.device("meta"))
    memory.layers = [tuple(torch.zeros_like(t, device=DEVICE) for t in x) for x in memory.layers]
    runner = TwinRunner(model, memory)
    lengths, tables = (3, 17), torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)
    rows = [torch.randint(4, 50, (n + 2,)) for n in lengths]
    prompts = torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)])
    with torch.no_grad():
        found = [runner.prefill(prompts, lengths, tables)]
        for step in range(2):
            at = torch.tensor([n + step for n in lengths])
            tokens = torch.stack([row[p] for row, p in zip(rows, at, strict=True)])
            found.append(runner.decode(tokens, at, tables))
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            own = model(input_ids=row[None], use_cache=False).logits[0, n - 1 :]
            ours = torch.stack([logits[i] for logits in found])
            assert torch.allclose(ours, own, atol=2e-5)
