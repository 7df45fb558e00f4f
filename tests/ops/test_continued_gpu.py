"""Prompts in parts over paged memory, in one kernel: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tandem.ops import attention, continued_gpu, gpu, native
from tandem.ops.attention import _one_sequence
from tandem.ops.attention_context import (
    AttentionSpec,
    Before,
    KVMemory,
    LayerShape,
    Packed,
    attending,
)
from tests.ops.test_paged_gpu import DEVICE, kernels

pytestmark = [
    kernels,
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
# Sequences that go on, begin, have nothing new, end with a block; new tokens over several tiles.
LENGTHS, STARTS = (70, 20, 48, 64, 33), (48, 0, 48, 16, 32)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(gpu, "fuses", lambda x: True)
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "widths", "rule"),
    [
        ((4, 2), (16, 16), (0, 2.0)),
        ((3, 1), (20, 20), (0, 0.0)),
        ((4, 4), (24, 40), (7, 0.0)),
        ((8, 2), (16, 16), (33, 1.5)),
    ],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_parts_of_prompts(
    heads: tuple[int, int], widths: tuple[int, int], rule: tuple[int, float], sinks: bool,
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Memory that nobody has written is NaN; each sequence alone and whole is the reference."""
    monkeypatch.setattr(continued_gpu, "part_tiles", lambda *_: (16, 4))
    monkeypatch.setattr(attention, "_varlen_kernel_fits", lambda *_: False)
    window, softcap = rule
    weights = torch.randn(heads[0]) if sinks else None
    kind = AttentionSpec(widths[0] ** -0.5, window, softcap, weights)
    rows = [
        tuple(torch.randn(n, h, w).to(dtype) for h, w in
              ((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1])))
        for n in LENGTHS
    ]  # fmt: skip
    shape = LayerShape(heads[1], *widths)
    memory = KVMemory([shape], 30, dtype=dtype, device=torch.device("meta"))
    memory.layers = [
        tuple(torch.full(t.shape, torch.nan, dtype=dtype) for t in layer)  # type: ignore[misc]
        for layer in memory.layers
    ]
    tables = torch.randperm(30)[:25].view(5, 5).int()
    counts = [length - start for length, start in zip(LENGTHS, STARTS, strict=True)]
    keep = ([k[:n] for (_, k, _), n in zip(rows, STARTS, strict=True)],
            [v[:n] for (*_, v), n in zip(rows, STARTS, strict=True)])  # fmt: skip
    old = Packed.of_lengths(STARTS, DEVICE)
    attention.store_kv(*(torch.cat(x) for x in keep), memory, 0, tables, old.cu_seqlens)
    before = Before(tables, STARTS, counts, DEVICE)
    ends = Packed.of_lengths(counts, DEVICE).cu_seqlens
    step = Packed(ends, max(LENGTHS), memory, before.tables_of_new(), before=before)
    new = [torch.cat([row[i][n:] for row, n in zip(rows, STARTS, strict=True)]) for i in range(3)]
    with attending(step):
        found = attention.attend(0, *new, kind)
    wanted = [_one_sequence(*row, kind)[n:] for row, n in zip(rows, STARTS, strict=True)]
    assert before._written_out is None, "keys and values are read where they lie"
    assert found.shape == (sum(counts), heads[0], widths[1])
    assert torch.allclose(found, torch.cat(wanted), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_no_queries_give_no_rows() -> None:
    q = torch.randn(0, 2, 16)
    keys = torch.randn(4, 16, 1, 16)
    before = Before(torch.zeros(1, 4, dtype=torch.int32), [16], [0], DEVICE)
    ends = torch.zeros(2, dtype=torch.int32)
    kind = AttentionSpec(0.3, softcap=2.0)
    made = continued_gpu.continued_attention_gpu(q, keys, keys, ends, before, kind)
    assert made.shape == (0, 2, 16)
