"""Numbers in blocks against a slow loop, C++ against plain torch to the bit, and the messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.errors import ConfigError, ShapeError
from tandem.ops import blockwise, native
from tandem.ops.blockwise import (
    INT4,
    INT8,
    NF4,
    QUANTIZABLE,
    BlockCode,
    dequantize,
    dequantize_into,
    quantize,
)
from tandem.parallel.quantize import Message, shard_numels, unit_parameters
from tandem.parallel.world import World
from tests.ranks import on_ranks

CODES = [
    BlockCode(kind, block, scale)
    for kind in ("int8", "int4", "nf4")
    for block in (18, 64, 256)
    for scale in (torch.float32, torch.bfloat16)
]
RUNS = [(0,), (1,), (7,), (64, 256), (1000, 0, 3, 517)]
# bitsandbytes' table, written down apart from ours: quantiles of a normal, 8 below and 9 above 0.
LEVELS = [-1.0, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0, 0.07958, 0.16093,
          0.24611, 0.33792, 0.44071, 0.56262, 0.72296, 1.0]  # fmt: skip


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slow_block(block: list[float], code: BlockCode) -> tuple[list[int], list[float]]:
    """Codes, as ints 0 to 15 or -127 to 127, and the numbers that come back, one by one."""
    top = max(abs(value) for value in block)
    largest = {"int8": 127, "int4": 7, "nf4": 1}[code.kind]
    scale = torch.tensor(top / largest).to(code.scale_dtype).item()
    if scale == 0:
        return [7 if code.kind == "nf4" else 0] * len(block), [0.0] * len(block)
    if code.kind == "nf4":
        codes = [min(range(16), key=lambda i: abs(v / scale - LEVELS[i])) for v in block]
        return codes, [LEVELS[i] * scale for i in codes]
    codes = [max(-largest, min(largest, round(v / scale))) for v in block]
    return codes, [q * scale for q in codes]


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("code", CODES, ids=str)
def test_numbers_and_codes_are_those_of_a_slow_loop(code: BlockCode) -> None:
    x = normal(1, 700) * torch.logspace(-3, 3, 700)
    x[0, : code.block] = 0
    codes, scales = quantize(x, code)
    back = dequantize(codes, scales, 700, code)[0]
    unpacked: list[int] = []
    for byte in codes[0].tolist():
        if code.kind == "int8":
            unpacked.append(byte - 256 if byte > 127 else byte)
        else:
            shift = 8 if code.kind == "int4" else 0
            unpacked += [(byte & 15) - shift, (byte >> 4) - shift]
    for first in range(0, 700, code.block):
        block = x[0, first : first + code.block].tolist()
        want_codes, want = slow_block(block, code)
        got = unpacked[first : first + len(block)]
        # A number halfway between two codes may go to either: float32 against float64.
        assert sum(a != b for a, b in zip(got, want_codes, strict=True)) <= 1, first
        step = max(abs(value) for value in want) * 1e-4 + 1e-30
        off = [abs(a - b) > step for a, b in zip(back[first:].tolist(), want, strict=False)]
        assert sum(off) <= 1, first


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("runs", RUNS, ids=str)
@pytest.mark.parametrize("dtype", QUANTIZABLE, ids=str)
def test_no_number_errs_by_more_than_half_a_step(
    code: BlockCode, runs: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = normal(3, sum(runs)).to(dtype)
    codes, scales = quantize(x, code, runs)
    assert codes.shape == (3, sum(-(-n // code.per_byte) for n in runs))
    assert scales.shape == (3, sum(math.ceil(n / code.block) for n in runs))
    back = dequantize(codes, scales, sum(runs), code, numels=runs)
    gap = max(b - a for a, b in pairwise(LEVELS)) / 2
    widest = gap if code.kind == "nf4" else 0.5
    largest = {"int8": 127, "int4": 7, "nf4": 1}[code.kind]
    # bfloat16 scales may be too small by 2^-9: the largest number is cut by as much.
    slack = largest * 2**-8 if code.scale_dtype == torch.bfloat16 else 1e-4
    first_number = first_block = 0
    for numel in runs:
        for inside in range(0, numel, code.block):
            part = slice(first_number + inside, first_number + min(inside + code.block, numel))
            error = (back[:, part] - x[:, part].float()).abs().amax(-1)
            bound = scales[:, first_block].float() * (widest + slack)
            assert bool((error <= bound).all()), (numel, inside)
            # The scale is of this block's largest number: blocks do not span runs.
            want = x[:, part].float().abs().amax(-1) / largest
            assert torch.allclose(scales[:, first_block].float(), want, rtol=5e-3)
            first_block += 1
        first_number += numel


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", QUANTIZABLE, ids=str)
def test_cpp_and_plain_torch_agree_to_the_bit(
    code: BlockCode, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.available():
        pytest.skip(native.why_not())

    def both(function: Callable[[], tuple[Tensor, ...]]) -> None:
        fast = function()
        with monkeypatch.context() as patch:
            patch.setattr(native, "available", lambda: False)
            plain = function()
        for a, b in zip(fast, plain, strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.nan_to_num(), b.nan_to_num())

    runs = (1000, 0, 3, 517)
    x = normal(2, sum(runs))
    x[0, 5], x[1, 300], x[0, 600:700], x[1, 700] = math.inf, math.nan, 0.0, 3.4e38
    x[0, 1000:1003] = torch.tensor([1e-41, -3e-44, 1e-45])
    x = x.to(dtype)
    both(lambda: quantize(x, code, runs))
    codes, scales = quantize(x, code, runs)
    for out in QUANTIZABLE:
        both(lambda out=out: (dequantize(codes, scales, sum(runs), code, out, runs),))
    both(lambda: quantize(x[:0, ::2], code))


@pytest.mark.parametrize("code", CODES, ids=str)
def test_subnormal_numbers_come_back_as_torch_rounds_them(
    code: BlockCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.available():
        pytest.skip(native.why_not())
    runs = (300, 7, 64)
    found = []
    for exponent in range(-134, -112, 2):
        x = normal(2, sum(runs)) * 2.0**exponent
        codes, scales = quantize(x, code, runs)
        found.append((codes, scales, dequantize(codes, scales, 371, code, torch.bfloat16, runs)))
    monkeypatch.setattr(native, "available", lambda: False)
    kept = 0
    for codes, scales, ours in found:
        plain = dequantize(codes, scales, 371, code, torch.bfloat16, runs)
        assert torch.equal(ours, plain)
        kept += int(((plain != 0) & (plain.abs() < 2.0**-126)).sum())
    assert kept > 100


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("code", [INT8, INT4, NF4], ids=str)
def test_what_is_not_finite_makes_its_block_nan_and_no_other(code: BlockCode) -> None:
    for poison in (math.inf, -math.inf, math.nan):
        x = normal(3 * code.block)
        x[code.block + 3] = poison
        back = dequantize(*quantize(x, code), x.numel(), code)
        assert bool(back[code.block : 2 * code.block].isnan().all())
        assert bool(back[: code.block].isfinite().all())
        assert bool(back[2 * code.block :].isfinite().all())
    if code.scale_dtype == torch.bfloat16:  # the scale overflows: seen, not cut
        back = dequantize(*quantize(torch.full((4,), 3.4e38), code), 4, code)
        assert bool(back.isnan().all())


@pytest.mark.usefixtures("arithmetic")
def test_what_a_code_can_say_comes_back_exactly() -> None:
    whole = torch.arange(-127, 128).float()
    for exponent in (-20, 0, 30):
        x = whole * 2.0**exponent
        assert torch.equal(dequantize(*quantize(x), 255), x)
    x = torch.arange(-7, 8).float() * 0.25
    assert torch.equal(dequantize(*quantize(x, INT4), 15, INT4), x)
    x = torch.tensor(blockwise._NF4) * 8
    assert torch.equal(dequantize(*quantize(x, NF4), 16, NF4), x)
    for code in (INT8, INT4, NF4):
        zeros = torch.zeros(100)
        assert torch.equal(dequantize(*quantize(zeros, code), 100, code), zeros)
        empty = torch.empty(0, 5)
        assert dequantize(*quantize(empty, code), 5, code).shape == (0, 5)


@pytest.mark.usefixtures("arithmetic")
def test_errors_on_a_normal_are_those_of_the_literature() -> None:
    x = normal(2**18)

    def error(code: BlockCode) -> float:
        back = dequantize(*quantize(x, code), x.numel(), code)
        return float((back - x).norm() / x.norm())

    assert 0.006 < error(INT8) < 0.008
    assert 0.115 < error(INT4) < 0.135
    assert 0.10 < error(BlockCode("int4", 64)) < 0.115
    # NF4's 9.2 % is below int4's: its levels lie where a normal's numbers do.
    assert 0.085 < error(NF4) < 0.097


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_parts_are_read_and_summed_in_one_go(kind: blockwise.Kind) -> None:
    code = BlockCode(kind, 64)
    runs = (100, 31)
    x = normal(3, 2, 131)
    codes, scales = quantize(x, code, runs)
    out = torch.full((2, 131), math.nan)
    dequantize_into(codes, scales, out, code, runs)
    want = dequantize(codes, scales, 131, code, numels=runs).double().sum(0)
    assert float((out - want).abs().max()) < 1e-5


def test_threads_do_not_change_a_bit(threads: Callable[[int], None]) -> None:
    x = normal(3, 50_001)
    results = []
    for count in (1, 3):
        threads(count)
        results.append(quantize(x, INT4))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("code", [INT8, INT4, NF4], ids=str)
def test_the_compiled_functions_give_the_same(code: BlockCode) -> None:
    """What a GPU runs, compiled for a CPU."""
    blocks = normal(40, code.block)
    blocks[3, 3], blocks[5] = math.inf, 0.0
    encode, decode = blockwise._ENCODERS[code.kind], blockwise._DECODERS[code.kind]
    codes, scales = encode(blocks, code.scale_dtype)
    fast_codes, fast_scales = blockwise._compiled(encode)(blocks, code.scale_dtype)
    assert torch.equal(scales.nan_to_num(), fast_scales.nan_to_num())
    assert torch.equal(codes, fast_codes)
    parts = codes.view(2, 20, -1), scales.view(2, 20)
    for dtype in QUANTIZABLE:
        fast = blockwise._compiled(decode)(*parts, dtype)
        want = decode(*parts, dtype)
        assert torch.allclose(fast, want, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-6,
                              equal_nan=True)  # fmt: skip


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="must be int8, int4 or nf4"):
        BlockCode("int3")  # type: ignore[arg-type]
    for block in (0, 15, 17, 8192):
        with pytest.raises(ConfigError, match="even block of 16 to 4096"):
            BlockCode("int8", block)
    with pytest.raises(ConfigError, match="scales"):
        BlockCode("int8", 64, torch.float16)
    with pytest.raises(ShapeError, match="add up to the 10 numbers"):
        quantize(torch.zeros(10), INT8, (4, 5))
    with pytest.raises(ShapeError, match="float rows"):
        quantize(torch.zeros(10, dtype=torch.int32))
    codes, scales = quantize(torch.zeros(10))
    with pytest.raises(ShapeError, match="must be"):
        dequantize(codes, scales, 11)
    with pytest.raises(ShapeError, match="must be"):
        dequantize(codes, scales, 10, BlockCode("int8", 256, torch.bfloat16))
    with pytest.raises(ShapeError, match="must be"):
        dequantize(codes, scales, 10, dtype=torch.float64)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("code", CODES, ids=str)
def test_a_message_is_read_as_it_was_written(code: BlockCode) -> None:
    runs = (513, 7, 0, 33)
    message = Message(code, runs)
    rows = normal(4, message.numel)
    sent = message.write(rows)
    scale_bytes = code.scale_dtype.itemsize * code.num_scales(runs)
    code_bytes = sum(-(-n // code.per_byte) for n in runs)
    assert sent.shape == (4, -(-(scale_bytes + code_bytes) // 4) * 4) == (4, message.row_bytes)
    assert torch.equal(sent, message.write(rows)), "padding is not left to chance"
    out = torch.empty(4, message.numel)
    message.read_into(sent, out)
    want = dequantize(*quantize(rows, code, runs), message.numel, code, numels=runs)
    assert torch.equal(out, want)
    summed = torch.empty(2, message.numel)
    message.read_into(sent.view(2, 2, -1), summed)
    assert torch.allclose(summed, want.view(2, 2, -1).sum(0), atol=1e-5)


class Gate(nn.Module):
    """Parameters of its own beside those of children, one of them shared."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(6, 3)
        self.second.weight = self.first.weight


def layouts(world: World) -> list[tuple[list[int], list[int]]]:
    """For every unit of a few models: ours, and FSDP2's private sizes."""
    config = LlamaConfig(
        vocab_size=67, hidden_size=20, intermediate_size=36, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    llama = LlamaForCausalLM(config)
    stack = nn.Sequential(Gate(), Gate())
    mesh = init_device_mesh("cpu", (world.size,))
    for unit in (*llama.model.layers, llama, stack[0], stack):
        fully_shard(unit, mesh=mesh)
    found = []
    for unit in (*llama.modules(), *stack.modules()):
        if isinstance(unit, FSDPModule):
            (group,) = unit._get_fsdp_state()._fsdp_param_groups
            theirs = [p.padded_sharded_param_size.numel() for p in group.fsdp_params]
            found.append((list(shard_numels(unit_parameters(unit), world.size)), theirs))
    return found


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="private names of 2.13"
)
def test_shares_are_laid_out_as_fsdp_lays_them_out() -> None:
    (found, _, _) = on_ranks(3, layouts)
    assert len(found) == 5
    for ours, theirs in found:
        assert ours == theirs
