# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""Keys and values of packed prompts into paged KV memory on a GPU: one kernel, nothing waits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.ops.attention_context import BLOCK_TOKENS
from tandem.ops.jit_gpu import jit, tl, triton


@torch.library.custom_op("tandem::store_kv_gpu", mutates_args=("keys", "values"))
def store_kv_gpu(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, cu_seqlens: Tensor
) -> None:
    """Keep k (N, H, Dk) and v (N, H, Dv), of the memory's type, where the sequences' tables say.

    Args:
        keys, values: (blocks, 16, H, D) of a layer.
        block_tables: (B, W) int32. cu_seqlens: (B + 1,) int32.
    """
    n, heads, key_width = k.shape
    sequences = len(cu_seqlens) - 1
    if n == 0:
        return
    k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (k, v))
    _store_token[(n,)](
        k, v, keys, values, block_tables, cu_seqlens, k.stride(0), v.stride(0),
        block_tables.stride(0), sequences, STEPS=max(1, (sequences - 1).bit_length()),
        K_NUMBERS=heads * key_width, V_NUMBERS=heads * v.shape[2],
        PAD=triton.next_power_of_2(heads * max(key_width, v.shape[2])), BLOCK=BLOCK_TOKENS,
        enable_fp_fusion=True, num_warps=4,
    )  # fmt: skip


@store_kv_gpu.register_fake
def _(*_: Any) -> None:
    return None


# fmt: off
@jit
def _store_token(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, keys_ptr, values_ptr, tables_ptr, ends_ptr, k_row, v_row, table_row, sequences,
    STEPS: tl.constexpr, K_NUMBERS: tl.constexpr, V_NUMBERS: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # fmt: on
    """A token: its sequence by halving, its block by the table."""
    token = tl.program_id(0)
    row, after = token * 0, token * 0 + sequences  # the sequence is in [row, after)
    for _ in range(STEPS):
        middle = (row + after) // 2
        later = (tl.load(ends_ptr + middle) <= token) & (middle > row)
        row, after = tl.where(later, middle, row), tl.where(later, after, middle)
    place = token - tl.load(ends_ptr + row)
    block = tl.load(tables_ptr + row.to(tl.int64) * table_row + place // BLOCK).to(tl.int64)
    at = block * BLOCK + place % BLOCK
    d = tl.arange(0, PAD)
    k = tl.load(k_ptr + token.to(tl.int64) * k_row + d, mask=d < K_NUMBERS)
    tl.store(keys_ptr + at * K_NUMBERS + d, k, mask=d < K_NUMBERS)
    v = tl.load(v_ptr + token.to(tl.int64) * v_row + d, mask=d < V_NUMBERS)
    tl.store(values_ptr + at * V_NUMBERS + d, v, mask=d < V_NUMBERS)
