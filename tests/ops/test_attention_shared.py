"""The C++ attention of sequences that begin alike gives the bits of each sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.ops import native
from tandem.ops.attention_context import Packed

from .test_attention_native import CASES, Case, Inputs, Paged, inputs, varlen

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not() or "available")


def with_prefixes(x: Inputs, case: Case, lengths: Sequence[int], prefixes: Sequence[int]) -> Tensor:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    out: Tensor = torch.ops.tandem.varlen_attention(
        x.q, x.k, x.v, bounds, case.scale, case.window, case.softcap, x.sinks,
        torch.tensor(prefixes).int(),
    )  # fmt: skip
    return out


SHARED = {
    "responses": ((35, 1, 20, 3, 16, 16, 5), (-1, 0, 0, 0, -1, 4, -1)),
    # Of the first, 1 and 7 continue 0; 2 and 5 continue 1, 3 and 4 continue 2, 6 continues 5.
    "of beginnings": ((32, 3, 2, 21, 5, 30, 17, 16, 1), (-1, 0, 1, 2, 2, 1, 5, 0, -1)),
    # So many tokens that the backward divides what continues 0 after 3 and after 6.
    "by pieces": ((21, 700, 30, 330, 600, 430, 5, 3), (-1, 0, 1, 0, 0, 0, 5, 0)),
}
"""Lengths of segments, and the segment that each continues."""


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("name", "shared_by"),
    [
        *((name, shared_by) for name in CASES for shared_by in ("responses", "of beginnings")),
        *((name, "by pieces") for name in ("narrow window", "odd", "sinks")),
    ],
)
def test_a_shared_prefix_gives_the_bits_of_whole_sequences(
    name: str, shared_by: str, count: int, threads: Callable[[int], None]
) -> None:
    case = CASES[name]
    lengths, prefixes = SHARED[shared_by]
    x = inputs(case, lengths)
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    whole = Packed.of_lengths(lengths, x.q.device, prefixes).whole()
    written_out = [t[whole.tokens] for t in leaves]
    threads(count)
    shared = with_prefixes(replace_rows(x, leaves), case, lengths, prefixes)
    gradients = torch.autograd.grad(shared.square().sum(), leaves)
    alone = varlen(replace(replace_rows(x, written_out), cu_seqlens=whole.packed.cu_seqlens), case)[
        whole.back
    ]
    expected = torch.autograd.grad(alone.square().sum(), leaves)
    assert torch.equal(shared, alone)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert float((ours - theirs).norm()) <= 1e-6 * float(theirs.norm())


def replace_rows(x: Inputs, rows: Sequence[Tensor]) -> Inputs:
    q, k, v = rows
    return replace(x, q=q, k=k, v=v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_samples_of_a_prompt_decode_the_bits_of_each_alone(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    lengths = (61, 49, 33, 62, 70, 20, 64)
    x = inputs(case, lengths, dtype)
    paged = Paged.of(case, lengths, dtype)
    torch.ops.tandem.store_kv(x.k, x.v, paged.k, paged.v, paged.tables, x.cu_seqlens)
    # Rows 0, 2, 3 and 6 begin with the blocks of row 0 and go on in their own.
    for row in (2, 3, 6):
        paged.tables[row, :2] = paged.tables[0, :2]
    at = [length - 1 for length in lengths]
    rows = list(range(len(lengths)))
    together = paged.decode(x, case, rows, at)
    again = paged.decode(x, case, rows[::-1] * 4, at[::-1] * 4)
    alone = torch.cat([paged.decode(x, case, [row], [at[row]]) for row in rows])
    assert bool(together.isfinite().all())
    assert torch.equal(together, alone)
    assert torch.equal(again.view(4, *alone.shape).flip(1), alone.expand(4, *alone.shape))


def test_a_continuation_elsewhere_than_after_its_sequence() -> None:
    case = next(iter(CASES.values()))
    x = inputs(case, (3, 4, 2))
    with pytest.raises(RuntimeError, match="directly after its sequence; got prefix 0"):
        with_prefixes(x, case, (3, 4, 2), (-1, -1, 0))
    x = inputs(case, (3, 4, 2, 1))
    for prefix in (1, 3, 4):
        with pytest.raises(RuntimeError, match=f"got prefix {prefix} of segment 3"):
            with_prefixes(x, case, (3, 4, 2, 1), (-1, 0, 0, prefix))
