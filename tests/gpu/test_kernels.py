"""Every fused kernel by name against the same mathematics in float32, where it is importable."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.ops.attention_context import BLOCK_TOKENS
from tests.gpu.conftest import DEVICE, IS_DRY

BF16 = torch.bfloat16


def kernel(module: str, name: str) -> Any:
    """A function of tandem.ops; the test is skipped where Triton cannot run it."""
    if IS_DRY or find_spec("triton") is None:
        pytest.skip("Triton's kernels need a GPU; their own tests use its interpreter")
    return getattr(import_module(f"tandem.ops.{module}"), name)


def test_add_norm() -> None:
    add_norm, kind = kernel("layer_gpu", "add_norm"), kernel("layer_gpu", "RMS")
    x, delta = (torch.randn(70, 2048, device=DEVICE, dtype=BF16) for _ in range(2))
    weight = torch.randn(2048, device=DEVICE, dtype=BF16)
    total, normed = add_norm(x, delta, weight, None, 1e-6, kind)
    expected = (x + delta).float()
    torch.testing.assert_close(total.float(), expected, rtol=1e-2, atol=1e-2)
    root = (expected.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(
        normed.float(), expected * root * weight.float(), rtol=3e-2, atol=3e-2
    )


def test_rotate() -> None:
    rotate = kernel("rotary_gpu", "rotate")
    qkv = torch.randn(33, 12, 64, device=DEVICE, dtype=BF16)
    angles = torch.rand(33, 32, device=DEVICE).repeat(1, 2)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    q, k, v = rotate(qkv, cos, sin, (8, 2))
    for found, given in ((q, qkv[:, :8]), (k, qkv[:, 8:10])):
        x = given.float()
        half = torch.cat([-x[..., 32:], x[..., :32]], dim=-1)
        expected = x * cos.float()[:, None] + half * sin.float()[:, None]
        torch.testing.assert_close(found.float(), expected, rtol=3e-2, atol=3e-2)
    assert torch.equal(v, qkv[:, 10:])


def test_store_kv() -> None:
    store = kernel("store_gpu", "store_kv_gpu")
    lengths = [17, 3]
    k, v = (torch.randn(20, 2, 64, device=DEVICE, dtype=BF16) for _ in range(2))
    keys, values = (
        torch.zeros(6, BLOCK_TOKENS, 2, 64, device=DEVICE, dtype=BF16) for _ in range(2)
    )
    tables = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32, device=DEVICE)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=DEVICE)
    store(k, v, keys, values, tables, bounds)
    for memory, given in ((keys, k), (values, v)):
        assert torch.equal(memory[4], given[:16])
        assert torch.equal(memory[1, :1], given[16:17])
        assert torch.equal(memory[2, :3], given[17:])


@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "plain torch"])
def test_a_model_computes_alike_with_and_without_kernels(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """The packed forward of a Llama on the device against float32 on the host."""
    from tandem.engine.forward import response_logprobs
    from tests.models.families import ragged_batch, tiny_model

    if not fused:
        monkeypatch.setattr(import_module("tandem.ops.gpu"), "available", lambda: False)
    batch, model = ragged_batch((9, 5, 12)), tiny_model("llama")
    with torch.no_grad():
        expected, _ = response_logprobs(model, batch)
    torch.nn.Module.to(model, DEVICE, BF16)
    with torch.no_grad():
        found, _ = response_logprobs(model, batch.to(DEVICE))
    mask = batch.response_mask
    assert float(F.l1_loss(found.cpu()[mask], expected[mask])) < 2e-2


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_the_vocabulary_head_in_tiles(cap: float) -> None:
    """Values and gradients of 300 rows by 100,000 tokens, two tiles, against float32."""
    kernel("vocabulary_gpu", "head_logprobs_gpu")
    from tandem.objectives.logprobs import token_logprobs
    from tandem.ops.logits import HeadProduct

    hidden = (torch.randn(300, 256, device=DEVICE) / 16).to(BF16).requires_grad_()
    weight = torch.randn(100_000, 256, device=DEVICE).to(BF16).requires_grad_()
    targets = torch.randint(100_000, (300,), device=DEVICE)

    def capped(raw: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(raw / cap)

    head = HeadProduct(weight, None, capped if cap else None)
    found = token_logprobs(
        lambda x: x, hidden, targets, vocabulary=100_000, weights=[], with_entropy=True,
        product=head,
    )  # fmt: skip
    raw = hidden.float() @ weight.float().t()
    every = torch.log_softmax(capped(raw) if cap else raw, -1)
    entropy = -(every.exp() * every).sum(-1)
    expected = every.gather(1, targets[:, None])[:, 0], entropy
    pulls = torch.randn(2, 300, device=DEVICE).unbind()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    got = torch.autograd.grad(found, [hidden, weight], pulls)
    want = torch.autograd.grad(expected, [hidden, weight], pulls)
    for a, b in zip(got, want, strict=True):
        assert float((a - b).float().norm() / b.float().norm()) < 2e-2
