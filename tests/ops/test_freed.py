"""A backward pass frees what the forward kept, also where a recomputation ends inside an op."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tandem.objectives.logprobs import token_logprobs
from tandem.ops import dense, native
from tandem.ops.attention import varlen_attention
from tandem.ops.attention_context import AttentionSpec, Packed

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())

ROWS, HEADS, WIDTH = 6, 2, 8
WEIGHT = torch.ones(WIDTH, WIDTH)
IDS = torch.tensor([1, 0, 2, 3, 1, 1])


def attention(x: Tensor) -> Tensor:
    q = x.view(ROWS, HEADS, WIDTH // HEADS)
    return varlen_attention(
        q, q, q, Packed.of_lengths([4, 2], x.device), AttentionSpec(0.5, 0, 0.0)
    )


def rotary(x: Tensor) -> Tensor:
    q = x.view(ROWS, HEADS, WIDTH // HEADS)
    turn = torch.ones(ROWS, WIDTH // HEADS)
    return sum(dense.rotary(q, q, turn, turn), torch.zeros(()))


def logprobs(x: Tensor) -> Tensor:
    return sum(dense.token_logprobs(x, IDS), torch.zeros(()))


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: dense.linear(x, WEIGHT),
    "embedding": lambda x: dense.embedding(IDS, x),
    "rms_norm": lambda x: dense.rms_norm(x, WEIGHT[0], 1e-6),
    "rotary": rotary,
    "swiglu": lambda x: dense.swiglu(x, x),
    "geglu_tanh": lambda x: dense.geglu_tanh(x, x),
    "token_logprobs": logprobs,
    "varlen_attention": attention,
}


@pytest.mark.parametrize("name", OPS)
def test_a_recomputation_that_ends_in_an_op_frees_its_inputs(name: str) -> None:
    made: list[weakref.ref[Tensor]] = []

    def forward(x: Tensor) -> Tensor:
        h = x * 2
        made.append(weakref.ref(h))
        return OPS[name](h)

    x = torch.rand(ROWS, WIDTH, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False).sum().backward()
    gc.collect()
    assert len(made) == 2, "the forward, and its recomputation"
    assert [h() for h in made] == [None, None]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_chunks_of_logits_are_freed() -> None:
    vocabulary, width, rows = 50_257, 4, 200
    head = torch.randn(vocabulary, width, requires_grad=True)
    held = []
    for _ in range(12):
        hidden = torch.randn(rows, width, requires_grad=True)
        found, entropy = token_logprobs(
            lambda x: dense.linear(x, head),
            hidden,
            torch.randint(vocabulary, (rows,)),
            vocabulary=vocabulary,
            weights=[head],
            with_entropy=True,
            max_rows=100,
        )
        (found.sum() + entropy.sum()).backward()
        del found, entropy
        held.append(_resident_bytes())
    one_chunk = 4 * 100 * vocabulary
    assert held[-1] - held[1] < 5 * one_chunk, "of the twenty that ten passes made"


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096
