"""The dense operations against float64 and Hugging Face's modules, and row by row to the bit."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GemmaConfig, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from tandem import processor
from tandem.errors import ConfigError, ShapeError
from tandem.ops import blockwise, dense, native

pytestmark = pytest.mark.usefixtures("arithmetic")

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(64, 64), (172, 64), (64, 172), (65, 33), (1, 7), (100, 1), (130, 1030), (320, 96)]
BATCHES = [*range(1, 18), 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 70]


@pytest.fixture
def needs_native(arithmetic: str) -> None:
    if arithmetic == "plain":
        pytest.skip("plain torch promises no bits")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], pull: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return list(torch.autograd.grad(out, leaves, pull.to(out.dtype)))


def check_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """In float32 against the same function of float64, which the plain torch path computes."""
    out = function(*inputs)
    pull = normal(*out.shape, seed=9)
    got = gradients(function, inputs, pull)
    want = gradients(function, [x.double() for x in inputs], pull.double())
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        assert relative(ours, theirs) < 1e-5


# ---- linear ----


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_the_product(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias = normal(outputs, inputs, seed=1, dtype=dtype), normal(outputs, dtype=dtype)
    for rows in (1, 7, 40, 200):
        x = normal(2, rows, inputs, seed=rows, dtype=dtype)
        want = x.double() @ weight.double().T
        allowed = 5e-6 if dtype == torch.float32 else 8e-3
        assert relative(dense.linear(x, weight), want) < allowed
        assert relative(dense.linear(x, weight, bias), want + bias.double()) < allowed


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_linear_knows_no_other(
    outputs: int, inputs: int, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    weight, bias = normal(outputs, inputs, seed=1, dtype=dtype), normal(outputs, dtype=dtype)
    x = normal(300, inputs, seed=2, dtype=dtype)
    packed = dense.pack_weight(weight)
    whole = dense.linear(x, weight, bias)
    for rows in BATCHES:
        for part in (slice(0, rows), slice(300 - rows, 300)):
            got = dense.linear_packed(x[part], packed, outputs, inputs, bias)
            assert torch.equal(dense.linear(x[part], weight, bias), whole[part])
            assert torch.equal(got, whole[part])
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    assert torch.equal(dense.linear(x[order], weight, bias), whole[order])
    threads(3)
    for rows in (1, 40, 300):
        assert torch.equal(dense.linear(x[:rows], weight, bias), whole[:rows])
        got = dense.linear_packed(x[:rows], packed, outputs, inputs, bias)
        assert torch.equal(got, whole[:rows])


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_results_are_those_of_their_rows(
    dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    # From 1 MiB on, results may be written past the caches.
    weight, x = normal(1024, 96, seed=1, dtype=dtype), normal(600, 96, seed=2, dtype=dtype)
    packed, parts = dense.pack_weight(weight), [dense.linear(part, weight) for part in x.split(50)]
    for count in (1, 3):
        threads(count)
        assert torch.equal(dense.linear(x, weight), torch.cat(parts))
        assert torch.equal(dense.linear_packed(x, packed, 1024, 96), torch.cat(parts))


@pytest.mark.usefixtures("needs_native")
def test_rows_are_summed_alike_where_the_work_is_cut_into_blocks(
    threads: Callable[[int], None],
) -> None:
    weight, x = normal(300, 2500, seed=1), normal(130, 2500, seed=2)
    whole, packed = dense.linear(x, weight), dense.pack_weight(weight)
    fused = rounded = torch.zeros(())
    for k in range(2500):  # float64 holds a product of floats and its sum: rounded once, as an FMA
        fused = (x[5, k].double() * weight[7, k].double() + fused.double()).float()
        rounded = x[5, k] * weight[7, k] + rounded  # of processors without FMA
    if torch.ops.tandem.why_no_amx(False):  # else in the matrix unit's own order (test_variants.py)
        assert whole[5, 7] in (fused, rounded)
    assert abs(whole[5, 7] - fused) < 1e-4
    for count in (1, 4):
        threads(count)
        for rows in (1, 9, 60, 130):
            assert torch.equal(dense.linear(x[:rows], weight), whole[:rows])
            assert torch.equal(dense.linear_packed(x[:rows], packed, 300, 2500), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_turned_operands_give_the_same(dtype: torch.dtype) -> None:
    for inputs in (48, 33):
        weight, x = normal(70, inputs, seed=1, dtype=dtype), normal(90, inputs, dtype=dtype)
        want = dense.linear(x, weight)
        wide_x = normal(90, inputs + 5, dtype=dtype)
        wide_x[:, :inputs] = x
        wide_weight = normal(70, inputs + 3, dtype=dtype)
        wide_weight[:, :inputs] = weight
        turned = weight.t().contiguous().t()
        for rows in (3, 40, 90):
            got = (
                dense.linear(wide_x[:rows, :inputs], weight),
                dense.linear(x[:rows], wide_weight[:, :inputs]),
                dense.linear(x[:rows], turned),
                dense.linear(x.t().contiguous().t()[:rows], weight),
                dense.linear_packed(x[:rows], dense.pack_weight(turned), 70, inputs),
            )
            for one in got:
                torch.testing.assert_close(one, want[:rows], rtol=1e-2, atol=1e-5)
                assert native.why_not() or not native.available() or torch.equal(one, want[:rows])


def test_no_rows_and_no_columns() -> None:
    weight = normal(5, 3)
    assert dense.linear(torch.empty(0, 3), weight).shape == (0, 5)
    assert torch.equal(dense.linear(torch.empty(2, 0), torch.empty(5, 0)), torch.zeros(2, 5))
    assert dense.rms_norm(torch.empty(0, 3), torch.ones(3), 1e-6).shape == (0, 3)
    assert dense.swiglu(torch.empty(0, 3), torch.empty(0, 3)).shape == (0, 3)
    assert dense.swiglu(torch.empty(2, 3, 0), torch.empty(2, 3, 0)).shape == (2, 3, 0)
    for rows, inputs, outputs in ((3, 4, 0), (0, 4, 2), (3, 0, 2)):
        ones = [torch.ones(2, rows, inputs), torch.ones(outputs, inputs), torch.ones(outputs)]
        pull = torch.ones(2, rows, outputs)
        for one, gradient in zip(ones, gradients(dense.linear, ones, pull), strict=True):
            assert gradient.shape == one.shape
            assert bool((gradient == 2 * rows if one.dim() == 1 else gradient.isfinite()).all())


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 24), (70, 130), (300, 65)])
@pytest.mark.parametrize("rows", [1, 30, 700])
def test_gradients_of_linear(outputs: int, inputs: int, rows: int) -> None:
    weight, bias = normal(outputs, inputs, seed=1), normal(outputs, seed=2)
    check_gradients(dense.linear, [normal(rows, inputs, seed=3), weight, bias])
    check_gradients(lambda x, w: dense.linear(x[None], w.t()), [normal(rows, inputs), weight.t()])


def test_gradients_of_linear_in_bfloat16() -> None:
    inputs = [normal(50, 33, seed=1), normal(20, 33, seed=2), normal(20, seed=3)]
    small = [x.bfloat16() for x in inputs]
    pull = normal(50, 20, seed=4).bfloat16()
    got = gradients(dense.linear, small, pull)
    want = gradients(F.linear, [x.double() for x in small], pull.double())
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative(ours, theirs) < 1e-2


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize("lies", ["plain", "turned"])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 40, 24), (7, 600, 4100), (33, 70, 130), (600, 33, 65)],  # the second in three pieces
)
def test_a_weights_gradient_in_bfloat16_is_rounded_once(
    rows: int, outputs: int, inputs: int, lies: str
) -> None:
    x, pull = (normal(rows, n, seed=n, dtype=torch.bfloat16) for n in (inputs, outputs))
    weight = normal(outputs, inputs, dtype=torch.bfloat16)
    turned = lies == "turned"
    leaf = (weight.t().contiguous() if turned else weight).requires_grad_()
    dense.linear(x, leaf.t() if turned else leaf).backward(pull)
    assert leaf.grad is not None
    got = (leaf.grad.t() if turned else leaf.grad).double()
    exact, sizes = pull.double().t() @ x.double(), pull.double().abs().t() @ x.double().abs()
    rounding = exact.abs() * 2.0**-8 + sizes * (rows + 2) * 2.0**-24
    assert bool(((got - exact).abs() <= rounding).all())


def test_a_weights_gradient_by_one_row_given_many_times_is_its_own() -> None:
    row, pull = normal(1, 64), normal(256, 48)
    exact = pull.double().sum(0)[:, None] * row.double()
    for _ in range(12):  # as long as ways to cut the product are tried in turn
        weight = normal(48, 64).requires_grad_()
        dense.linear(row.expand(256, 64), weight).backward(pull)
        assert weight.grad is not None
        assert relative(weight.grad, exact) < 1e-5


def test_what_needs_no_gradient_gets_none() -> None:
    x, weight = normal(4, 6).requires_grad_(), normal(3, 6).requires_grad_()
    dense.linear(x, weight.detach()).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
    x.grad = None
    dense.linear(x.detach(), weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    assert not dense.linear(x.detach(), weight.detach()).requires_grad
    with torch.no_grad():
        assert not dense.linear(x, weight).requires_grad


@pytest.mark.usefixtures("needs_native")
def test_a_second_derivative_is_refused() -> None:
    x = normal(4, 6).requires_grad_()
    out = dense.linear(x, normal(3, 6)).sum()
    with pytest.raises(RuntimeError, match="must be differentiated once"):
        torch.autograd.grad(out, x, create_graph=True)


def coded(
    x: Tensor, *, outputs: int, inputs: int, more: int = 0, bias: Tensor | None = None
) -> Tensor:
    """x by an int8 weight (outputs, inputs) of `more` codes than there should be."""
    code = blockwise.INT8
    codes, scales = blockwise.quantize(normal(outputs * inputs + more), code)
    return blockwise.linear(x, codes, scales, outputs, code, bias)


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize("rows", [0, 1, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_of_no_codes_adds_nothing(rows: int, dtype: torch.dtype) -> None:
    bias = normal(6, dtype=dtype)
    by_none = coded(normal(rows, 0, dtype=dtype), outputs=6, inputs=0, bias=bias)
    assert torch.equal(by_none, bias.expand(rows, 6))
    assert torch.equal(coded(normal(rows, 0, dtype=dtype), outputs=6, inputs=0), 0 * by_none)
    no_rows = coded(normal(rows, 64, dtype=dtype), outputs=0, inputs=64)
    assert no_rows.shape == (rows, 0)
    assert no_rows.dtype == dtype


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: dense.linear(normal(2, 5), normal(3, 4)), r"input must be \(\.\.\., 4\)"),
        (lambda: dense.linear(normal(2, 4), normal(3, 4), normal(4)), r"bias must be \(3,\)"),
        (lambda: dense.linear(normal(2, 4), normal(4)), r"weight must be \(N, K\)"),
        (lambda: dense.pack_weight(normal(4)), r"must be \(N, K\)"),
        (lambda: dense.linear_packed(normal(2, 4), normal(9), 3, 4), "must hold 64 words"),
        (
            lambda: coded(normal(3, 63), outputs=40, inputs=64),
            r"input must be \(\.\.\., 64\) Float; got \[3, 63\]",
        ),
        (
            lambda: coded(normal(3, 64), outputs=40, inputs=64, more=1),
            r"weight \(40, 64\) must have 2560 bytes of codes and 10 scales; got 2561 and 11",
        ),
        (
            lambda: coded(normal(3, 0), outputs=0, inputs=0, more=1),
            r"weight \(0, 0\) must have 0 bytes of codes and 0 scales; got 1 and 1",
        ),
        (lambda: dense.rms_norm(normal(2, 4), normal(5), 1e-6), r"weight must be \(4,\)"),
        (lambda: dense.swiglu(normal(2, 4), normal(2, 5)), "agree in shape"),
        (
            lambda: dense.rotary(normal(2, 1, 4), normal(2, 1, 4), normal(2, 3), normal(2, 3)),
            r"cos and sin must be \(2, R\)",
        ),
        (
            lambda: dense.token_logprobs(normal(2, 4), torch.tensor([0, 4])),
            r"target must be in \[0, 4\); got 4",
        ),
    ],
)
def test_wrong_shapes_are_named(call: Callable[[], object], rule: str) -> None:
    with pytest.raises(RuntimeError, match=rule):
        call()


# ---- norm, rotation, activations: Hugging Face's own modules ----


@pytest.mark.parametrize("width", [8, 20, 64, 100, 192])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm_is_hugging_faces(width: int, dtype: torch.dtype, offset: bool) -> None:
    module = GemmaRMSNorm(width) if offset else LlamaRMSNorm(width)
    module.weight.data.copy_(normal(width, seed=1))
    module = module.to(dtype)
    eps = module.eps if offset else module.variance_epsilon
    x = 3 * normal(2, 30, width, dtype=dtype)
    got = dense.rms_norm(x, module.weight, eps, offset)
    assert got.dtype == dtype
    torch.testing.assert_close(got, module(x), rtol=2e-6 if dtype == DTYPES[0] else 8e-3, atol=1e-6)


@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm_of_mixed_dtypes_is_hugging_faces(offset: bool) -> None:
    module = GemmaRMSNorm(24) if offset else LlamaRMSNorm(24)
    module.weight.data.copy_(normal(24, seed=1))
    x = normal(5, 24, dtype=torch.bfloat16)
    want = module(x)
    got = dense.rms_norm(x, module.weight, 1e-6, offset)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("rows", [1, 300])
def test_gradients_of_rms_norm(offset: bool, rows: int) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return dense.rms_norm(x, weight, 1e-5, offset)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x * scale * (1 + weight if offset else weight)

    check_gradients(norm, [normal(rows, 36), normal(36, seed=1)])


def heads_and_angles(rotated: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k as slices of one tensor (strided), cos and sin as HF's module makes them."""
    fused = normal(19, 10, 32, dtype=dtype)
    config = LlamaConfig(hidden_size=4 * rotated, num_attention_heads=4, head_dim=rotated)
    positions = torch.arange(19).flip(0)[None] * 7
    cos, sin = LlamaRotaryEmbedding(config)(fused[None, :, 0], positions)
    return fused[:, :6], fused[:, 6:8], cos[0], sin[0]


