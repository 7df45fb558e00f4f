"""Every instruction set that this machine runs: the same bits within one, rounding between them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor

from tandem import processor
from tandem.ops import native
from tandem.ops.blockwise import INT4, INT8, NF4, BlockCode, dequantize, quantize
from tests.ops.processors import (
    EMULATED_AMX,
    EMULATED_AVX512,
    HAS_AVX2,
    HAS_PAIRS,
    IS_X86,
    ROOT,
    built,
    compile_once,
    named,
    needs_compiler,
    runs_here,
)

CODES = [INT8, INT4, NF4, BlockCode("nf4", 18), BlockCode("int4", 70)]

# Where the pairs that the unit reads are, or are emulated.
WITH_AMX = [EMULATED_AMX] if HAS_PAIRS or HAS_AVX2 else []

# How a weight is read.
WAYS = AS_IT_LIES, PACKED, READY = 0, 1, 2

pytestmark = needs_compiler
needs_x86 = pytest.mark.skipif(not IS_X86, reason="not an x86 processor")


def on_the_matrix_unit(test: Callable[..., None]) -> Callable[..., None]:
    """Compiling the emulated unit takes a minute; every run compiles the real one's code."""
    reason = "no AVX512_BF16, whose layout of pairs the unit reads, nor AVX2 to emulate it"
    return pytest.mark.slow(pytest.mark.skipif(not WITH_AMX, reason=reason)(test))


def variants(*more: str) -> list[ParameterSet]:
    """One is quick enough for every run: not what this machine's own code is like."""
    quick = "x86-64-v3" if "avx512f" in processor.features() else EMULATED_AVX512
    return [
        pytest.param(march, id=named(march), marks=[] if march == quick else pytest.mark.slow)
        for march in [*runs_here(), *more]
    ]


def products(march: str) -> ctypes.CDLL:
    return built(march, "products.cpp", ("gemm", "coded", "products_amx", "tuning", "threads"))


def product(
    march: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    ahead: int,
    residual: Tensor | None = None,
    after: int = 0,
) -> Tensor:
    """ahead: one of WAYS. after: by how many numbers the result begins after a line."""
    library, half = products(march), x.dtype == torch.bfloat16
    (rows, inputs), outputs = x.shape, weight.shape[0]
    library.packed_floats.restype = ctypes.c_int64
    shape = [ctypes.c_int64(n) for n in (outputs, inputs)]
    packed = torch.empty(library.packed_floats(half, *shape, ahead))
    y = torch.empty(after + rows * outputs, dtype=x.dtype)[after:].view(rows, outputs)
    tensors = (x.contiguous(), weight, bias, residual, y, packed)
    pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]
    library.product(
        half, pointers[0], ctypes.c_int64(rows), *pointers[1:4], *shape, *pointers[4:], ahead
    )
    return y


def coded(
    march: str, x: Tensor, codes: Tensor, scales: Tensor, code: BlockCode, bias: Tensor
) -> Tensor:
    """x by a weight of codes and the bias."""
    function = products(march).coded
    function.restype = None
    y = torch.empty(len(x), len(bias), dtype=x.dtype)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, codes, scales, bias, y)]
    numbers = [ctypes.c_int64(n) for n in (len(x), code.number, code.block, len(bias), x.shape[1])]
    function(
        x.dtype == torch.bfloat16, pointers[0], numbers[0], *pointers[1:3],
        scales.dtype == torch.bfloat16, *numbers[1:3], pointers[3], *numbers[3:], pointers[4],
    )  # fmt: skip
    return y


def turned(march: str, a: Tensor, b: Tensor, y: Tensor, pieces: list[int], *, adds: bool) -> None:
    """y (pieces below one another) = a turned, by b, or that added."""
    function = products(march).turned
    function.restype = None
    shape = [ctypes.c_int64(n) for n in (len(a), a.shape[1], b.shape[1])]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, y)]
    rows = (ctypes.c_int64 * len(pieces))(*pieces)
    half = a.dtype == torch.bfloat16
    function(half, *pointers[:2], *shape, pointers[2], adds, rows, len(pieces))


