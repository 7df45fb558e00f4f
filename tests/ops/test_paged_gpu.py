"""The Triton kernels of decoding against a slow loop: on a GPU, else in Triton's interpreter.

Without a GPU they need TRITON_INTERPRET=1 in the environment before anything imports Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from tandem.errors import GenerationError
from tandem.ops import paged_gpu
from tandem.ops.attention import AttentionSpec
from tandem.ops.attention_context import BLOCK_TOKENS, Decode, KVMemory, LayerShape
from tandem.ops.paged_gpu import CHUNK, AddressedMemory, paged_attention_gpu

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
kernels = pytest.mark.skipif(
    not HAS_TRITON or (DEVICE.type == "cpu" and not INTERPRETED),
    reason="no GPU, and Triton's interpreter is not on (triton installed, TRITON_INTERPRET=1)"
    if HAS_TRITON
    else "triton is not installed",
)
# numpy's, in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
POSITIONS = (0, 1, 15, 16, CHUNK - 1, CHUNK, CHUNK + 61, 100)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    query_heads: int
    heads: int
    key_width: int
    value_width: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    def kind(self) -> AttentionSpec:
        generator = torch.Generator().manual_seed(4)
        sinks = torch.randn(self.query_heads, generator=generator).to(DEVICE)
        return AttentionSpec(
            self.key_width**-0.5, self.window, self.softcap, sinks if self.sinks else None
        )


CASES = {
    "one to one": Case(4, 4, 16, 16),
    "grouped": Case(8, 2, 32, 32),
    "more than 16 to a key": Case(20, 1, 16, 16),
    "odd": Case(3, 1, 20, 20),
    "below 8": Case(2, 2, 5, 3),
    "window": Case(4, 2, 32, 32, window=7),
    "window of one": Case(2, 2, 16, 16, window=1),
    "window over chunks": Case(2, 1, 16, 16, window=CHUNK - 3),
    "softcap": Case(4, 2, 16, 16, softcap=2.0),
    "sinks": Case(4, 2, 16, 16, sinks=True),
    "all": Case(6, 2, 24, 40, window=33, softcap=1.5, sinks=True),
    "latent": Case(2, 1, 192, 128),
    "wide": Case(2, 1, 256, 256),
    "bfloat16": Case(8, 2, 64, 64, dtype=torch.bfloat16),
    "float16": Case(5, 1, 80, 80, window=40, sinks=True, dtype=torch.float16),
}


@dataclass
class Rows:
    """Rows at `positions`: their new token, their tokens so far, and memory that holds those."""

    q: Tensor
    k: Tensor
    v: Tensor
    past: list[tuple[Tensor, Tensor]]
    memory: KVMemory
    step: Decode

    @staticmethod
    def of(case: Case, positions: tuple[int, ...] = POSITIONS) -> Rows:
        """Memory that nobody has written is NaN."""
        n = len(positions)
        width = max(positions) // BLOCK_TOKENS + 1
        shape = LayerShape(case.heads, case.key_width, case.value_width)
        # The layout of a GPU, wherever the test runs.
        meta = KVMemory([shape], n * width + 1, dtype=case.dtype, device=torch.device("meta"))
        meta.layers = [
            (
                torch.full_like(k, torch.nan, device=DEVICE),
                torch.full_like(v, torch.nan, device=DEVICE),
            )
            for k, v in meta.layers
        ]
        tables = torch.randperm(n * width).int().view(n, width).to(DEVICE)
        sizes = (case.query_heads * case.key_width, case.heads * case.key_width,
                 case.heads * case.value_width)  # fmt: skip
        # One projection's output, as a fused layer gives it: rows are far apart.
        q, k, v = torch.randn(n, sum(sizes)).to(DEVICE, case.dtype).split(sizes, dim=1)
        rows = Rows(
            q.unflatten(1, (case.query_heads, -1)),
            k.unflatten(1, (case.heads, -1)),
            v.unflatten(1, (case.heads, -1)),
            [], meta, Decode(torch.tensor(positions, device=DEVICE), tables, meta),
        )  # fmt: skip
        keys, values = meta.layers[0]
        for row, position in enumerate(positions):
            past = tuple(
                torch.randn(position, case.heads, w).to(DEVICE, case.dtype)
                for w in (case.key_width, case.value_width)
            )
            rows.past.append((past[0], past[1]))
            for t in range(position):
                block, place = tables[row, t // BLOCK_TOKENS], t % BLOCK_TOKENS
                keys[block, place], values[block, place] = past[0][t], past[1][t]
        return rows

    def attend(self, case: Case, chosen: slice = slice(None)) -> Tensor:
        step = replace(
            self.step,
            positions=self.step.positions[chosen],
            block_tables=self.step.block_tables[chosen],
        )
        layer = step.memory.layers[0]
        q, k, v = self.q[chosen], self.k[chosen], self.v[chosen]
        return paged_attention_gpu(q, k, v, *layer, step, case.kind())


def slow(rows: Rows, case: Case) -> Tensor:
    """Row by row, head by head, from the definition, in float64."""
    kind, out = case.kind(), []
    for row, (keys, values) in enumerate(rows.past):
        k = torch.cat([keys, rows.k[row : row + 1]]).double()
        v = torch.cat([values, rows.v[row : row + 1]]).double()
        first = max(0, len(k) - case.window) if case.window else 0
        for h in range(case.query_heads):
            g = h // (case.query_heads // case.heads)
            scores = (k[first:, g] @ rows.q[row, h].double()) * kind.scale
            if case.softcap:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            if kind.sinks is not None:
                scores = torch.cat([scores, kind.sinks[h : h + 1].double()])
            out.append(scores.softmax(0)[: len(k) - first] @ v[first:, g])
    return torch.stack(out).view(len(rows.past), case.query_heads, -1)


@kernels
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_definition_beside_memory_full_of_nan(name: str) -> None:
    case = CASES[name]
    if case.dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    rows = Rows.of(case)
    out = rows.attend(case)
    assert out.dtype == case.dtype
    torch.testing.assert_close(out.double(), slow(rows, case), rtol=0, atol=TOLERANCE[case.dtype])


@kernels
@pytest.mark.parametrize("name", ["grouped", "all", "float16"])
def test_a_row_alone_is_the_row_among_others_to_the_bit(name: str) -> None:
    case = CASES[name]
    rows = Rows.of(case)
    together = rows.attend(case)
    for row in range(len(POSITIONS)):
        assert torch.equal(rows.attend(case, slice(row, row + 1))[0], together[row])
    # Wider tables mean room for longer answers, not other numbers.
    rows.step = replace(rows.step, block_tables=rows.step.block_tables.repeat(1, 3))
    assert torch.equal(rows.attend(case), together)


@kernels
def test_it_keeps_the_new_token_and_writes_nothing_else() -> None:
    case = CASES["all"]
    rows = Rows.of(case)
    before = [t.clone() for t in rows.memory.layers[0]]
    rows.attend(case)
    for old, now, new in zip(before, rows.memory.layers[0], (rows.k, rows.v), strict=True):
        for row, position in enumerate(POSITIONS):
            block = rows.step.block_tables[row, position // BLOCK_TOKENS]
            assert torch.equal(now[block, position % BLOCK_TOKENS], new[row])
            old[block, position % BLOCK_TOKENS] = new[row]
        assert torch.equal(old.nan_to_num(7.0), now.nan_to_num(7.0))


@kernels
def test_rows_that_share_a_scratch_block_disturb_no_other() -> None:
    case = CASES["grouped"]
    rows = Rows.of(case, (40, 0, 0, 0))
    alone = rows.attend(case, slice(0, 1))
    rows.step.block_tables[1:] = rows.memory.num_blocks - 1
    assert torch.equal(rows.attend(case)[:1], alone)


@kernels
def test_no_rows_are_no_error() -> None:
    case = CASES["grouped"]
    assert Rows.of(case).attend(case, slice(0, 0)).shape == (0, 8, 32)


@kernels
def test_by_address_it_follows_the_memory_it_is_pointed_at() -> None:
    case = CASES["all"]
    one, other = Rows.of(case), Rows.of(case)
    expected = [one.attend(case), other.attend(case)]
    addressed = AddressedMemory(one.memory)
    for rows, out in zip((one, other), expected, strict=True):
        addressed.point_at(rows.memory)
        rows.step = replace(rows.step, memory=addressed)
        assert torch.equal(rows.attend(case), out)


def test_without_triton_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_gpu, "triton", None)
    case = CASES["grouped"]
    with pytest.raises(GenerationError, match="must have Triton; got no module"):
        Rows.of(case, (1,)).attend(case)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_all_kernels_compile(arch: str) -> None:
    """The interpreter lets pass what the compiler refuses; this needs no GPU."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compile_kernels", "--arch", arch]
    result = subprocess.run(command, env=settings, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
