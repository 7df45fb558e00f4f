"""The dense operations of a layer, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., in) by (out, in) -> (..., out)."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """(..., D): x / rms(x) * weight, or Gemma's x / rms(x) * (1 + weight)."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (h * (1.0 + weight.float())).to(x.dtype)
    return weight * h.to(x.dtype)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R columns of q (N, Hq, D) and k (N, Hkv, D) by cos and sin (N, R)."""

    def turned(x: Tensor) -> Tensor:
        width = cos.shape[-1]
        part, rest = x[..., :width], x[..., width:]
        a, b = part.chunk(2, -1)
        part = part * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
        return torch.cat([part, rest], -1)

    return turned(q), turned(k)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh approximation."""
    return F.gelu(gate, approximate="tanh") * up
