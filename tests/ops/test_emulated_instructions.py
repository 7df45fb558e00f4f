"""What emulated_avx512.h writes out against the processor's own instructions, by bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem import processor
from tests.ops.processors import (
    EMULATED_AVX512,
    EMULATED_PAIRS,
    HAS_PAIRS,
    LEVELS,
    at,
    built,
    needs_compiler,
)

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        not LEVELS["x86-64-v4"] <= processor.features(), reason="no AVX-512 to compare with"
    ),
]

TINY = 2.0**-126
"""The smallest normal number of float32 and bfloat16."""


def both(name: str, out: Tensor, *given: Tensor | int) -> tuple[Tensor, Tensor]:
    """What an instruction writes over `out`, by the processor and by the emulation."""
    made = []
    pairs = name in ("narrow", "dot_pairs")
    for march in ("native", EMULATED_PAIRS if pairs else EMULATED_AVX512):
        library, to = built(march, "instructions.cpp"), out.clone()
        getattr(library, name)(*(at(x) if isinstance(x, Tensor) else x for x in given), at(to))
        made.append(to)
    return made[0], made[1]


def require_same(name: str, out: Tensor, *given: Tensor | int) -> None:
    own, emulated = both(name, out, *given)
    # By bits: the sign of a zero and what a NaN carries count.
    assert torch.equal(own.view(torch.int16), emulated.view(torch.int16)), (name, given)


def numbers(round: int) -> Tensor:
    """(16,) floats, among them what is special."""
    drawn = torch.Generator().manual_seed(round)
    x = torch.randn(16, generator=drawn) * 10.0 ** torch.randint(-3, 4, (16,), generator=drawn)
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), TINY, -TINY, TINY / 4, 3.3e38, 1.0]
    )
    which = torch.randint(0, len(special), (16,), generator=drawn)
    return torch.where(torch.rand(16, generator=drawn) < 0.3, special[which], x)


def bits(round: int, count: int = 16) -> Tensor:
    """(count,) integers of 32 bits, all of them random."""
    drawn = torch.Generator().manual_seed(round)
    return torch.randint(-(2**31), 2**31, (count,), generator=drawn, dtype=torch.int64).int()


FLOATS = torch.full((16,), 7.0)
HALVES = torch.full((16,), 7, dtype=torch.int16)


def test_parts_of_a_register() -> None:
    x = numbers(0)
    for mask in (0, 1, 0xFFFF, 0x7FFF, 0x5A5A, *(2**n - 1 for n in range(16))):
        require_same("load_some", FLOATS, mask, x)
        require_same("store_some", FLOATS, mask, x)
        require_same("load_some_halves", HALVES, mask, x)
        require_same("store_some_halves", HALVES, mask, x)
    require_same("of_quarters", FLOATS, x)


@pytest.mark.parametrize("round", range(8))
def test_numbers_and_integers(round: int) -> None:
    x, y, some = numbers(round), numbers(round + 99), bits(round)
    require_same("larger", FLOATS, x, y)
    require_same("smaller", FLOATS, x, y)
    require_same("looked_up", FLOATS, some, x)
    require_same("signed_bytes", FLOATS, some)
    require_same("bytes", FLOATS, some)
    require_same("halves", FLOATS, some)
    require_same("floats", FLOATS, some)
    require_same("lower_halves", HALVES, some)
    require_same("all", FLOATS, int(some[0]))
    for table in range(256):
        require_same("ternary", FLOATS, table, some, bits(round + 99), bits(round + 999))


@pytest.mark.skipif(not HAS_PAIRS, reason="no AVX512_BF16 to compare with")
@pytest.mark.parametrize("round", range(64))
def test_emulated_bfloat16_instructions_give_the_processors_bits(round: int) -> None:
    require_same("narrow", HALVES, numbers(round))
    # Half way between two numbers of bfloat16, and next to it.
    near = (bits(round) & ~0xFFFF) | torch.tensor([0x7FFF, 0x8000, 0x8001, 0x18000] * 4).int()
    require_same("narrow", HALVES, near.view(torch.float32))
    drawn = torch.Generator().manual_seed(round)
    sums = torch.randn(16, generator=drawn)
    a, b = (torch.randn(32, generator=drawn).bfloat16() for _ in range(2))
    require_same("dot_pairs", FLOATS, sums, a, b)
    # So small that numbers, products and sums are none of float32's normal ones.
    a, b = (x * 2.0 ** torch.randint(-100, -20, (32,), generator=drawn) for x in (a, b))
    require_same("dot_pairs", FLOATS, sums * TINY * 4, a, b)
    a, b = (torch.cat([numbers(seed), numbers(seed + 1)]) for seed in (round, round + 99))
    require_same("dot_pairs", FLOATS, numbers(round + 999), a.bfloat16(), b.bfloat16())
