"""The one attention of prefill, decode, scoring and training, under transformers' interface.

A model whose config names TANDEM_ATTENTION calls `tandem_attention` from every attention layer.
On a CPU a token's output depends on its own sequence alone, to the last bit, and is the same
whether the token comes with its sequence or alone on top of KV memory (`native`); the plain torch
paths below mean the same to rounding.
"""

from __future__ import annotations

import inspect
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from tandem.ops import gpu, native
from tandem.ops.attention_context import (
    BLOCK_TOKENS,
    AttentionSpec,
    Before,
    Decode,
    KVMemory,
    LayerShape,
    Packed,
    Recording,
    current_step,
)

TANDEM_ATTENTION = "tandem"
"""The name to set as a config's `_attn_implementation`."""


def tandem_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query (1, Hq, N, D), key and value (1, Hkv, N, D).

    Returns:
        (1, N, Hq, Dv) and no weights.
    """
    step = current_step()
    if isinstance(step, Recording):
        step.why_not += _not_taken(module, attention_mask, kwargs)
    kind = AttentionSpec(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=int(sliding_window or 0),
        softcap=float(softcap or 0.0),
        sinks=s_aux,
        dropout=dropout if module.training else 0.0,
    )
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return attend(int(module.layer_idx), q, k, v, kind).unsqueeze(0), None  # type: ignore[arg-type]


AttentionInterface.register(TANDEM_ATTENTION, tandem_attention)


def _not_taken(module: nn.Module, mask: Tensor | None, others: dict[str, Any]) -> list[str]:
    """What a family passes to attention that would be lost here: a mask of its own, a bias on the
    scores, chosen keys."""
    found = [] if mask is None else ["masks keys in a way of its own"]
    lost = (name for name, value in others.items() if isinstance(value, Tensor))
    found += [f"passes {name} to attention" for name in lost if name != "position_ids"]
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        found.append("sees tokens to the right")
    return found


def attend(
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kind: AttentionSpec,
    asked: Tensor | None = None,
) -> Tensor:
    """Attention of N tokens, q (N, Hq, Dk), k (N, Hkv, Dk), v (N, Hkv, Dv) -> (N, Hq, Dv).

    Args:
        asked: (K,) int64, ascending: the tokens that q and the result are of, where `takes_asked`;
            None: all.
    """
    if not q.dtype == k.dtype == v.dtype:
        q, k = q.to(v.dtype), k.to(v.dtype)
    step = current_step()
    if isinstance(step, Decode):
        return paged_attention(q, k, v, step, layer, kind)
    if isinstance(step, Recording):
        if layer in step.shapes:  # one place in KV memory for two sets of keys
            step.why_not.append("attends more than once a layer")
        step.shapes[layer] = LayerShape(k.shape[1], k.shape[2], v.shape[2])
        step.windows[layer] = kind.window
        step = step.packed
    if step.memory is not None and step.block_tables is not None:
        store_kv(k, v, step.memory, layer, step.block_tables, step.cu_seqlens)
        if step.before is not None:
            return continued_attention(q, step.memory, layer, step, step.before, kind)
    return varlen_attention(q, k, v, step, kind, asked)


def takes_asked(kind: AttentionSpec, dtype: torch.dtype) -> bool:
    """Whether `attend` may be given the queries of some tokens alone, in the forward around this
    call, on a CPU."""
    step = current_step()
    return isinstance(step, Packed) and step.memory is None and kind.dropout == 0 and _native(dtype)


def attend_rotary(
    layer: int, qkv: Tensor, heads: tuple[int, int], cos: Tensor, sin: Tensor, kind: AttentionSpec
) -> Tensor:
    """`attend` on a GPU, of queries and keys that rotary positions have yet to turn.

    Args:
        qkv: (N, Hq + 2 Hkv, D), queries, keys, values. heads: Hq and Hkv. cos, sin: (N, R).
    """
    step = current_step()
    if isinstance(step, Decode):
        from tandem.ops.paged_gpu import paged_attention_gpu  # imports Triton

        q, k, v = qkv.split((*heads, heads[1]), 1)
        memory = step.memory.layers[layer]
        return paged_attention_gpu(q, k, v, *memory, step, kind, (cos, sin))
    from tandem.ops.rotary_gpu import rotate  # imports Triton

    return attend(layer, *rotate(qkv, cos, sin, heads), kind)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Packed,
    kind: AttentionSpec,
    asked: Tensor | None = None,
) -> Tensor:
    """Causal attention inside each of the packed sequences, with gradient.

    Only the C++ operations share the keys of a prefix; elsewhere its sequences are written out.
    Only they take queries of the tokens `asked` for alone.
    """
    if q.device.type == "cpu" and kind.dropout == 0 and _native(q.dtype):
        return torch.ops.tandem.varlen_attention(
            q, k, v, step.cu_seqlens, kind.scale, kind.window, kind.softcap, kind.sinks,
            step.prefixes, asked,
        )  # fmt: skip
    assert asked is None
    if step.prefixes is not None:
        whole = step.whole()
        q, k, v = q[whole.tokens], k[whole.tokens], v[whole.tokens]
        return varlen_attention(q, k, v, whole.packed, kind)[whole.back]
    # The meta device stands for a GPU where kernels and memory are counted.
    if q.device.type in ("cuda", "meta") and _varlen_kernel_fits(q, v, kind):
        return _varlen_on_gpu(q, k, v, step, kind)
    if gpu.fuses(q) and kind.dropout == 0:
        from tandem.ops.varlen_gpu import varlen_attention_gpu  # imports Triton

        return varlen_attention_gpu(q, k, v, step.cu_seqlens, kind)
    bounds = step.cu_seqlens.tolist()
    if not q.shape[0]:
        return q.new_empty(0, q.shape[1], v.shape[2])
    parts = [_one_sequence(q[a:b], k[a:b], v[a:b], kind) for a, b in pairwise(bounds) if b > a]
    return torch.cat(parts)


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, step: Decode, layer: int, kind: AttentionSpec
) -> Tensor:
    """One new token per row: keep its key and value, attend to the row's tokens so far."""
    keys, values = step.memory.layers[layer]
    if q.device.type == "cpu" and _native(q.dtype):
        return torch.ops.tandem.paged_attention(
            q, k, v, keys, values, step.block_tables, step.positions,
            kind.scale, kind.window, kind.softcap, kind.sinks,
        )  # fmt: skip
    if gpu.fuses(q):
        from tandem.ops.paged_gpu import paged_attention_gpu  # imports Triton

        return paged_attention_gpu(q, k, v, keys, values, step, kind)
    return _paged_plain(q, k, v, keys, values, step, kind)