@pytest.mark.parametrize("rotated", [8, 20, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_is_hugging_faces_to_the_bit(rotated: int, dtype: torch.dtype) -> None:
    q, k, cos, sin = heads_and_angles(rotated, dtype)
    want = apply_rotary_pos_emb(
        q[..., :rotated].transpose(0, 1)[None], k[..., :rotated].transpose(0, 1)[None],
        cos[None], sin[None],
    )  # fmt: skip
    for got, whole, turned in zip(dense.rotary(q, k, cos, sin), (q, k), want, strict=True):
        assert torch.equal(got[..., :rotated], turned[0].transpose(0, 1))
        assert torch.equal(got[..., rotated:], whole[..., rotated:])


def test_gradients_of_rotary() -> None:
    q, k, cos, sin = heads_and_angles(20, torch.float32)

    def both(q: Tensor, k: Tensor) -> Tensor:
        return torch.cat(dense.rotary(q, k, cos.to(q.dtype), sin.to(q.dtype)), 1)

    check_gradients(both, [q, k])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tanh", [False, True])
def test_gated_activations_are_hugging_faces(dtype: torch.dtype, tanh: bool) -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 44, "num_attention_heads": 2}
    mlp = (GemmaMLP(GemmaConfig(**sizes)) if tanh else LlamaMLP(LlamaConfig(**sizes))).to(dtype)
    assert not tanh or mlp.config.hidden_act == "gelu_pytorch_tanh"
    x = 4 * normal(30, 24, dtype=dtype)
    both = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], -1)
    gate, up = both.chunk(2, -1)  # strided halves
    inner = dense.geglu_tanh(gate, up) if tanh else dense.swiglu(gate, up)
    assert inner.dtype == dtype
    allowed = {"rtol": 3e-6, "atol": 3e-6} if dtype == DTYPES[0] else {"rtol": 2e-2, "atol": 1e-6}
    torch.testing.assert_close(inner, mlp.act_fn(gate) * up, **allowed)
    torch.testing.assert_close(mlp.down_proj(inner), mlp(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("activation", [dense.swiglu, dense.geglu_tanh])
def test_gated_activations_far_out(activation: Callable[[Tensor, Tensor], Tensor]) -> None:
    gate = torch.tensor([-1e4, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 200.0, 1e4])
    plain = F.silu if activation is dense.swiglu else lambda x: F.gelu(x, approximate="tanh")
    got = activation(gate, torch.ones(10))
    torch.testing.assert_close(got, plain(gate.double()).float(), rtol=1e-6, atol=1e-30)


PLAIN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (dense.silu, lambda x: x * torch.sigmoid(x)),
    "gelu": (dense.gelu, lambda x: x / 2 * torch.special.erfc(-x / 2**0.5)),
    "gelu_tanh": (
        lambda x: dense.gelu(x, tanh=True),
        lambda x: x * torch.sigmoid((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3)),
    ),
}
"""Activations and their definitions, written so that nothing cancels in float64."""


@pytest.mark.parametrize("name", PLAIN)
def test_activations_are_the_definitions(name: str, arithmetic: str) -> None:
    ours, exact = PLAIN[name]
    far = [-1e4, -90.0, -20.0, -12.0, -0.0, 0.0, 20.0, 90.0, 1e4, math.nan]
    far += [math.inf] if arithmetic == "native" else []  # of which torch's vectors may make NaN
    x = torch.cat([torch.linspace(-9, 9, 4001), torch.tensor(far)])
    # Far below 0 torch takes the difference of two numbers near 1.
    absolute = 1e-30 if arithmetic == "native" else 1e-6
    want = exact(x.double()).float()
    torch.testing.assert_close(ours(x), want, rtol=1e-5, atol=absolute, equal_nan=True)
    half = x.bfloat16()
    want = exact(half.double()).bfloat16()
    torch.testing.assert_close(ours(half), want, rtol=2**-7, atol=absolute, equal_nan=True)
    check_gradients(ours, [2 * normal(30, 44)])
    check_gradients(lambda both: ours(both.chunk(2, -1)[1]), [2 * normal(3, 5, 41 * 2)])


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_is_activated_alike_wherever_it_stands(
    name: str, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    ours, x = PLAIN[name][0], 3 * normal(701, 103, dtype=dtype)
    whole = ours(x)
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(ours(x), whole)
        assert torch.equal(ours(x[:, 5:38]), whole[:, 5:38])
        assert torch.equal(ours(x[3:5, 7, None]), whole[3:5, 7, None])


@pytest.mark.parametrize("activation", [dense.swiglu, dense.geglu_tanh])
def test_gradients_of_gated_activations(activation: Callable[[Tensor, Tensor], Tensor]) -> None:
    check_gradients(activation, [2 * normal(30, 44), normal(30, 44, seed=1)])
    check_gradients(lambda both: activation(*both.chunk(2, -1)), [2 * normal(3, 5, 40)])


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_every_operation_know_no_other(
    dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    x, y = normal(900, 1, 44, dtype=dtype), normal(900, 1, 44, seed=1, dtype=dtype)
    weight = normal(44, seed=2, dtype=dtype)
    targets, keys = torch.arange(900) % 44, torch.arange(900)

    def everything(rows: slice) -> list[Tensor]:
        a, b = x[rows], y[rows]
        logits = a[:, 0]
        return [
            dense.rms_norm(a, weight, 1e-6),
            dense.rms_norm(a, weight, 1e-6, True),
            *dense.rotary(a, b, a[:, 0, :30].cos(), a[:, 0, :30].sin()),
            dense.swiglu(a, b),
            dense.geglu_tanh(a, b),
            *dense.token_logprobs(logits, targets[rows], 0.7),
            *dense.sample(logits, keys[rows], targets[rows], 0.7),
        ]

    whole = everything(slice(None))
    for count in (1, 2):
        threads(count)
        for rows in (slice(0, 1), slice(5, 7), slice(333, 400), slice(899, 900), slice(None)):
            for got, want in zip(everything(rows), whole, strict=True):
                assert torch.equal(got, want[rows])


# ---- log-probs and drawing ----


def slow_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """float64, by the definitions."""
    z = logits.double() / temperature
    p = z.exp() / z.exp().sum(1, keepdim=True)
    entropy = -torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0).sum(1)
    return p.gather(1, targets[:, None])[:, 0].log(), entropy


@pytest.mark.parametrize("vocabulary", [2, 16, 99, 256, 257, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_token_logprobs(vocabulary: int, temperature: float, dtype: torch.dtype) -> None:
    logits = 5 * normal(40, vocabulary, dtype=dtype)
    logits[3, 0] = -torch.inf
    targets = torch.arange(40) % vocabulary
    targets[3] = 1
    want = slow_logprobs(logits, targets, temperature)
    got = dense.token_logprobs(logits, targets, temperature)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=2e-6)
    without = dense.token_logprobs(logits, targets, temperature, with_entropy=False)
    assert torch.equal(without[0], got[0])
    assert torch.equal(without[1], torch.zeros(40))
    impossible = dense.token_logprobs(logits[3:4], torch.tensor([0]), temperature)
    assert impossible[0].item() == -math.inf


@pytest.mark.parametrize("kept", ["logprobs", "entropy", "both"])
def test_gradients_of_token_logprobs(kept: str) -> None:
    targets = torch.arange(12) * 7
    factors = {"logprobs": (1.0, 0.0), "entropy": (0.0, 1.0), "both": (1.0, 0.5)}[kept]

    def of(logits: Tensor) -> Tensor:
        if logits.dtype == torch.float64:
            both = slow_logprobs(logits, targets, 0.8)
        else:
            both = dense.token_logprobs(logits, targets, 0.8)
        return torch.stack([part for part, f in zip(both, factors, strict=True) if f])

    check_gradients(of, [2 * normal(12, 301)])
    logits = normal(12, 301)
    logits[:, 5] = -torch.inf
    grad = gradients(of, [logits], normal(1 + (kept == "both"), 12))[0]
    assert torch.equal(grad[:, 5], torch.zeros(12))
    assert grad.isfinite().all()


def test_gradients_of_token_logprobs_in_bfloat16_and_without_entropy() -> None:
    targets = torch.arange(6)
    logits = normal(6, 40).bfloat16()
    pull = normal(6, seed=1)

    def of(x: Tensor) -> Tensor:
        return dense.token_logprobs(x, targets, 1.0, with_entropy=False)[0]

    got = gradients(of, [logits], pull)[0]
    want = gradients(lambda x: slow_logprobs(x, targets, 1.0)[0], [logits.double()], pull.double())[
        0
    ]
    assert got.dtype == torch.bfloat16
    assert relative(got, want) < 1e-2


def test_uniforms_are_splitmix64s() -> None:
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    for token in (0, 1, 1000, 2**40):
        want = []
        for key in keys:
            x = (key + 0x9E3779B97F4A7C15 * (token + 1)) % 2**64
            x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
            want.append(((x ^ (x >> 31)) >> 11) * 2.0**-53)
        numbers = torch.full((len(keys),), token)
        assert dense.uniforms(torch.tensor(keys), numbers).tolist() == want


def key_of(uniform_bits: int) -> int:
    """The key whose uniform for token 0 is uniform_bits * 2^-53: splitmix64's finaliser undone."""

    def unshift(x: int, bits: int) -> int:
        y = x
        for _ in range(64 // bits + 1):
            y = x ^ (y >> bits)
        return y

    wrap, x = 2**64, uniform_bits << 11
    x = unshift(x, 31) * pow(0x94D049BB133111EB, -1, wrap) % wrap
    x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, wrap) % wrap
    x = (unshift(x, 30) - 0x9E3779B97F4A7C15) % wrap
    return x - wrap if x >= 2**63 else x


def test_the_lowest_and_highest_uniform_draw_tokens_that_can_occur() -> None:
    keys = torch.tensor([key_of(0), key_of(2**53 - 1)])
    zeros = torch.zeros(2, dtype=torch.int64)
    assert dense.uniforms(keys, zeros).tolist() == [0.0, 1 - 2**-53]
    for vocabulary in (3, 40, 256, 700):
        logits = torch.full((2, vocabulary), -torch.inf)
        logits[:, 1 : max(2, vocabulary - 1)] = 3 * normal(2, max(1, vocabulary - 2))
        tokens, logprobs, _, _ = dense.sample(logits, keys, zeros)
        assert tokens.tolist() == [1, max(1, vocabulary - 2)]
        assert logprobs.isfinite().all()


@pytest.mark.parametrize("vocabulary", [5, 300, 2000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_uniform_draws_what_a_slow_loop_finds(vocabulary: int, dtype: torch.dtype) -> None:
    n, temperature = 60, 0.9
    wide = 3 * normal(n, vocabulary + 7, dtype=dtype)
    logits = wide[:, :vocabulary]  # strided rows
    logits[:, 2] = -torch.inf
    keys, numbers = torch.arange(n) * 7919, torch.arange(n) % 5
    tokens, logprobs, sampled, entropy = dense.sample(logits, keys, numbers, temperature)
    uniforms = dense.uniforms(keys, numbers).tolist()
    for row in range(n):
        p = torch.softmax(logits[row].double() / temperature, 0).tolist()
        reached, found = 0.0, 0
        for token, probability in enumerate(p):
            reached += probability
            if reached > uniforms[row]:
                found = token
                break
        assert tokens[row] == found
    scored = dense.token_logprobs(logits, tokens, temperature)
    assert torch.equal(logprobs, scored[0])
    assert torch.equal(sampled, scored[0])
    assert torch.equal(entropy, scored[1])


@pytest.mark.parametrize("beyond", [0.0, 200.0, -torch.inf])
@pytest.mark.parametrize("num_ids", [1, 255, 256, 300, 512, 699])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_that_may_not_be_drawn_count_in_log_prob_and_entropy_alone(
    dtype: torch.dtype, num_ids: int, beyond: float
) -> None:
    """The draw is that of the first columns alone, to the bit; the numbers are those of all."""
    n, temperature = 40, 0.9
    logits = 3 * normal(n, 700, dtype=dtype)
    logits[:, num_ids:] += beyond  # by 200: the others' probabilities are 0 in float32
    keys, numbers = torch.arange(n) * 7919, torch.arange(n) % 5
    tokens, logprobs, sampled, entropy = dense.sample(logits, keys, numbers, temperature, num_ids)
    alone = dense.sample(logits[:, :num_ids].clone(), keys, numbers, temperature)
    assert torch.equal(tokens, alone[0])
    assert torch.equal(sampled, alone[1])
    scored = dense.token_logprobs(logits, tokens, temperature)
    assert torch.equal(logprobs, scored[0])
    assert torch.equal(entropy, scored[1])
    for more in (None, 700, 999):
        drawn = dense.sample(logits, keys, numbers, temperature, more)
        assert torch.equal(drawn[1], drawn[2])
    assert beyond != 200.0 or int(drawn[0].min()) >= num_ids, "those beyond are by far likelier"


def test_a_nan_beyond_what_may_be_drawn_shows_in_both_log_probs() -> None:
    logits, keys = normal(3, 700), torch.arange(3)
    logits[1, 650] = torch.nan
    _, logprobs, sampled, _ = dense.sample(logits, keys, keys, 1.0, 600)
    assert logprobs.isnan().tolist() == sampled.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("peak", [0.0, 2.0])
def test_draws_follow_the_distribution(peak: float) -> None:
    vocabulary, draws = 320, 20_000
    row = peak * normal(vocabulary)
    row[::10] = -torch.inf
    keys = torch.arange(draws, dtype=torch.int64) * 2654435761
    logits = row.expand(draws, vocabulary)
    tokens, *_ = dense.sample(logits, keys, torch.zeros_like(keys))
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    expected = draws * torch.softmax(row.double(), 0)
    assert counts[::10].sum() == 0
    common = expected > 5
    rare = torch.stack([counts[~common].sum(), expected[~common].sum()])
    chi_square = ((counts - expected) ** 2 / expected)[common].sum()
    chi_square += (rare[0] - rare[1]) ** 2 / rare[1].clamp(min=1)
    freedom = int(common.sum())
    assert abs(float(chi_square) - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_must_be_above_0(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        dense.token_logprobs(normal(2, 3), torch.zeros(2, dtype=torch.int64), temperature)


def test_targets_and_keys_must_be_one_per_row() -> None:
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ShapeError, match="targets must be"):
        dense.token_logprobs(normal(2, 3), one)
    with pytest.raises(ShapeError, match="token_numbers must be"):
        dense.sample(normal(2, 3), two, one)
    with pytest.raises(ShapeError, match="keys must be"):
        dense.sample(normal(2, 3), two.float(), two)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_leaves_log_probs_and_entropy_in_float32(half: torch.dtype) -> None:
    logits, targets = torch.randn(5, 30).to(half), torch.arange(5)
    expected = dense.token_logprobs(logits, targets, 0.7)
    with torch.autocast("cpu", dtype=half):
        found = dense.token_logprobs(logits, targets, 0.7)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)


def test_a_packed_weight_in_bfloat16_takes_half_of_float32s_memory() -> None:
    """What decoding takes from memory is what a few answers wait for."""
    is_narrow = os.environ.get("TANDEM_MARCH") == "x86-64-v2"
    if native.available() and (is_narrow or not {"avx2", "avx512f"} & processor.features()):
        pytest.skip("narrow registers: four bytes a number")
    for outputs, inputs in ((64, 32), (577, 34)):
        weight = torch.randn(outputs, inputs)
        half = dense.pack_weight(weight.bfloat16())
        assert 2 * half.nbytes == dense.pack_weight(weight).nbytes
