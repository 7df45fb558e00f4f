"""The C++ attention against a slow loop, and against itself by every other road, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tandem.ops import native
from tandem.ops.attention_context import BLOCK_TOKENS

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not() or "available")

LENGTHS = (1, 15, 16, 17, 100, 4)


@dataclass(frozen=True)
class Case:
    query_heads: int
    heads: int
    key_width: int
    value_width: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def scale(self) -> float:
        return float(self.key_width**-0.5)


CASES = {
    "narrow": Case(8, 4, 8, 8),
    "16": Case(4, 4, 16, 16),
    "odd": Case(3, 1, 20, 20),
    "below 8": Case(2, 2, 5, 3),
    "32": Case(6, 6, 32, 32),
    "window": Case(4, 2, 32, 32, window=7),
    "window of blocks": Case(2, 1, 64, 64, window=33),
    "narrow window": Case(4, 2, 8, 8, window=20),
    "softcap": Case(4, 2, 16, 16, softcap=2.0),
    "softcap and window": Case(4, 2, 64, 64, softcap=1.5, window=18),
    "sinks": Case(4, 2, 64, 64, sinks=True),
    "sinks, softcap, window": Case(4, 4, 8, 8, window=5, softcap=3.0, sinks=True),
    "five queries to a key": Case(5, 1, 80, 80),
    "latent": Case(2, 2, 192, 128),
    "latent, odd": Case(2, 2, 24, 40),
    "96": Case(2, 1, 96, 96),
    "128": Case(7, 1, 128, 128),
    "256": Case(1, 1, 256, 256),
}


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    sinks: Tensor | None


def inputs(
    case: Case, lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.float32
) -> Inputs:
    N = sum(lengths)
    width = case.query_heads * case.key_width + case.heads * (case.key_width + case.value_width)
    # One projection's output, as a fused layer gives it: rows are far apart.
    together = (torch.randn(N, width) * 1.5).to(dtype)
    q, k, v = together.split(
        [
            case.query_heads * case.key_width,
            case.heads * case.key_width,
            case.heads * case.value_width,
        ],
        dim=-1,
    )
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return Inputs(
        q.unflatten(-1, (case.query_heads, -1)),
        k.unflatten(-1, (case.heads, -1)),
        v.unflatten(-1, (case.heads, -1)),
        bounds,
        torch.randn(case.query_heads) if case.sinks else None,
    )


def varlen(x: Inputs, case: Case) -> Tensor:
    out: Tensor = torch.ops.tandem.varlen_attention(
        x.q, x.k, x.v, x.cu_seqlens, case.scale, case.window, case.softcap, x.sinks
    )
    return out


def slow(q: Tensor, k: Tensor, v: Tensor, x: Inputs, case: Case, sinks: Tensor | None) -> Tensor:
    """Query by query, head by head, from the definition."""
    rows = []
    for begin, end in pairwise(x.cu_seqlens.tolist()):
        for t in range(begin, end):
            first = max(begin, t - case.window + 1) if case.window else begin
            heads = []
            for h in range(case.query_heads):
                g = h // (case.query_heads // case.heads)
                scores = (k[first : t + 1, g] @ q[t, h]) * case.scale
                if case.softcap:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h : h + 1]])
                weights = scores.softmax(0)[: t + 1 - first]
                heads.append(weights @ v[first : t + 1, g])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@dataclass
class Paged:
    """Memory full of NaN, with the blocks of B sequences scattered over it."""

    k: Tensor
    v: Tensor
    tables: Tensor

    @staticmethod
    def of(case: Case, lengths: tuple[int, ...], dtype: torch.dtype) -> Paged:
        per_row = max(-(-length // BLOCK_TOKENS) for length in lengths)
        blocks = per_row * len(lengths) + 3
        k = torch.full((blocks, case.heads, case.key_width, BLOCK_TOKENS), torch.nan, dtype=dtype)
        v = torch.full((blocks, case.heads, BLOCK_TOKENS, case.value_width), torch.nan, dtype=dtype)
        order = torch.randperm(blocks)[: per_row * len(lengths)]
        return Paged(k, v, order.int().view(len(lengths), per_row))

    def decode(self, x: Inputs, case: Case, rows: list[int], positions: list[int]) -> Tensor:
        """The tokens at `positions` of the sequences `rows`, together."""
        at = x.cu_seqlens[rows].long() + torch.tensor(positions)
        out: Tensor = torch.ops.tandem.paged_attention(
            x.q[at], x.k[at], x.v[at], self.k, self.v, self.tables[rows],
            torch.tensor(positions), case.scale, case.window, case.softcap, x.sinks,
        )  # fmt: skip
        return out


@pytest.mark.parametrize("name", CASES)
def test_forward_is_the_definition(name: str) -> None:
    case = CASES[name]
    x = inputs(case)
    sinks = None if x.sinks is None else x.sinks.double()
    expected = slow(x.q.double(), x.k.double(), x.v.double(), x, case, sinks)
    out = varlen(x, case)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=1e-5)


def test_bfloat16_forward_rounds_once() -> None:
    case = CASES["sinks"]
    x = inputs(case, dtype=torch.bfloat16)
    wide = Inputs(x.q.float(), x.k.float(), x.v.float(), x.cu_seqlens, x.sinks)
    assert torch.equal(varlen(x, case), varlen(wide, case).bfloat16())


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_definitions(name: str) -> None:
    case = CASES[name]
    x = inputs(case, lengths=(1, 17, 40, 16))
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    sinks = None if x.sinks is None else x.sinks.clone().requires_grad_()
    sinks64 = None if sinks is None else sinks.detach().double().requires_grad_()
    upstream = torch.randn(x.q.shape[0], case.value_width, case.query_heads).transpose(1, 2)
    q, k, v = leaves
    varlen(Inputs(q, k, v, x.cu_seqlens, sinks), case).backward(upstream)
    q, k, v = doubles
    slow(q, k, v, x, case, sinks64).backward(upstream.double())
    ours, theirs = [*leaves], [*doubles]
    if sinks is not None and sinks64 is not None:
        ours, theirs = [*ours, sinks], [*theirs, sinks64]
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


def test_bfloat16_gradients_are_close() -> None:
    case = CASES["32"]
    x = inputs(case, dtype=torch.bfloat16)
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    wide = [t.detach().float().requires_grad_() for t in leaves]
    upstream = torch.randn(x.q.shape[0], case.query_heads, case.value_width).bfloat16()
    for (q, k, v), grad in ((leaves, upstream), (wide, upstream.float())):
        varlen(Inputs(q, k, v, x.cu_seqlens, None), case).backward(grad)
    for a, b in zip(leaves, wide, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.dtype == torch.bfloat16
        error = (a.grad.float() - b.grad).norm() / b.grad.norm()
        assert error < 5e-3


def test_training_forward_is_the_forward_without_gradient() -> None:
    case = CASES["softcap and window"]
    x = inputs(case)
    learned = replace(x, q=x.q.detach().requires_grad_())
    assert torch.equal(varlen(learned, case).detach(), varlen(x, case))
    with torch.inference_mode():
        assert torch.equal(varlen(x, case), varlen(x, case).clone())


def test_differentiating_twice_is_refused() -> None:
    case = CASES["16"]
    x = inputs(case, lengths=(4,))
    q = x.q.detach().requires_grad_()
    out = varlen(replace(x, q=q), case)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def asked_patterns(tokens: int, lengths: tuple[int, ...]) -> list[Tensor]:
    """Each sequence's last token, some here and there, all from the middle on, and none."""
    ends = torch.tensor(lengths).cumsum(0) - 1
    chosen = torch.rand(tokens) < 0.4
    chosen[ends[3] - 20 : ends[3]] = True
    none = torch.empty(0, dtype=torch.int64)
    return [ends, chosen.nonzero()[:, 0], torch.arange(tokens // 2, tokens), none]


def of_some(x: Inputs, case: Case, asked: Tensor, prefixes: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.tandem.varlen_attention(
        x.q, x.k, x.v, x.cu_seqlens, case.scale, case.window, case.softcap, x.sinks, prefixes, asked
    )
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefixes", [None, (-1, -1, 1, 1, -1, 4)])
@pytest.mark.parametrize("name", CASES)
def test_queries_of_some_tokens_have_the_bits_of_all(
    name: str, prefixes: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    case = CASES[name]
    x = inputs(case, dtype=dtype)
    shared = None if prefixes is None else torch.tensor(prefixes, dtype=torch.int32)
    everyone = torch.arange(len(x.q))
    whole = of_some(x, case, everyone, shared)
    for asked in asked_patterns(len(x.q), LENGTHS):
        some = replace(x, q=x.q[asked])
        assert torch.equal(of_some(some, case, asked, shared), whole[asked])

        # What a token nobody asks for gives to keys and values is exactly 0.
        upstream = torch.randn(len(asked), case.query_heads, case.value_width).to(dtype)
        spread = upstream.new_zeros(len(x.q), *upstream.shape[1:]).index_copy(0, asked, upstream)
        found = []
        for given, of, pull in ((x, everyone, spread), (some, asked, upstream)):
            leaves = [t.detach().clone().requires_grad_() for t in (given.q, given.k, given.v)]
            sinks = None if x.sinks is None else x.sinks.clone().requires_grad_()
            all_of = [*leaves, *([] if sinks is None else [sinks])]
            out = of_some(Inputs(*leaves, x.cu_seqlens, sinks), case, of, shared)
            found.append(torch.autograd.grad(out, all_of, pull))
        (all_q, *all_others), (some_q, *some_others) = found
        assert torch.equal(some_q, all_q[asked])
        assert all(map(torch.equal, some_others, all_others))


def test_tokens_asked_for_that_attention_refuses() -> None:
    case = CASES["16"]
    x = inputs(case, lengths=(4,))
    for asked in ([0, 1], [2, 2, 3], [1, 2, 4], [-1, 0, 1]):
        with pytest.raises(RuntimeError, match="asked must"):
            of_some(replace(x, q=x.q[:3]), case, torch.tensor(asked))
    with pytest.raises(RuntimeError, match="asked must be contiguous int64"):
        of_some(replace(x, q=x.q[:1]), case, torch.tensor([1], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_decoding_token_by_token_is_the_forward_to_the_bit(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    x = inputs(case, dtype=dtype)
    whole = varlen(x, case)
    paged = Paged.of(case, LENGTHS, dtype)
    for t in range(max(LENGTHS)):
        rows = [b for b, length in enumerate(LENGTHS) if t < length]
        out = paged.decode(x, case, rows, [t] * len(rows))
        assert torch.equal(out, whole[x.cu_seqlens[rows].long() + t]), t


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_decoding_after_prefill_is_the_forward_to_the_bit(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    x = inputs(case, dtype=dtype)
    whole = varlen(x, case)
    paged = Paged.of(case, LENGTHS, dtype)
    torch.ops.tandem.store_kv(x.k, x.v, paged.k, paged.v, paged.tables, x.cu_seqlens)
    last = [length - 1 for length in LENGTHS]
    # The last token is stored by decode itself, whatever prefill left in its place.
    out = paged.decode(x, case, list(range(len(LENGTHS))), last)
    assert torch.equal(out, whole[x.cu_seqlens[1:].long() - 1])


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_value_that_is_no_number_reaches_the_tokens_that_see_it_alone(
    name: str, dtype: torch.dtype, broken: float
) -> None:
    case, length, at = CASES[name], 60, 21  # amid a tile of queries, and a block of keys
    x = inputs(case, (length,), dtype)
    leaves = [replace(x, q=x.q.detach().clone().requires_grad_()) for _ in range(2)]
    upstream = torch.randn(at, case.query_heads, case.value_width).to(dtype)
    whole = varlen(leaves[0], case)
    (pull,) = torch.autograd.grad(whole[:at], leaves[0].q, upstream)
    x.v[at, :, -1] = broken
    out = varlen(leaves[1], case)
    sees = torch.arange(length) >= at
    if case.window:
        sees[at + case.window :] = False
    assert torch.equal(out[~sees], whole[~sees])
    assert not bool(out[sees, :, -1].isfinite().any())
    assert torch.equal(out[sees, :, :-1], whole[sees, :, :-1])
    (got,) = torch.autograd.grad(out[:at], leaves[1].q, upstream)
    assert torch.equal(got[:at], pull[:at])
    paged = Paged.of(case, (length,), dtype)
    for t in range(length):
        made = paged.decode(x, case, [0], [t])
        assert torch.equal(made.nan_to_num(7.0), out[t : t + 1].nan_to_num(7.0)), t


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_tokens_of_one_sequence_run_at_once_are_those_one_by_one(
    name: str, dtype: torch.dtype, count: int, threads: Callable[[int], None]
) -> None:
    case, lengths = CASES[name], (60, 47, 60, 60)
    x = inputs(case, lengths, dtype)
    whole = varlen(x, case)
    paged = Paged.of(case, lengths, dtype)
    torch.ops.tandem.store_kv(x.k, x.v, paged.k, paged.v, paged.tables, x.cu_seqlens)
    for b, length in enumerate(lengths):  # what memory holds of tokens to come is a wrong guess's
        for t in range(10, length):
            block, place = int(paged.tables[b, t // BLOCK_TOKENS]), t % BLOCK_TOKENS
            paged.k[block, :, :, place] = 3.0
            paged.v[block, :, place] = -2.0
    threads(count)
    done = [10] * len(lengths)
    steps = [(1, 6, 2, 9), (16, 1, 1, 23), (33, 30, 47, 1), (0, 0, 0, 17)]
    for ahead in steps:
        rows = [b for b, n in enumerate(ahead) for _ in range(n)]
        places = [done[b] + i for b, n in enumerate(ahead) for i in range(n)]
        at = x.cu_seqlens[rows].long() + torch.tensor(places)
        assert torch.equal(paged.decode(x, case, rows, places), whole[at])
        done = [a + b for a, b in zip(done, ahead, strict=True)]
    assert tuple(done) == lengths


def test_stored_numbers_are_the_ones_given() -> None:
    case = Case(2, 2, 20, 24)
    x = inputs(case, dtype=torch.bfloat16)
    x.k[0, 0, 0] = 1e-40  # a subnormal number, which rounding instructions may flush to zero
    paged = Paged.of(case, LENGTHS, torch.bfloat16)
    torch.ops.tandem.store_kv(x.k, x.v, paged.k, paged.v, paged.tables, x.cu_seqlens)
    for b, (begin, end) in enumerate(pairwise(x.cu_seqlens.tolist())):
        for t in range(end - begin):
            block, place = int(paged.tables[b, t // BLOCK_TOKENS]), t % BLOCK_TOKENS
            assert torch.equal(paged.k[block, :, :, place], x.k[begin + t])
            assert torch.equal(paged.v[block, :, place], x.v[begin + t])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_sequence_alone_is_the_same_as_in_a_batch(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    x = inputs(case, dtype=dtype)
    whole = varlen(x, case)
    paged = Paged.of(case, LENGTHS, dtype)
    torch.ops.tandem.store_kv(x.k, x.v, paged.k, paged.v, paged.tables, x.cu_seqlens)
    for b, (begin, end) in enumerate(pairwise(x.cu_seqlens.tolist())):
        one = torch.tensor([0, end - begin], dtype=torch.int32)
        alone = Inputs(x.q[begin:end], x.k[begin:end], x.v[begin:end], one, x.sinks)
        assert torch.equal(varlen(alone, case), whole[begin:end])
        assert torch.equal(paged.decode(x, case, [b], [end - begin - 1])[0], whole[end - 1])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("name", "dtype"), [("32", torch.float32), ("128", torch.bfloat16)])
def test_many_sequences_have_the_gradients_of_each_alone(
    name: str, dtype: torch.dtype, count: int, threads: Callable[[int], None]
) -> None:
    # Together they are more than the second cache holds, so rows are fetched ahead; not alone.
    case, lengths = CASES[name], (300, 5, 0, 1, 200)
    x = inputs(case, lengths, dtype)
    assert 300 * 2304 < 2**20 < sum(lengths) * x.q.stride(0) * dtype.itemsize == 506 * 2304

    def run(begin: int, end: int, bounds: Tensor) -> list[Tensor]:
        leaves = [t[begin:end].detach().requires_grad_() for t in (x.q, x.k, x.v)]
        out = varlen(Inputs(*leaves, bounds, None), case)
        return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]

    threads(count)
    whole = run(0, sum(lengths), x.cu_seqlens)
    for begin, end in pairwise(x.cu_seqlens.tolist()):
        alone = run(begin, end, torch.tensor([0, end - begin], dtype=torch.int32))
        for one, all_ in zip(alone, whole, strict=True):
            assert torch.equal(one, all_[begin:end])


@pytest.mark.parametrize("name", ["narrow", "sinks", "128", "window of blocks"])
def test_threads_do_not_change_a_bit(name: str, threads: Callable[[int], None]) -> None:
    case = CASES[name]
    lengths = (300, 5, 70, 1)
    x = inputs(case, lengths)
    results = []
    for count in (1, 2, 4):
        threads(count)
        q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        out = varlen(Inputs(q, k, v, x.cu_seqlens, x.sinks), case)
        out.backward(out.detach())
        paged = Paged.of(case, lengths, torch.float32)
        torch.ops.tandem.store_kv(x.k, x.v, paged.k, paged.v, paged.tables, x.cu_seqlens)
        rows = [0, 0, 1, 2, 3] * 8  # work enough for the threads to share
        decoded = paged.decode(x, case, rows, [299, 299, 4, 69, 0] * 8)
        results.append((out.detach(), q.grad, k.grad, v.grad, decoded))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)


def test_an_empty_batch_gives_nothing() -> None:
    case = CASES["16"]
    for lengths in ((), (0, 0)):
        x = inputs(case, lengths)
        q = x.q.detach().requires_grad_()
        out = varlen(replace(x, q=q), case)
        assert out.shape == (0, 4, 16)
        out.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape
    paged = Paged.of(case, (1,), torch.float32)
    paged.tables = paged.tables[:0]
    none = torch.ops.tandem.paged_attention(
        x.q, x.k, x.v, paged.k, paged.v, paged.tables, torch.empty(0, dtype=torch.long),
        1.0, 0, 0.0, None,
    )  # fmt: skip
    assert none.shape == (0, 4, 16)


def test_an_empty_sequence_among_others_changes_nothing() -> None:
    case = CASES["narrow"]
    x = inputs(case, (5, 0, 9, 0))
    dense = replace(x, cu_seqlens=torch.tensor([0, 5, 14], dtype=torch.int32))
    assert torch.equal(varlen(x, case), varlen(dense, case))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)}, "rise from 0"),
        ({"cu_seqlens": torch.tensor([0, 8])}, "int32"),
        ({"k": torch.zeros(8, 3, 16)}, "multiple of the key heads|get q"),
        ({"q": torch.zeros(8, 4, 16).double()}, "float32 or bfloat16"),
        ({"sinks": torch.zeros(3)}, "one number per query head"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    case = CASES["16"]
    with pytest.raises(RuntimeError, match=message):
        varlen(replace(inputs(case, (8,)), **change), case)


def test_blocks_that_are_not_there_are_refused() -> None:
    case = CASES["16"]
    x = inputs(case, (20,))
    paged = Paged.of(case, (20,), torch.float32)
    with pytest.raises(RuntimeError, match="a block for each"):
        torch.ops.tandem.paged_attention(
            x.q[:1], x.k[:1], x.v[:1], paged.k, paged.v, paged.tables, torch.tensor([32]),
            1.0, 0, 0.0, None,
        )  # fmt: skip
    paged.tables[0, 1] = 1000
    with pytest.raises(RuntimeError, match="blocks below"):
        paged.decode(x, case, [0], [19])