def continued_attention(
    q: Tensor, memory: KVMemory, layer: int, step: Packed, before: Before, kind: AttentionSpec
) -> Tensor:
    """Causal attention of new tokens (N, Hq, Dk) over sequences whose keys and values, the new
    tokens' too, are in KV memory -> (N, Hq, Dv). It has no gradient."""
    keys, values = memory.layers[layer]
    if q.device.type == "cpu" and _native(q.dtype):
        return torch.ops.tandem.continued_attention(
            q, keys, values, before.tables, before.starts_at, step.cu_seqlens,
            kind.scale, kind.window, kind.softcap, kind.sinks,
        )  # fmt: skip
    if gpu.fuses(q) and kind.dropout == 0 and not _varlen_kernel_fits(q, values, kind):
        from tandem.ops.continued_gpu import continued_attention_gpu  # imports Triton

        return continued_attention_gpu(q, keys, values, step.cu_seqlens, before, kind)
    blocks, places, ends = before.written_out()
    if q.device.type == "cpu":
        k, v = keys[blocks, :, :, places], values[blocks, :, places]
    else:
        k, v = keys[blocks, places], values[blocks, places]
    if q.device.type in ("cuda", "meta") and _varlen_kernel_fits(q, v, kind):
        return _varlen_on_gpu(q, k, v, step, kind, ends)
    found, new, old = [], 0, 0
    for start, count in zip(before.starts, before.counts, strict=True):
        end = old + start + count
        found.append(_one_sequence(q[new : new + count], k[old:end], v[old:end], kind))
        new, old = new + count, end
    return torch.cat(found)


