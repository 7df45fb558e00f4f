"""Token mixers that carry a state along their sequence: convolutions over the last few tokens, and
linear recurrences of a matrix (gated delta rule, Mamba 2).

They read what the forward is over from `attending`, as attention does: packed sequences that may
begin alike, prompts whose last states memory keeps, or one more token of each row. On a CPU in
float32 or bfloat16 they run in C++ (`csrc/recurrence.cpp`), one token after another, where a token
has the same bits in every mode and company; the plain torch paths below are equal to rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.ops import native
from tandem.ops.attention_context import NO_STATE, Decode, Packed, Recording, current_step

CHUNK_TOKENS = 64
"""Tokens that the plain recurrence computes by products, between two states."""


def causal_conv(
    layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool
) -> Tensor:
    """Each channel's weighted sum of its last W tokens within the sequence, perhaps through SiLU.

    Args:
        layer: its number, which finds its state in memory.
        x: (N, C). weight: (C, W) or (C, 1, W), the current token's last, W of 1 to 8. bias: (C,).
    Returns:
        (N, C) in x's type, with gradient.
    """
    step = current_step()
    if isinstance(step, Recording):
        known = step.states.get(layer, NO_STATE)
        step.states[layer] = replace(known, conv=(weight.shape[-1] - 1, x.shape[1]))
        step = step.packed
    if _native(x):
        conv = torch.ops.tandem
        if isinstance(step, Decode):
            state = step.memory.states[layer][0]
            return conv.causal_conv_on(
                x, weight, bias, silu, _one_each(x), state, step.slots, None
            )  # fmt: skip
        if step.slots is not None:
            state = _kept(step, layer)[0]
            return conv.causal_conv_on(
                x, weight, bias, silu, step.cu_seqlens, state, step.slots, _begins(step)
            )
        return conv.causal_conv(x, weight, bias, silu, step.cu_seqlens, step.prefixes)
    return _plain_conv(layer, x, weight.flatten(1), bias, silu, step)


def recurrence(
    layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None
) -> Tensor:
    """A matrix S (K, V) for each head and sequence, read and written token by token.

        S = exp(decay) S + k u^T,  out = S^T q

    with u = v, as Mamba 2's (arXiv:2405.21060), or where there is beta, as the gated delta rule's
    (arXiv:2412.06464), u = beta (v - exp(decay) S^T k).

    Args:
        layer: its number, which finds its state in memory.
        q, k: (N, G, K), each shared by H / G heads. v: (N, H, V).
        decay: (N, H), at most 0. beta: (N, H).
    Returns:
        (N, H, V) in float32, with gradient.
    """
    step = current_step()
    if isinstance(step, Recording):
        known = step.states.get(layer, NO_STATE)
        step.states[layer] = replace(known, matrix=(v.shape[1], q.shape[2], v.shape[2]))
        step = step.packed
    if q.device.type == "cpu" and native.available():
        run = torch.ops.tandem
        if isinstance(step, Decode):
            state = step.memory.states[layer][1]
            return run.recurrence_on(q, k, v, decay, beta, _one_each(v), state, step.slots, None)
        if step.slots is not None:
            state = _kept(step, layer)[1]
            return run.recurrence_on(
                q, k, v, decay, beta, step.cu_seqlens, state, step.slots, _begins(step)
            )
        return run.recurrence(q, k, v, decay, beta, step.cu_seqlens, step.prefixes)
    groups = v.shape[1] // q.shape[1]
    q, k = (x.float().repeat_interleave(groups, 1) for x in (q, k))
    return _plain_recurrence(
        layer, q, k, v.float(), decay.float(), None if beta is None else beta.float(), step
    )


def sigmoid(x: Tensor) -> Tensor:
    """Of any shape, in x's type; on a CPU a number's bits do not depend on its place."""
    return torch.ops.tandem.gate_sigmoid(x) if _native(x) else torch.sigmoid(x)


def softplus(x: Tensor, bias: Tensor) -> Tensor:
    """log(1 + e^(x + bias)) in float32, x (..., H) and bias (H,); on a CPU a number's bits do not
    depend on its place."""
    if _native(x):
        return torch.ops.tandem.gate_softplus(x, bias)
    return F.softplus(x.float() + bias.float())


def _native(x: Tensor) -> bool:
    is_known = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
    return is_known and native.available()


def _one_each(x: Tensor) -> Tensor:
    """Bounds of sequences of one token."""
    return torch.arange(len(x) + 1, dtype=torch.int32, device=x.device)


def _kept(step: Packed, layer: int) -> tuple[Tensor, Tensor]:
    assert step.memory is not None
    return step.memory.states[layer]


def _begins(step: Packed) -> Tensor:
    """(B,) int64, the tokens before each part of a sequence."""
    if step.before is not None:
        return step.before.starts_at
    return torch.zeros(len(step.cu_seqlens) - 1, dtype=torch.long, device=step.cu_seqlens.device)


# ---- plain torch ----


def _plain_conv(
    layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, step: Decode | Packed
) -> Tensor:
    """`causal_conv` by a gather for each of the W tokens; weight (C, W). Nothing waits for the
    device."""
    width = weight.shape[1]
    if isinstance(step, Decode):
        state, slots = step.memory.states[layer][0], step.slots
        seen = torch.cat([state[slots], x[:, None]], 1)
        state[slots] = seen[:, 1:]
        return _activated((seen.float() * weight.t().float()).sum(1), bias, silu, x.dtype)
    if not len(x):
        return x
    if step.prefixes is not None:
        whole = step.whole()
        made = _plain_conv(layer, x[whole.tokens], weight, bias, silu, whole.packed)
        return made[whole.back]
    ends = step.cu_seqlens.long()
    row = torch.searchsorted(ends[1:].contiguous(), _places(x), right=True)
    past = x.new_zeros(len(ends) - 1, width - 1, x.shape[1])
    if step.slots is not None:
        state = _kept(step, layer)[0]
        past = torch.where((_begins(step) > 0)[:, None, None], state[step.slots], past)
    # Each sequence behind the last tokens before it.
    history = width - 1
    firsts = ends[:-1] + history * torch.arange(len(ends) - 1, device=x.device)
    at = _places(x) + history * (row + 1)
    seen = x.new_zeros(len(x) + history * (len(ends) - 1), x.shape[1])
    places = (firsts[:, None] + torch.arange(history, device=x.device)).flatten()
    seen = seen.index_copy(0, places, past.flatten(0, 1)).index_copy(0, at, x)
    total = sum(
        seen[at - back].float() * weight[:, width - 1 - back].float() for back in range(width)
    )
    if step.slots is not None:
        lasts = (ends[1:] + history * torch.arange(1, len(ends), device=x.device))[:, None]
        _kept(step, layer)[0][step.slots] = seen[
            lasts - history + torch.arange(history, device=x.device)
        ].detach()
    return _activated(total, bias, silu, x.dtype)


def _activated(total: Any, bias: Tensor | None, silu: bool, dtype: torch.dtype) -> Tensor:
    total = (total if bias is None else total + bias.float()).to(dtype)
    return F.silu(total) if silu else total


def _places(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def _plain_recurrence(
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    step: Decode | Packed,
) -> Tensor:
    """`recurrence` with a q and k for each head, all in float32."""
    if isinstance(step, Decode):
        state, slots = step.memory.states[layer][1], step.slots
        old = state[slots] * decay.exp()[..., None, None]
        new = v if beta is None else beta[..., None] * (v - _read(old, k))
        old = old + k[..., None] * new[..., None, :]
        state[slots] = old
        return _read(old, q)
    if not len(v):
        return v
    if step.prefixes is not None:
        whole = step.whole()
        q, k, v, decay = (x[whole.tokens] for x in (q, k, v, decay))
        beta = None if beta is None else beta[whole.tokens]
        return _plain_recurrence(layer, q, k, v, decay, beta, whole.packed)[whole.back]
    ends = step.cu_seqlens.long()
    # Rows of whole chunks; what pads them writes nothing and lets nothing decay.
    own = step.max_length if step.before is None else max(step.before.counts, default=0)
    length = -(-max(own, 1) // CHUNK_TOKENS) * CHUNK_TOKENS
    places = torch.arange(length, device=q.device)
    real = places < ends.diff()[:, None]
    index = (ends[:-1, None] + places).clamp(max=max(0, len(q) - 1))

    def rows(x: Tensor) -> Tensor:  # (N, H, ...) -> (B, H, T, ...)
        is_real = real.view(*real.shape, *[1] * (x.dim() - 1))
        return torch.where(is_real, x[index], 0.0).transpose(1, 2)

    state = q.new_zeros(len(ends) - 1, v.shape[1], q.shape[2], v.shape[2])
    if step.slots is not None:
        goes_on = (_begins(step) > 0)[:, None, None, None]
        state = torch.where(goes_on, _kept(step, layer)[1][step.slots], state)
    rates = None if beta is None else rows(beta)
    out, state = _causal(rows(q), rows(k), rows(v), rows(decay), rates, state)
    if step.slots is not None:
        _kept(step, layer)[1][step.slots] = state.detach()
    row = torch.searchsorted(ends[1:].contiguous(), _places(q), right=True)
    return out.transpose(1, 2)[row, _places(q) - ends[row]]


def _read(state: Tensor, x: Tensor) -> Tensor:
    """(n, H, K, V) by x (n, H, K) -> (n, H, V)."""
    return (state * x[..., None]).sum(-2)


def _causal(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`_in_chunks`, but on a CPU an inf or a NaN makes only its own token and later ones NaN.

    Products over a chunk carry it to earlier tokens, since 0 * NaN is NaN. Looking for one on a GPU
    would wait for the GPU.
    """
    written = [k, v, decay[..., None], *([] if beta is None else [beta[..., None]])]
    if q.is_cpu and not all(bool(x.isfinite().all()) for x in written):
        broken = torch.stack([~x.isfinite().all(-1) for x in written]).any(0)
        k, v = (x.masked_fill(broken[..., None], 0.0) for x in (k, v))
        decay = decay.masked_fill(broken, 0.0)
        beta = None if beta is None else beta.masked_fill(broken, 0.0)
        out, state = _in_chunks(q, k, v, decay, beta, state)
        reached = (broken.cumsum(-1) > 0)[..., None]
        last = reached[..., -1:, :]
        return out.masked_fill(reached, torch.nan), state.masked_fill(last, torch.nan)
    return _in_chunks(q, k, v, decay, beta, state)


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of B rows by products over chunks of tokens: q, k (B, H, T, K) and
    v (B, H, T, V), decay and beta (B, H, T), state (B, H, K, V) -> (B, H, T, V), the last state.

    Within a chunk, with the sums g of decay up to each token, the delta rule asks for
    (1 + A) u = beta (v - exp(g) S^T k), A_ij = beta_i exp(g_i - g_j) k_i k_j below the diagonal.
    """
    made = []
    for at in range(0, q.shape[2], CHUNK_TOKENS):
        part = slice(at, at + CHUNK_TOKENS)
        queries, keys, written = q[:, :, part], k[:, :, part], v[:, :, part]
        # Differences of sums of strong decays would lose their digits in float32.
        total = decay[:, :, part].double().cumsum(-1)
        between = (total[..., :, None] - total[..., None, :]).float()
        between = between.masked_fill(torch.ones_like(between).triu(1).bool(), -torch.inf).exp()
        grown = total.float().exp()[..., None]
        if beta is not None:
            rate = beta[:, :, part, None]
            system = (rate * (keys @ keys.transpose(-1, -2)) * between).tril(-1)
            wanted = rate * (written - grown * (keys @ state))
            written = torch.linalg.solve_triangular(
                system, wanted, upper=False, unitriangular=True
            )  # fmt: skip
        scores = (queries @ keys.transpose(-1, -2)) * between
        made.append(grown * (queries @ state) + scores @ written)
        left = (total[..., -1:] - total).float().exp()[..., None]
        state = grown[..., -1:, :] * state + (keys * left).transpose(-1, -2) @ written
    return torch.cat(made, 2), state
