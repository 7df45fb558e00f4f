"""The halves of a layer: bits of the operations one by one, gradients of float64."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tandem.ops import dense, gpu, layer, native

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Shape:
    """Of a layer: widths of the model, of a head, of the MLP; heads; rotated columns."""

    width: int
    inner: int
    query_heads: int
    key_heads: int
    head: int
    rotated: int
    biases: bool = False
    offset: bool = False
    tanh: bool = False


SHAPES = {
    "small": Shape(128, 352, 4, 4, 32, 32),
    "grouped": Shape(64, 176, 4, 2, 16, 16, biases=True),
    "ragged": Shape(72, 100, 3, 1, 24, 8),
    "narrow": Shape(40, 96, 5, 1, 8, 8),
    "gemma": Shape(96, 192, 2, 1, 64, 64, offset=True, tanh=True),
    "large": Shape(320, 900, 5, 5, 64, 64),
}
ROWS = [1, 37, 256, 300, 1100]


@dataclass
class Inputs:
    """What a layer's halves are given; tensors in the order of the fields."""

    x: Tensor
    norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    bias_q: Tensor
    bias_k: Tensor
    bias_v: Tensor
    attended: Tensor
    residual: Tensor
    out: Tensor
    bias_out: Tensor
    second: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    a_q: Tensor
    b_q: Tensor
    a_v: Tensor
    b_v: Tensor
    a_out: Tensor
    b_out: Tensor
    a_up: Tensor
    b_up: Tensor
    a_down: Tensor
    b_down: Tensor

    def all(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(**{name: tensor.to(dtype) for name, tensor in self.all().items()})

    def leaves(self, *, but: str = "") -> Inputs:
        """Each a leaf that wants a gradient; or all but one, or that one alone ("only NAME")."""
        only = but.removeprefix("only ") if but.startswith("only ") else ""
        return Inputs(
            **{
                name: tensor.detach().clone().requires_grad_(name == only if only else name != but)
                for name, tensor in self.all().items()
            }
        )


Half = Callable[[Inputs, Shape], tuple[Tensor, ...]]
BEFORE = ("x", "norm", "q", "k", "v", "bias_q", "bias_k", "bias_v")
AFTER = ("attended", "residual", "out", "bias_out", "second", "gate", "up", "down")
ADAPTED_BEFORE = (*BEFORE, "a_q", "b_q", "a_v", "b_v")
ADAPTED_AFTER = (*AFTER, "a_out", "b_out", "a_up", "b_up", "a_down", "b_down")
SCALES = {"q": 2.0, "v": 0.3, "out": 0.7, "up": 1.0, "down": 1.5}
MATRICES = ("q", "k", "v", "out", "gate", "up", "down")
MATRICES += tuple(f"{part}_{name}" for name in SCALES for part in "ab")


def inputs_of(shape: Shape, rows: int, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(rows)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * (size[-1] ** -0.5 if len(size) > 1 else 1)

    queries, keys = shape.query_heads * shape.head, shape.key_heads * shape.head
    width, inner = shape.width, shape.inner
    return Inputs(
        normal(rows, width) * width**0.5, normal(width), normal(queries, width),
        normal(keys, width), normal(keys, width), normal(queries), normal(keys), normal(keys),
        normal(rows, queries) * width**0.5, normal(rows, width), normal(width, queries),
        normal(width), normal(width), normal(inner, width), normal(inner, width),
        normal(width, inner), normal(3, width), normal(queries, 3), normal(16, width),
        normal(keys, 16), normal(5, queries), normal(width, 5), normal(4, width), normal(inner, 4),
        normal(20, inner), normal(width, 20),
    ).to(dtype)  # fmt: skip


def angles(shape: Shape, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turned = torch.arange(rows)[:, None] * 0.7 ** torch.arange(shape.rotated // 2)
    turned = torch.cat([turned, turned], -1)
    return turned.cos().to(dtype), turned.sin().to(dtype)


def before(
    given: Inputs, shape: Shape, *, adapted: bool = False, some: bool = False
) -> tuple[Tensor, ...]:
    """`some`: of a part of the rows queries and x."""
    biases = [given.bias_q, given.bias_k, given.bias_v] if shape.biases else [None] * 3
    norm = layer.Norm(given.norm, 1e-5, shape.offset)
    cos, sin = angles(shape, len(given.x), given.x.dtype)
    adapters = [adapter(given, "q"), None, adapter(given, "v")] if adapted else [None] * 3
    return layer.before_attention(
        given.x, norm, [given.q, given.k, given.v], biases, cos, sin, shape.head, adapters,
        asked_of(len(given.x)) if some else None,
    )  # fmt: skip


def asked_of(rows: int) -> Tensor:
    """Every third row, ten that follow one another, and the last."""
    places = torch.arange(rows)
    return places[(places % 3 == 1) | ((places > 20) & (places <= 30)) | (places == rows - 1)]


def after(given: Inputs, shape: Shape) -> tuple[Tensor, ...]:
    out = given.out, given.bias_out if shape.biases else None
    norm = layer.Norm(given.second, 1e-5, shape.offset)
    mlp = given.gate, given.up, given.down
    return (layer.after_attention(given.attended, given.residual, out, norm, *mlp, shape.tanh),)


def adapter(given: Inputs, name: str) -> layer.Adapter:
    return layer.Adapter(getattr(given, f"a_{name}"), getattr(given, f"b_{name}"), SCALES[name])


adapted_before: Half = partial(before, adapted=True)


def adapted_after(given: Inputs, shape: Shape) -> tuple[Tensor, ...]:
    out = given.out, given.bias_out if shape.biases else None
    norm = layer.Norm(given.second, 1e-5, shape.offset)
    mlp = given.gate, given.up, given.down
    adapters = [adapter(given, "out"), None, adapter(given, "up"), adapter(given, "down")]
    return (
        layer.after_attention(
            given.attended, given.residual, out, norm, *mlp, shape.tanh, adapters
        ),
    )


def linear(
    given: Inputs, name: str, x: Tensor, bias: Tensor | None = None, *, adapted: bool = False
) -> Tensor:
    """A product as a layer with an adapter makes it (models/lora.py)."""
    made = dense.linear(x, getattr(given, name), bias)
    if not adapted or name not in SCALES:
        return made
    down, up, scale = adapter(given, name)
    return made + dense.linear(dense.linear(x, down) * scale, up)


def before_slowly(
    given: Inputs, shape: Shape, *, adapted: bool = False, some: bool = False
) -> tuple[Tensor, ...]:
    """Operation by operation, in any dtype."""
    biases = [given.bias_q, given.bias_k, given.bias_v] if shape.biases else [None] * 3
    normed = dense.rms_norm(given.x, given.norm, 1e-5, shape.offset)
    if given.x.dtype == torch.float64:
        normed = normed_exactly(given.x, given.norm, shape.offset)
    q, k, v = (
        linear(given, name, normed, bias, adapted=adapted).unflatten(-1, (-1, shape.head))
        for name, bias in zip(("q", "k", "v"), biases, strict=True)
    )
    cos, sin = angles(shape, len(given.x), torch.float32)
    turned = *dense.rotary(q, k, cos.to(q.dtype), sin.to(q.dtype)), v, given.x
    asked = asked_of(len(given.x))
    return (turned[0][asked], *turned[1:3], given.x[asked]) if some else turned


def after_slowly(given: Inputs, shape: Shape, *, adapted: bool = False) -> tuple[Tensor, ...]:
    bias = given.bias_out if shape.biases else None
    hidden = given.residual + linear(given, "out", given.attended, bias, adapted=adapted)
    normed = dense.rms_norm(hidden, given.second, 1e-5, shape.offset)
    if hidden.dtype == torch.float64:
        normed = normed_exactly(hidden, given.second, shape.offset)
    gate, up = (linear(given, name, normed, adapted=adapted) for name in ("gate", "up"))
    inner = dense.geglu_tanh(gate, up) if shape.tanh else dense.swiglu(gate, up)
    return (hidden + linear(given, "down", inner, adapted=adapted),)


def normed_exactly(x: Tensor, weight: Tensor, offset: bool) -> Tensor:
    """`rms_norm` without its float32 inside."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return normed * (1 + weight) if offset else normed * weight


AFTER_ATTENTION = layer.after_attention
HALVES: list[tuple[Half, Half, tuple[str, ...]]] = [
    (before, before_slowly, BEFORE),
    (after, after_slowly, AFTER),
    (adapted_before, partial(before_slowly, adapted=True), ADAPTED_BEFORE),
    (adapted_after, partial(after_slowly, adapted=True), ADAPTED_AFTER),
    (partial(before, some=True), partial(before_slowly, some=True), BEFORE),
    (
        partial(before, adapted=True, some=True),
        partial(before_slowly, adapted=True, some=True),
        ADAPTED_BEFORE,
    ),
]
IDS = ["before", "after", "adapted before", "adapted after", "some", "adapted some"]
half_of_layer = pytest.mark.parametrize(("half", "slowly", "names"), HALVES, ids=IDS)
half_of_all_rows = pytest.mark.parametrize(("half", "slowly", "names"), HALVES[:4], ids=IDS[:4])


def wanted(shape: Shape, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if shape.biases or not name.startswith("bias")]


def loss_of(made: tuple[Tensor, ...]) -> Tensor:
    """Weighs each output's numbers."""
    total = torch.zeros((), dtype=made[0].dtype)
    for number, tensor in enumerate(made):
        generator = torch.Generator().manual_seed(number)
        total = total + (tensor * torch.randn(tensor.shape, generator=generator).to(tensor)).sum()
    return total


def gradients(half: Half, given: Inputs, shape: Shape, names: tuple[str, ...]) -> dict[str, Tensor]:
    loss_of(half(given, shape)).backward()
    return {name: grad for name in names if (grad := getattr(given, name).grad) is not None}


def distance(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


@half_of_layer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_those_of_the_operations_one_by_one(
    name: str, dtype: torch.dtype, half: Half, slowly: Half, names: tuple[str, ...]
) -> None:
    for rows in ROWS:
        given = inputs_of(SHAPES[name], rows, dtype)
        with torch.no_grad():
            found, expected = half(given, SHAPES[name]), slowly(given, SHAPES[name])
        for got, want in zip(found, expected, strict=True):
            assert got.shape == want.shape
            assert torch.equal(got, want), rows
        recorded = half(given.leaves(), SHAPES[name])
        for got, want in zip(recorded, expected, strict=True):
            assert torch.equal(got, want), rows


@half_of_layer
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_float64(
    name: str, half: Half, slowly: Half, names: tuple[str, ...]
) -> None:
    for rows in ROWS:
        given = inputs_of(SHAPES[name], rows, torch.float32)
        got = gradients(half, given.leaves(), SHAPES[name], names)
        exact = gradients(slowly, given.to(torch.float64).leaves(), SHAPES[name], names)
        assert list(got) == list(exact) == wanted(SHAPES[name], names)
        for key, gradient in got.items():
            assert distance(gradient, exact[key]) < 2e-6, (key, rows)


@half_of_all_rows
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_in_bfloat16_are_as_close_as_the_operations_one_by_one(
    name: str, half: Half, slowly: Half, names: tuple[str, ...]
) -> None:
    for rows in (37, 600):
        given = inputs_of(SHAPES[name], rows, torch.bfloat16)
        got = gradients(half, given.leaves(), SHAPES[name], names)
        plain = gradients(slowly, given.leaves(), SHAPES[name], names)
        exact = gradients(slowly, given.to(torch.float64).leaves(), SHAPES[name], names)
        assert list(got) == list(exact) == wanted(SHAPES[name], names)
        for key, gradient in got.items():
            assert gradient.dtype == torch.bfloat16
            # An adapter's part is rounded before it is added.
            times = 1.2 if half in (adapted_before, adapted_after) else 1.1
            limit = times * distance(plain[key], exact[key]) + 2e-4
            assert distance(gradient, exact[key]) < limit, (key, rows)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_in_bfloat16_of_some_rows_are_those_of_all(name: str, adapted: bool) -> None:
    """Where nothing else is asked of the others."""
    shape, names = SHAPES[name], ADAPTED_BEFORE if adapted else BEFORE
    given = inputs_of(shape, 300, torch.bfloat16)

    def selected(given: Inputs, shape: Shape) -> tuple[Tensor, ...]:
        q, k, v, x = before(given, shape, adapted=adapted)
        asked = asked_of(len(x))
        return q[asked], k, v, x[asked]

    some = gradients(partial(before, adapted=adapted, some=True), given.leaves(), shape, names)
    every = gradients(selected, given.leaves(), shape, names)
    assert list(some) == list(every) == wanted(shape, names)
    assert all(torch.equal(some[key], every[key]) for key in some)


@half_of_layer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["small", "grouped", "large"])
def test_the_number_of_threads_does_not_matter(
    name: str,
    dtype: torch.dtype,
    half: Half,
    slowly: Half,
    names: tuple[str, ...],
    threads: Callable[[int], None],
) -> None:
    found = []
    for count in (1, 2, 3, 7):  # pieces of 256 rows and of 128, and all threads on each product
        threads(count)
        given = inputs_of(SHAPES[name], 1100, dtype).leaves()
        made = half(given, SHAPES[name])
        found.append([*made, *gradients(half, given, SHAPES[name], names).values()])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@half_of_layer
@pytest.mark.parametrize("rows", [37, 300])
def test_what_is_frozen_changes_nothing_for_the_rest(
    rows: int, half: Half, slowly: Half, names: tuple[str, ...]
) -> None:
    shape = SHAPES["grouped"]
    given = inputs_of(shape, rows, torch.float32)
    whole = gradients(half, given.leaves(), shape, names)
    for name in names:
        rest = gradients(half, given.leaves(but=name), shape, names)
        assert list(rest) == [key for key in whole if key != name]
        one = gradients(half, given.leaves(but=f"only {name}"), shape, names)
        assert list(one) == [name]
        for key, gradient in (*rest.items(), *one.items()):
            assert distance(gradient, whole[key]) < 1e-6, (name, key)


@half_of_layer
def test_gradients_are_added_where_they_are_kept(
    half: Half, slowly: Half, names: tuple[str, ...]
) -> None:
    shape, rows = SHAPES["grouped"], 300
    given = inputs_of(shape, rows, torch.float32).leaves()
    first = {name: grad.clone() for name, grad in gradients(half, given, shape, names).items()}
    kept = {name: getattr(given, name).grad for name in names}
    second = gradients(half, given, shape, names)
    for name, gradient in second.items():
        assert gradient is kept[name]
        torch.testing.assert_close(gradient, 2 * first[name], rtol=1e-5, atol=1e-5)
    leaves = [getattr(given, name) for name in names]
    asked = torch.autograd.grad(loss_of(half(given, shape)), leaves)
    for name, gradient in zip(names, asked, strict=True):
        torch.testing.assert_close(gradient, first[name], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(kept[name], 2 * first[name], rtol=1e-5, atol=1e-5)


@half_of_layer
def test_hooks_see_gradients(half: Half, slowly: Half, names: tuple[str, ...]) -> None:
    shape = SHAPES["grouped"]
    given = inputs_of(shape, 40, torch.float32)
    expected = gradients(half, given.leaves(), shape, names)
    leaves, seen = given.leaves(), {}
    for name in names:
        getattr(leaves, name).register_hook(lambda grad, name=name: seen.update({name: grad}))
    got = gradients(half, leaves, shape, names)
    assert seen.keys() == got.keys() == expected.keys()
    for name in names:
        assert torch.equal(seen[name], expected[name])


class Sums:
    """What an optimizer with masters keeps: a sum per weight, made with the first gradient."""

    def __init__(self, given: Inputs, names: list[str]) -> None:
        self.kept: dict[str, Tensor] = {}
        self.names = {id(getattr(given, name)): name for name in names}
        held = weakref.ref(self)
        for name in names:
            gpu.keep_sum(
                getattr(given, name), lambda weight: (found := held()) and found.of(weight)
            )

    def of(self, weight: Tensor) -> tuple[Tensor, bool]:
        name = self.names[id(weight)]
        is_new = name not in self.kept
        if is_new:
            self.kept[name] = torch.full(weight.shape, float("nan"))
        return self.kept[name], is_new


@half_of_layer
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["small", "grouped", "ragged"])
def test_bfloat16_weights_gradients_go_into_their_sums(
    name: str, recomputed: bool, half: Half, slowly: Half, names: tuple[str, ...]
) -> None:
    shape = SHAPES[name]
    matrices = [key for key in names if key in MATRICES]
    given = inputs_of(shape, 300, torch.bfloat16)
    exact = gradients(slowly, given.to(torch.float64).leaves(), shape, names)
    plain = gradients(half, given.leaves(), shape, names)
    leaves = given.leaves()
    sums = Sums(leaves, matrices)

    def run(*_: Any) -> tuple[Tensor, ...]:
        return half(leaves, shape)

    for _ in range(2):
        made = checkpoint(run, leaves.x, use_reentrant=False) if recomputed else run()
        loss_of(made).backward()
    assert sorted(sums.kept) == sorted(matrices)
    for key in wanted(shape, names):
        grad = sums.kept[key] if key in matrices else getattr(leaves, key).grad
        assert (getattr(leaves, key).grad is None) == (key in matrices)
        limit = distance(plain[key], exact[key]) + (1e-5 if key in matrices else 4e-3)
        assert distance(grad, 2 * exact[key]) < limit, key
    before_asking = {key: total.clone() for key, total in sums.kept.items()}
    asked = torch.autograd.grad(loss_of(half(leaves, shape)), [getattr(leaves, matrices[0])])
    assert torch.equal(asked[0], plain[matrices[0]])
    assert all(torch.equal(total, before_asking[key]) for key, total in sums.kept.items())
    del sums
    gc.collect()
    loss_of(half(leaves, shape)).backward()  # the optimizer is gone
    assert torch.equal(getattr(leaves, matrices[0]).grad, plain[matrices[0]])


@half_of_layer
def test_a_hook_sees_a_gradient_beside_others_that_go_into_sums(
    half: Half, slowly: Half, names: tuple[str, ...]
) -> None:
    shape = SHAPES["small"]
    matrices = [key for key in names if key in MATRICES]
    given = inputs_of(shape, 40, torch.bfloat16)
    plain = gradients(half, given.leaves(), shape, names)
    for watched in matrices:
        leaves, seen = given.leaves(), []
        sums = Sums(leaves, matrices)
        getattr(leaves, watched).register_hook(seen.append)
        got = gradients(half, leaves, shape, names)
        assert sorted(sums.kept) == sorted(set(matrices) - {watched})
        assert torch.equal(seen[0], plain[watched])
        assert torch.equal(got[watched], plain[watched])


@half_of_layer
def test_a_backward_that_fails_leaves_zeros(
    half: Half, slowly: Half, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = inputs_of(SHAPES["small"], 40, torch.bfloat16).leaves()
    sums = Sums(leaves, [key for key in names if key in MATRICES])
    loss = loss_of(half(leaves, SHAPES["small"]))

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(native, "op", lambda name: fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.backward()
    assert sums.kept
    assert all(not total.any() for total in sums.kept.values())


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ["small", "gemma", "large"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_computed_again_gives_the_same_gradients(
    name: str, dtype: torch.dtype, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name]
    half, names = (adapted_after, ADAPTED_AFTER) if adapted else (after, AFTER)
    matrices = [key for key in names if key in MATRICES]
    for rows in ROWS:
        given = inputs_of(shape, rows, dtype)
        found = []
        for recomputes in (False, True):
            leaves = given.leaves()
            sums = Sums(leaves, matrices if dtype == torch.bfloat16 else [])
            monkeypatch.setattr(
                layer, "after_attention", partial(AFTER_ATTENTION, recomputes=recomputes)
            )
            made = gradients(half, leaves, shape, names)
            found.append(made | sums.kept)
        assert found[0].keys() == found[1].keys() == set(wanted(shape, names))
        for key, gradient in found[0].items():
            assert torch.equal(gradient, found[1][key]), (key, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_in_another_form_are_unpacked_twice_and_not_kept(
    frozen: bool, dtype: torch.dtype
) -> None:
    """frozen: nothing before the layer is trained either, as in the first of a model."""
    shape, rows = SHAPES["grouped"], 300
    unpacked: list[weakref.ref[Tensor]] = []

    def unpack(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
        made = (high + low).to(dtype)
        unpacked.append(weakref.ref(made))
        return made

    def stored(weight: Tensor) -> layer.Stored:
        high = weight.detach().float()
        return layer.Stored((high, torch.zeros_like(high)), unpack)

    given = inputs_of(shape, rows, dtype)
    for half, names, weights in (
        (adapted_before, ADAPTED_BEFORE, ("q", "k", "v")),
        (adapted_after, ADAPTED_AFTER, ("out", "gate", "up", "down")),
    ):
        leaves, plain = given.leaves(), given.leaves()
        for key in names if frozen else weights:
            if key not in MATRICES or key in weights:
                getattr(leaves, key).requires_grad_(False)
                getattr(plain, key).requires_grad_(False)
        for key in weights:
            setattr(leaves, key, stored(getattr(leaves, key)))
        made, expected = half(leaves, shape), half(plain, shape)
        assert all(map(torch.equal, made, expected))
        assert len(unpacked) == len(weights)
        assert not any(ref() is not None for ref in unpacked)
        loss_of(made).backward()
        loss_of(expected).backward()
        assert len(unpacked) == 2 * len(weights)
        unpacked.clear()
        trained = [key for key in names if getattr(plain, key).requires_grad]
        assert trained
        for key in trained:
            assert torch.equal(getattr(leaves, key).grad, getattr(plain, key).grad), key


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["small", "ragged", "large"])
def test_rows_read_where_they_lie_give_the_bits_of_gathered_ones(
    name: str, dtype: torch.dtype
) -> None:
    shape = SHAPES[name]
    given = inputs_of(shape, rows=300, dtype=dtype)
    chosen = torch.randperm(700, generator=torch.Generator().manual_seed(1))[:300]
    x, hidden, both = (torch.randn(700, width).to(dtype) for width in
                       (shape.width, shape.width, 2 * shape.inner))  # fmt: skip
    norm = (given.norm, 1e-5, shape.offset)
    of_before = [*(torch.randn_like(part) for part in before(given, shape)[:3]), given.residual]
    of_after = torch.randn_like(given.residual)

    def before_back(x: Tensor, rows: Tensor | None) -> list[Tensor | None]:
        return layer.before_backward(
            of_before, x, norm, (given.q, given.k, given.v), *angles(shape, 300, dtype), shape.head,
            [True] * 8, gpu.Sums([None] * 3), rows=rows,
        )  # fmt: skip

    def after_back(hidden: Tensor, both: Tensor, rows: Tensor | None) -> list[Tensor | None]:
        return layer.after_backward(
            of_after, given.attended, hidden, both, given.out,
            (given.second, 1e-5, shape.offset), given.gate, given.up, given.down, shape.tanh,
            [True] * 8, gpu.Sums([None] * 4), rows=rows,
        )  # fmt: skip

    pairs = [
        (before_back(x, chosen), before_back(x[chosen], None)),
        (after_back(hidden, both, chosen), after_back(hidden[chosen], both[chosen], None)),
    ]
    for got, expected in pairs:
        for one, other in zip(got, expected, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.tensor([0, 3]), "must be in .0, 3.; got 3"),
        (torch.tensor([0.0, 1.0]), "must be .count,. int64"),
        (torch.tensor([0]), "hidden must be .2, .*1 chosen rows"),
    ],
)
def test_rows_that_are_not_there_are_refused(rows: Tensor, message: str) -> None:
    shape = SHAPES["small"]
    given = inputs_of(shape, rows=2, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=message):
        layer.after_backward(
            given.residual, given.attended, torch.zeros(3, shape.width),
            torch.zeros(3, 2 * shape.inner), given.out, (given.second, 1e-5, shape.offset),
            given.gate, given.up, given.down, shape.tanh, [True] * 8,
            gpu.Sums([None] * 4), rows=rows,
        )  # fmt: skip


def test_adapters_of_another_shape_are_refused() -> None:
    shape = SHAPES["grouped"]
    given = inputs_of(shape, 5, torch.float32)
    given.b_q = given.b_q[:-1]
    with pytest.raises(RuntimeError, match="adapter must be"):
        adapted_before(given, shape)
    given.b_down = given.b_down.bfloat16()
    with pytest.raises(RuntimeError, match="adapter must be"):
        adapted_after(given, shape)


@half_of_layer
def test_a_layer_without_rows(half: Half, slowly: Half, names: tuple[str, ...]) -> None:
    shape = SHAPES["grouped"]
    given = inputs_of(shape, 0, torch.float32).leaves()
    for got, want in zip(half(given, shape), slowly(given, shape), strict=True):
        assert got.shape == want.shape


@half_of_layer
def test_second_derivatives_and_wrong_shapes_are_refused(
    half: Half, slowly: Half, names: tuple[str, ...]
) -> None:
    shape = SHAPES["grouped"]
    given = inputs_of(shape, 5, torch.float32).leaves()
    with pytest.raises(RuntimeError, match="must be differentiated once"):
        torch.autograd.grad(loss_of(half(given, shape)), [given.norm, given.second],
                            create_graph=True, allow_unused=True)  # fmt: skip
    given.q, given.gate = given.q[:, 1:], given.gate[:, 1:]
    with pytest.raises(RuntimeError, match="weights must be"):
        half(given, shape)