def store_kv(
    k: Tensor, v: Tensor, memory: KVMemory, layer: int, block_tables: Tensor, cu_seqlens: Tensor
) -> None:
    """Keep the keys and values of packed sequences, row b of `block_tables` for sequence b."""
    keys, values = memory.layers[layer]
    k, v = k.detach(), v.detach()
    if k.device.type == "cpu" and _native(k.dtype):
        torch.ops.tandem.store_kv(k, v, keys, values, block_tables, cu_seqlens)
        return
    if gpu.fuses(k) and keys.dtype == k.dtype:
        from tandem.ops.store_gpu import store_kv_gpu  # imports Triton

        store_kv_gpu(k, v, keys, values, block_tables, cu_seqlens)
        return
    lengths = cu_seqlens.diff().long()
    rows = torch.repeat_interleave(
        torch.arange(len(lengths), device=k.device), lengths, output_size=k.shape[0]
    )
    places = torch.arange(k.shape[0], device=k.device) - cu_seqlens[:-1].long()[rows]
    blocks = block_tables[rows, places // BLOCK_TOKENS].long()
    offsets = places % BLOCK_TOKENS
    if k.device.type == "cpu":
        keys[blocks, :, :, offsets] = k
        values[blocks, :, offsets] = v
    else:
        keys[blocks, offsets] = k
        values[blocks, offsets] = v


def _native(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.bfloat16) and native.available()


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, kind: AttentionSpec) -> Tensor:
    """The last T of S tokens: (T, Hq, D) and (S, Hkv, D) -> (T, Hq, Dv), causal."""
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    broken = ~v.isfinite()
    if v.is_meta:
        return _of_finite(q, k, v, kind).transpose(0, 1)
    if not bool(broken.any()):
        return _of_values(q, k, v, kind).transpose(0, 1)
    # 0 * NaN is NaN: an inf or a NaN would reach tokens that do not see it, whose weight is 0.
    out = _of_values(q, k, v.masked_fill(broken, 0.0), kind)
    reached = _seen(q, k, kind.window).float() @ broken.float() > 0
    groups = q.shape[0] // k.shape[0]
    return out.masked_fill(reached.repeat_interleave(groups, 0), torch.nan).transpose(0, 1)


def _of_values(q: Tensor, k: Tensor, v: Tensor, kind: AttentionSpec) -> Tensor:
    """Attention to finite values: tokens that see a key with an inf or a NaN by the formula, the
    others, whose gradient it would reach by a weight of 0, without that key."""
    broken = ~k.isfinite().all(-1)
    if not bool(broken.any()):
        return _of_finite(q, k, v, kind)
    seen = _seen(q, k, kind.window)
    rows = (seen & broken.any(0)).any(-1).nonzero()[:, 0]
    out = _of_finite(q, k.masked_fill(broken[..., None], 0.0), v, kind)
    return out.index_copy(1, rows, _weighted(q[:, rows], k, v, seen[rows], kind))


def _of_finite(q: Tensor, k: Tensor, v: Tensor, kind: AttentionSpec) -> Tensor:
    """Of keys and values without inf and NaN: q (Hq, T, D), k, v (Hkv, S, D) -> (Hq, T, Dv)."""
    T = q.shape[1]
    plain = kind.softcap == 0 and kind.sinks is None and kind.dropout == 0
    if plain and k.shape[1] == T and (kind.window == 0 or kind.window >= T):
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=kind.scale, enable_gqa=True
        )[0]
    return _weighted(q, k, v, _seen(q, k, kind.window), kind)


