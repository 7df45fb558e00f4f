"""What has no CPU kernel in torch: flash attention over sequences of any length, histograms of
whole numbers, and Triton's launches, by Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.simulated_gpu.cuda import CUDAGraph

_ATEN = torch.library.Library("aten", "IMPL")


def install() -> None:
    """From now on the device has them."""
    _ATEN.impl("_flash_attention_forward", _flash, "CUDA")
    _ATEN.impl("_flash_attention_backward", _flash_backward, "CUDA")
    _ATEN.impl("histc", _histc, "CUDA")
    if os.environ.get("TRITON_INTERPRET") == "1":
        _interpret()


def _flash(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int,
    max_k: int, dropout: float, is_causal: bool, debug: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    parts = _parts(query, key, value, ends_q, ends_k, max_q, max_k)
    assert is_causal or window_size_right == 0
    q, k, v = query.cpu(), key.cpu(), value.cpu()
    out = torch.full_like(q, torch.nan)
    sums = torch.full((q.shape[1], q.shape[0]), torch.nan)
    for new, old in parts:
        attended = _attention(q[new], k[old], v[old], scale, window_size_left)
        out[new], sums[:, new] = attended[0].to(q.dtype), attended[1]
    none = torch.zeros((), device=query.device)
    state = torch.zeros(2, dtype=torch.int64, device=query.device)
    return out.to(query.device), sums.to(query.device), state, none, none.clone()


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
    ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, dropout: float, is_causal: bool,
    state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    parts = _parts(query, key, value, ends_q, ends_k, max_q, max_k)
    host, back = [x.cpu() for x in (query, key, value)], grad.cpu().float()

    def work() -> tuple[Tensor, ...]:
        q, k, v = (x.detach().float().requires_grad_() for x in host)
        made = [_attention(q[a], k[b], v[b], scale, window_size_left)[0] for a, b in parts]
        return torch.autograd.grad(made, (q, k, v), [back[new] for new, _ in parts])

    with ThreadPoolExecutor(1) as other:  # autograd is off in this one, inside an operation
        found = other.submit(work).result()
    return tuple(x.to(query.dtype).to(query.device) for x in found)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Of whole numbers too, which torch's CPU kernel does not count."""
    return torch.histc(x.cpu().float(), bins, min, max).to(x.dtype).to(x.device)


def _parts(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int,
    max_k: int,
) -> list[tuple[slice, slice]]:  # fmt: skip
    """Each sequence's queries and keys; what the GPU's kernel does not take is an error."""
    for x in (query, key, value):
        if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type on a GPU")
        if x.stride(-1) != 1 or x.shape[-1] % 8 or x.shape[-1] > 256:
            raise RuntimeError("a head must lie together, and its width be a multiple of 8")
    for x in (ends_q, ends_k):
        if not x.is_cuda or x.dtype != torch.int32 or not x.is_contiguous():
            raise RuntimeError("cu_seqlens must be int32 on the GPU, and lie together")
    new, old = ([slice(*ends) for ends in pairwise(x.tolist())] for x in (ends_q, ends_k))
    if max(s.stop - s.start for s in new) > max_q or max(s.stop - s.start for s in old) > max_k:
        raise RuntimeError("a sequence is longer than max_q or max_k")
    return [pair for pair in zip(new, old, strict=True) if pair[0].stop > pair[0].start]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """The last T of S tokens, in float32: (T, H, D) and the logarithms of sums (H, T)."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = (q @ k.transpose(1, 2)) * (scale or q.shape[-1] ** -0.5)
    T, S = scores.shape[1:]
    at, keys = torch.arange(S - T, S)[:, None], torch.arange(S)
    seen = keys <= at
    if window is not None and window >= 0:
        seen = seen & (keys >= at - window)
    scores = scores.masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(0, 1), torch.logsumexp(scores, -1)


def _interpret() -> None:
    """Launches read and write the device's memory where it lies, and are part of graphs."""
    from triton.runtime import interpreter

    run: Callable[..., None] = interpreter.GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        def work() -> None:
            run(executor, *map(_on_host, args), **{k: _on_host(v) for k, v in kwargs.items()})

        work()
        if CUDAGraph.recording is not None:
            CUDAGraph.recording.launched(work)

    interpreter.GridExecutor.__call__ = launch


def _on_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.is_cuda:
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
    return torch.ops.simulated_gpu.on_host(value.detach())