def operands(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outputs)
    sizes = ((70, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return x, weight, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("march", variants())
def test_a_row_is_the_same_however_it_is_computed(
    march: str, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    check_rows(march, dtype, threads)


@on_the_matrix_unit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_on_the_matrix_unit(
    dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    assert uses_amx(EMULATED_AMX, dtype)
    check_rows(EMULATED_AMX, dtype, threads)


@pytest.mark.parametrize("march", variants(*WITH_AMX))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", [*CODES, BlockCode("nf4", 96)], ids=str)
def test_a_weight_of_codes_gives_the_bits_of_the_weight_that_they_stand_for(
    march: str, code: BlockCode, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    for outputs, inputs in ((70, 320), (5, 34), (33, 1230), (48, 1120), (130, 2200)):
        x, weight, bias = operands(outputs, inputs, dtype)
        if outputs > 5:  # of more than a block
            weight[3, 9] = float("inf")  # comes back as a block of NaN
        codes, scales = quantize(weight.view(-1), code)
        read = dequantize(codes, scales, weight.numel(), code, dtype).view(weight.shape)
        threads(1)
        want = product(march, x, read, bias, ahead=AS_IT_LIES)
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 20, 70):
            threads(1 + rows % 2)
            got = coded(march, x[:rows], codes, scales, code, bias)
            assert torch.equal(got.view(bits := {4: torch.int32, 2: torch.int16}[x.itemsize]),
                               want[:rows].view(bits)), (outputs, inputs, rows)  # fmt: skip
        exact = x.double() @ read.double().t() + bias.double()
        finite = exact.isfinite()
        assert finite.any()
        assert torch.equal(want.isfinite(), finite)
        error = (want.double() - exact)[finite].abs().max() / exact[finite].abs().max()
        assert error < (2**-7 if dtype == torch.bfloat16 else 1e-5)


@on_the_matrix_unit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_by_large_weights_are_the_same_on_the_matrix_unit(
    dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    # More rows than are copied at a time, sums that wait for the next part of k, panels of a large
    # weight, and the last tile of each not full.
    outputs, inputs, rows = 90, 2201, 300
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    threads(1)
    whole = product(EMULATED_AMX, x, weight, bias, ahead=AS_IT_LIES)
    exact = x.double() @ weight.double().t() + bias.double()
    error = (whole.double() - exact).abs().max() / exact.abs().max()
    assert error < (2**-8 if dtype == torch.bfloat16 else 1e-6)
    threads(2)
    for part in (slice(0, 1), slice(20, 37), slice(100, 140), slice(0, 300)):
        for ahead in WAYS:
            got = product(EMULATED_AMX, x[part], weight, bias, ahead=ahead)
            assert torch.equal(got, whole[part]), (part, ahead)


@on_the_matrix_unit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_results_are_those_of_their_parts_on_the_matrix_unit(
    dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    # Results of a MiB and more are written past the caches if their rows are whole lines.
    threads(2)
    generator = torch.Generator().manual_seed(0)
    for outputs, rows, adds in ((1024, 530, False), (1024, 530, True), (1000, 550, False)):
        x, weight, bias, residual = (
            torch.randn(size, generator=generator).to(dtype)
            for size in ((rows, 70), (outputs, 70), (outputs,), (rows, outputs))
        )
        bias = bias if adds else torch.empty(0, dtype=dtype)
        exact = x.double() @ weight.double().t()
        exact = exact + bias.double() + residual.double() if adds else exact
        slices = [slice(0, rows), *(slice(first, first + 77) for first in range(0, rows, 77))]
        for ahead in WAYS:
            whole, *parts = (
                product(
                    EMULATED_AMX,
                    x[part],
                    weight,
                    bias,
                    ahead=ahead,
                    residual=residual[part].contiguous() if adds else None,
                )
                for part in slices
            )
            assert torch.equal(whole, torch.cat(parts)), (outputs, ahead)
            if not adds:
                got = product(EMULATED_AMX, x, weight, bias, ahead=ahead, after=1)
                assert torch.equal(got, whole), (outputs, ahead)
            error = (whole.double() - exact).abs().max() / exact.abs().max()
            # The residual is added to a sum that is rounded before.
            assert error < (2**-7 if dtype == torch.bfloat16 else 1e-6)


@on_the_matrix_unit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(20, 40), (90, 2208)])
def test_no_rows_make_no_numbers_on_the_matrix_unit(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    x, weight, bias = operands(outputs, inputs, dtype)
    for ahead in WAYS:
        made = product(EMULATED_AMX, x[:0], weight, bias, ahead=ahead)
        assert made.shape == (0, outputs)


@on_the_matrix_unit
def test_float32_in_parts_is_closer_to_float64_than_a_sum_of_floats() -> None:
    x, weight, _ = operands(60, 700, torch.float32)
    x, weight = x * 10.0 ** torch.arange(-35, 35)[:, None].clamp(-12, 12), weight.exp()
    got = product(EMULATED_AMX, x, weight, torch.zeros(60), ahead=PACKED).double()
    slow = torch.zeros(70, 60)
    for k in range(700):
        slow += x[:, k, None] * weight[:, k]
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().t()
    ours, plain = ((y.double() - exact).abs() / size for y in (got, slow))
    assert ours.max() < 2**-22
    assert ours.max() < plain.max()
    assert ours.mean() < plain.mean() / 2


@on_the_matrix_unit
def test_what_is_no_number_stays_none_on_the_matrix_unit() -> None:
    x, weight, bias = operands(40, 70, torch.float32)
    x[1, 3], x[2, 69], weight[7, 5] = float("nan"), float("inf"), -float("nan")
    got = product(EMULATED_AMX, x, weight, bias, ahead=AS_IT_LIES)
    assert not got[1:3].isfinite().any()
    assert not got[:, 7].isfinite().any()
    others = [row for row in range(70) if row not in (1, 2)]
    columns = [column for column in range(40) if column != 7]
    assert got[others][:, columns].isfinite().all()


@on_the_matrix_unit
@pytest.mark.parametrize("tiny", [4.5207e-41, float.fromhex("0x1.00007ep-117")])
@pytest.mark.parametrize("ahead", WAYS)
def test_a_number_too_small_for_its_parts_does_no_harm(tiny: float, ahead: int) -> None:
    # Its last part is no bfloat16: unmasked, it would fill the other number of its word.
    x, weight = torch.ones(40, 6), torch.ones(5, 6)
    weight[:, 1::2] = tiny
    got = product(EMULATED_AMX, x, weight, torch.zeros(5), ahead=ahead)
    assert torch.equal(got, torch.full((40, 5), 3.0))
    turned = product(EMULATED_AMX, weight, x, torch.zeros(40), ahead=ahead)
    assert torch.equal(turned, torch.full((5, 40), 3.0))


@on_the_matrix_unit
def test_the_error_of_a_turned_product_does_not_grow_with_its_rows() -> None:
    rows = 16384
    a, b = (operands(n, rows, torch.float32)[1].abs().t().contiguous() for n in (3, 5))
    y = torch.zeros(3, 5)
    turned(EMULATED_AMX, a, b, y, [3], adds=False)
    exact = a.double().t() @ b.double()
    assert ((y.double() - exact).abs() / exact).max() < 2**-20


@on_the_matrix_unit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(2070, 33, 40), (64, 300, 64), (31, 17, 130), (1, 5, 3), (40, 530, 512), (700, 150, 136)],
)
def test_a_turned_product_on_the_matrix_unit_is_the_sum_over_rows(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    threads: Callable[[int], None],
) -> None:
    left, right = operands(outputs, rows, dtype)[1], operands(inputs, rows, dtype)[1]
    a, b = left.t().contiguous(), right.t().contiguous()
    exact = left.double() @ right.double().t()
    found = []
    for count in (1, 2):
        threads(count)
        # Beginning with a line, and between two.
        y = torch.full((outputs * inputs + 16,), float("nan"))[count - 1 :][: outputs * inputs]
        y = y.view(outputs, inputs)
        for adds in (False, True):  # twice the product
            turned(EMULATED_AMX, a, b, y, [outputs], adds=adds)
        torch.testing.assert_close(y.double(), 2 * exact, rtol=1e-5, atol=1e-5 * rows**0.5)
        found.append(y)
    assert torch.equal(*found), "the number of threads does not matter"


@pytest.mark.parametrize("march", variants(*WITH_AMX))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pieces", [[64, 64, 64], [128, 32, 32], [352, 352], [24, 40, 8], [300, 7]])
@pytest.mark.parametrize(
    ("rows", "inputs"), [(256, 128), (600, 128), (70, 300), (90, 24), (1, 16), (1333, 67)]
)
def test_sums_in_several_places_are_those_of_each(
    march: str,
    pieces: list[int],
    rows: int,
    inputs: int,
    dtype: torch.dtype,
    threads: Callable[[int], None],
) -> None:
    left, b = operands(rows, sum(pieces), dtype)[1], operands(rows, inputs, dtype)[1]
    exact = left.double().t() @ b.double()
    found = []
    for count in (1, 2):
        threads(count)
        y = torch.full((sum(pieces), inputs), float("nan"))
        for adds in (False, True):
            turned(march, left, b, y, pieces, adds=adds)
        torch.testing.assert_close(y.double(), 2 * exact, rtol=1e-5, atol=1e-5 * rows**0.5)
        found.append(y)
    assert torch.equal(*found), "the number of threads does not matter"


def test_without_a_matrix_unit_products_do_not_use_one() -> None:
    if "amx_bf16" in processor.features():
        pytest.skip("this processor has one")
    assert not uses_amx("native", torch.bfloat16)
    assert not uses_amx("native", torch.float32)


def uses_amx(march: str, dtype: torch.dtype) -> bool:
    answer = products(march).uses_amx
    answer.restype = ctypes.c_bool
    return bool(answer(dtype == torch.bfloat16))


def check_rows(march: str, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    """Rows alone and together, first and last, packed ahead or not, on one thread or two."""
    for outputs, inputs in ((130, 64), (65, 33), (40, 2201), (1, 7), (300, 96)):
        x, weight, bias = operands(outputs, inputs, dtype)
        threads(1)
        whole = product(march, x, weight, bias, ahead=AS_IT_LIES)
        exact = x.double() @ weight.double().t() + bias.double()
        error = (whole.double() - exact).abs().max() / exact.abs().max()
        assert error < (2**-8 if dtype == torch.bfloat16 else 5e-6)
        for count in (1, 2):
            threads(count)
            for rows in (1, 2, 7, 9, 17, 48, 70):
                for part in (slice(0, rows), slice(70 - rows, 70)):
                    for ahead in WAYS:
                        got = product(march, x[part], weight, bias, ahead=ahead)
                        assert torch.equal(got, whole[part]), (outputs, inputs, rows, ahead, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("march", variants())
def test_sums_with_nothing_left_to_add_are_written_as_they_are(
    march: str, dtype: torch.dtype
) -> None:
    for outputs, inputs in ((96, 64), (80, 40), (33, 96)):
        x, weight, bias = operands(outputs, inputs, dtype)
        whole = product(march, x, weight, torch.zeros_like(bias), ahead=AS_IT_LIES)
        for rows in (1, 16, 32, 40, 64, 70):
            for ahead in WAYS:
                got = product(march, x[:rows], weight, None, ahead=ahead)
                assert torch.equal(got, whole[:rows]), (outputs, inputs, rows, ahead)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("march", variants())
def test_every_way_to_cut_a_product_gives_the_same_bits(march: str, dtype: torch.dtype) -> None:
    # More calls than are needed to try each way; the last ones take the fastest.
    for outputs, inputs, rows in ((200, 300, 70), (130, 2500, 70), (70, 1201, 20)):
        x, weight, bias = operands(outputs, inputs, dtype)
        first = product(march, x[:rows], weight, bias, ahead=AS_IT_LIES)
        for _ in range(40):
            for ahead in WAYS:
                got = product(march, x[:rows], weight, bias, ahead=ahead)
                assert torch.equal(got, first), (outputs, inputs, rows, ahead)


@pytest.mark.parametrize("march", variants())
def test_the_rule_of_summation_is_the_one_that_is_stated(march: str) -> None:
    if march == "x86-64-v2":
        pytest.skip("products are rounded before they are added: no fused multiply-add")
    for dtype in (torch.float32, torch.bfloat16):
        if uses_amx(march, dtype):
            continue  # its own order
        if dtype == torch.bfloat16 and products(march).in_pairs():
            continue  # two products a step, whose inner order is the processor's
        x, weight, _ = operands(40, 2201, dtype)
        got = product(march, x[:3], weight, torch.zeros(40, dtype=dtype), ahead=PACKED)
        slow = torch.zeros(3, 40)
        for k in range(2201):  # float64 holds a product of floats and, all but ever, its sum
            slow = (x[:3, k, None].double() * weight[:, k].double() + slow.double()).float()
        assert torch.equal(got, slow.to(dtype))


X86 = ["x86-64-v2", "x86-64-v3", "x86-64-v4", "x86-64-v4 -mavx512bf16", "sapphirerapids"]
READS_TORCH = "torch_ops.cpp"  # half a minute


def compile_unit(march: str, unit: str) -> None:
    """Nothing runs: -O0 finds what does not compile, an instruction that is not there too."""
    compile_once(march, native.SOURCES / unit, "-O0", "-c")


@needs_x86
@pytest.mark.parametrize(
    "march",
    [pytest.param(m, marks=[] if m == "x86-64-v4" else pytest.mark.slow) for m in X86],
)
def test_the_code_is_one_that_compiles_for_every_processor(march: str) -> None:
    for unit in native.UNITS:
        if unit not in (READS_TORCH, "threads.cpp"):
            compile_unit(march, unit)


@needs_x86
@pytest.mark.slow
@pytest.mark.parametrize("march", X86)
def test_what_reads_torchs_headers_compiles_for_every_processor(march: str) -> None:
    compile_unit(march, READS_TORCH)


@needs_x86
def test_processors_with_amx_share_the_layout_of_packed_weights() -> None:
    march = "sapphirerapids"
    compile_once(march, ROOT / "tests/ops/products.cpp", "-DEXPECT_AMX", "-fsyntax-only")
    for unit in ("gemm.cpp", "products_amx.cpp"):
        compile_unit(march, unit)


BITWISE = (
    "tests/ops/test_dense.py",
    "tests/ops/test_attention_native.py",
    "tests/ops/test_layer.py",
    "tests/ops/test_threads.py",
    "tests/generation/test_exactness.py",
    "tests/generation/test_native_runner.py",
)


@pytest.mark.slow
@pytest.mark.parametrize("march", runs_here()[1:], ids=named)
def test_the_bitwise_tests_hold_on_every_instruction_set(march: str) -> None:
    environment = dict(os.environ, TANDEM_MARCH=march, TANDEM_NATIVE="on")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *BITWISE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