def _seen(q: Tensor, k: Tensor, window: int) -> Tensor:
    """Which of S keys each of the last T tokens sees: (T, S) bool."""
    T, S = q.shape[1], k.shape[1]
    places = torch.arange(S, device=q.device)
    queries = places[S - T :, None]
    seen = places[None] <= queries
    return seen & (places[None] > queries - window) if window else seen


def _weighted(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, kind: AttentionSpec) -> Tensor:
    """The formula itself: q (..., Hq, T, D), k, v (..., Hkv, S, D), seen (..., T, S) bool."""
    groups = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    scores = (q.float() @ k.float().transpose(-1, -2)) * kind.scale
    if kind.softcap:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if kind.sinks is not None:
        sinks = kind.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = F.dropout(torch.softmax(scores, dim=-1), kind.dropout)[..., : k.shape[-2]]
    return (weights @ v.float()).to(v.dtype)


def _paged_plain(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, step: Decode, kind: AttentionSpec
) -> Tensor:
    """`paged_attention` in plain torch, through a dense copy of the blocks that the tables list.

    Nothing is read back from the device.
    """
    positions, tables = step.positions, step.block_tables.long()
    n, heads, length = q.shape[0], k.shape[1], tables.shape[1] * BLOCK_TOKENS
    blocks = tables.gather(1, (positions // BLOCK_TOKENS)[:, None])[:, 0]
    offsets = positions % BLOCK_TOKENS
    if q.device.type == "cpu":
        keys[blocks, :, :, offsets] = k
        values[blocks, :, offsets] = v
        dense_k = keys[tables].permute(0, 2, 1, 4, 3).reshape(n, heads, length, -1)
        dense_v = values[tables].permute(0, 2, 1, 3, 4).reshape(n, heads, length, -1)
    else:
        keys[blocks, offsets] = k
        values[blocks, offsets] = v
        dense_k = keys[tables].permute(0, 3, 1, 2, 4).reshape(n, heads, length, -1)
        dense_v = values[tables].permute(0, 3, 1, 2, 4).reshape(n, heads, length, -1)
    places = torch.arange(length, device=q.device)[None]
    seen = places <= positions[:, None]
    if kind.window:
        seen = seen & (places > positions[:, None] - kind.window)
    # A block may hold anything past its row's end: zero weight does not stop a NaN.
    dense_v = dense_v.masked_fill(~seen[:, None, :, None], 0.0)
    return _weighted(q[:, :, None], dense_k, dense_v, seen[:, None, None], kind)[:, :, 0]


def _varlen_kernel_fits(q: Tensor, v: Tensor, kind: AttentionSpec) -> bool:
    """Whether torch's variable-length flash attention computes this layer."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and kind.softcap == 0
        and kind.sinks is None
        and kind.dropout == 0
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
    )


def _varlen_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Packed,
    kind: AttentionSpec,
    key_ends: Tensor | None = None,
) -> Tensor:
    """`key_ends`, (B + 1,) int32, are the keys' own where they are more than the queries, which are
    a sequence's last (flash attention counts a causal mask from the end of both)."""
    from torch.nn.attention.varlen import varlen_attn  # imports the GPU kernels

    # The kernels share a key among its queries without copies; newer versions ask to be told.
    is_grouped = q.shape[1] != k.shape[1]
    shared: dict[str, Any] = {"enable_gqa": True} if is_grouped and _asks_for_groups() else {}
    window = (kind.window - 1, 0) if kind.window else (-1, 0)
    # The kernels need a head's numbers side by side, not heads or tokens.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = varlen_attn(
        q, k, v, step.cu_seqlens, step.cu_seqlens if key_ends is None else key_ends,
        step.max_length, step.max_length,
        scale=kind.scale, window_size=window, **shared,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


@cache
def _asks_for_groups() -> bool:
    """Whether this torch has to be told that keys have fewer heads than queries; 2.11 has not."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
