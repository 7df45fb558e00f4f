"""The vectors of the C++ operations against torch and plain loops, for registers of every width."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from tests.ops.processors import (
    EMULATED_AVX512,
    EMULATED_PAIRS,
    at,
    built,
    named,
    needs_compiler,
    runs_here,
)

# This machine's own registers, of 4 numbers, of 8 and of 16.
MARCHES = [
    pytest.param(march, id=named(march))
    for march in sorted(
        {"native", "x86-64-v2", "x86-64-v3", "x86-64-v4", EMULATED_AVX512, EMULATED_PAIRS}
        & set(runs_here())
    )
]

pytestmark = needs_compiler


def numbers(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def made(march: str, name: str, *given: Tensor, rows: int = 1) -> Tensor:
    """What a function of vectors.cpp writes: (rows, 16) floats."""
    out = torch.full((rows, 16), float("nan"))
    getattr(built(march, "vectors.cpp"), name)(*(at(t) for t in given), at(out))
    return out


@pytest.mark.parametrize("march", MARCHES)
def test_lanes_move_where_they_should(march: str) -> None:
    library = built(march, "vectors.cpp")
    expected = {"x86-64-v2": 4, "x86-64-v3": 8, EMULATED_AVX512: 16, EMULATED_PAIRS: 16}
    assert library.register_floats() == expected.get(march, library.register_floats())
    x = numbers(16, 16)
    assert torch.equal(made(march, "square_turned", x, rows=16), x.t())
    halves = torch.cat([x[:8, :8].t(), x[:8, 8:].t()], 1)
    assert torch.equal(made(march, "eights_turned", x, rows=8), halves)
    wide = numbers(16, 21)
    four = torch.empty(4, 16)
    library.four_turned(at(wide), ctypes.c_int64(21), at(four))
    assert torch.equal(four, wide[:, :4].t())
    woven = made(march, "woven", x, rows=2)
    assert torch.equal(woven.flatten(), x[:2].t().flatten())
    assert torch.equal(made(march, "unwoven", woven, rows=2), x[:2])
    assert torch.equal(made(march, "swapped", x)[0], x[0].view(2, 2, 4).flip(1).flatten())
    assert torch.equal(made(march, "two_of", x)[0], x[0, 6:8].repeat_interleave(8))


@pytest.mark.parametrize("march", MARCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_vector_touches_nothing_else(march: str, dtype: torch.dtype) -> None:
    library, half = built(march, "vectors.cpp"), dtype == torch.bfloat16
    x = numbers(40).to(dtype)
    for count in range(1, 16):
        for first in (0, 3):
            out = torch.full((40,), 7.0, dtype=dtype)
            library.some(half, at(x[first:]), count, at(out[5:]))
            assert torch.equal(out[5 : 5 + count], x[first : first + count])
            assert (out[:5] == 7).all()
            assert (out[5 + count :] == 7).all()
        loaded = torch.full((16,), float("nan"))
        library.past_the_end(half, at(x), count, at(loaded))
        assert torch.equal(loaded[:count], x[:count].float())
        assert (loaded[count:] == 0).all()


@pytest.mark.parametrize("march", MARCHES)
def test_bfloat16_is_rounded_as_torch_rounds_it(march: str) -> None:
    library = built(march, "vectors.cpp")
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], dtype=torch.int32)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-30, 3.4e38])
    x = torch.cat([ties.view(torch.float32), special, numbers(5)])
    found, back = torch.empty(16, dtype=torch.bfloat16), torch.empty(16)
    library.narrowed(at(x), at(found))
    number = ~x.isnan()
    bits = found.view(torch.int16)
    assert torch.equal(bits[number], x.bfloat16().view(torch.int16)[number])
    assert found[~number].isnan().all()
    library.widened(at(found), at(back))
    assert torch.equal(back[number], found.float()[number])
    assert back[~number].isnan().all()
    exact = torch.empty(16, dtype=torch.bfloat16)
    library.kept_bits(at(found), at(exact))
    assert torch.equal(exact.view(torch.int16), bits)
    both = numbers(32).bfloat16()
    assert torch.equal(made(march, "pairs", both, rows=2), both.float().view(16, 2).t())


@pytest.mark.parametrize("march", MARCHES)
def test_subnormal_numbers_are_rounded_as_torch_rounds_them(march: str) -> None:
    every_sign = [0x00000001, 0x00008000, 0x00008001, 0x00018000, 0x003FFFFF, 0x007F7FFF]
    largest, smallest = [0x007F8000, 0x007FFFFF], [0x00800000, 0x7F800000]
    signed = torch.tensor([*every_sign, *largest], dtype=torch.int32)
    for last in (smallest, [-0x00800000, 0x7FC00000]):  # infinity below, a quiet NaN
        words = torch.cat([signed[:7], signed[1:] | -0x80000000, torch.tensor(last).int()])
        x = words.view(torch.float32)
        for count in (16, 11):
            found = torch.full((16,), 7.0, dtype=torch.bfloat16)
            built(march, "vectors.cpp").all_narrowed(at(x), count, at(found))
            expected = torch.cat([x[:count].bfloat16(), torch.full((16 - count,), 7.0).bfloat16()])
            number = ~expected.isnan()
            bits = found.view(torch.int16)
            assert torch.equal(bits[number], expected.view(torch.int16)[number])
            assert found[~number].isnan().all()


@pytest.mark.parametrize("march", MARCHES)
def test_comparisons_take_the_second_number_where_one_is_none(march: str) -> None:
    a, b = numbers(2, 16)
    a[3], b[7], a[9], b[9] = (float("nan"),) * 4
    for name, better in (("larger", a > b), ("smaller", a < b)):
        expected = torch.where(better, a, b)
        found = made(march, name, a, b)[0]
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), name
    for count in range(17):
        out = torch.empty(16)
        built(march, "vectors.cpp").first_of_a(at(a), at(b), count, at(out))
        chosen = torch.cat([a[:count], b[count:]])
        assert torch.equal(out.view(torch.int32), chosen.view(torch.int32))


@pytest.mark.parametrize("march", MARCHES)
def test_functions_and_sums_are_near_the_exact_ones(march: str) -> None:
    library = built(march, "vectors.cpp")
    for name, function, ulps in (("power", torch.exp, 2), ("bent", torch.tanh, 4)):
        for x in (torch.linspace(-87, 88, 16), numbers(16) * 0.1, numbers(16)):
            found = made(march, name, x)[0].double()
            error = (found - function(x.double())).abs() / function(x.double()).abs()
            assert error.max() < ulps * 2**-23, name
    far = torch.tensor([-1e30, -100.0, 200.0, float("nan"), 0.0, *[1.0] * 11])
    found = made(march, "power", far)[0]
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2].isfinite()
    assert found[3].isnan()
    assert found[4] == 1
    x = numbers(16)
    library.total.restype = library.top.restype = ctypes.c_float
    library.total_as_doubles.restype = ctypes.c_double
    order = x.clone()
    while len(order) > 1:  # lane i and i + 8, then + 4, + 2, + 1
        order = order[: len(order) // 2] + order[len(order) // 2 :]
    assert library.total(at(x)) == order.item()
    assert library.top(at(x)) == x.max().item()
    assert library.total_as_doubles(at(x)) == pytest.approx(x.double().sum().item(), rel=1e-15)
