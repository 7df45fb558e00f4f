# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""Attention of decoding over paged KV memory on a GPU, in Triton.

A row's tokens are cut into chunks of CHUNK from its first on. `_attend_chunk` keeps the new token's
key and value and sums up each chunk by itself; `_merge_chunks` puts a row's chunks together from
the first to the last. What is summed in which order follows from the row's own length, so a row's
result is the same to the bit whatever stands beside it. Lengths and tables are read on the device:
a call waits for nothing and can be captured in a CUDA graph.

Not yet run on a GPU. The tests run the kernels in Triton's interpreter on a CPU and compile them
for an H100; their speed, and their arithmetic in bfloat16 on tensor cores, are untested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.errors import GenerationError
from tandem.ops.attention_context import BLOCK_TOKENS, AttentionSpec, Decode, KVMemory
from tandem.ops.jit_gpu import jit, padded, tl, triton
from tandem.ops.rotary_gpu import turned

CHUNK = 256
"""Tokens that are summed up apart from the others; a fixed number, or results would change."""


class AddressedMemory(KVMemory):
    """KV memory by address, so that a graph captured over it outlives the memory it was made on.

    Its layers are no keys and values but (1,) int64 tensors on the device that say where those
    begin. `paged_attention_gpu` understands them, and nothing else does.
    """

    def __init__(self, memory: KVMemory) -> None:
        """Points at `memory`, all of whose layers have one type."""
        keys = memory.layers[0][0]
        self.num_blocks, self.shapes, self.dtype = memory.num_blocks, memory.shapes, keys.dtype
        self._addresses = torch.zeros(
            (len(memory.layers), 2, 1), dtype=torch.int64, device=keys.device
        )
        self.layers = [(layer[0], layer[1]) for layer in self._addresses]
        self._target: KVMemory | None = None
        self.point_at(memory)

    def point_at(self, memory: KVMemory) -> None:
        """From the next launch on it is that memory, of the same layers and type."""
        if memory is self._target:
            return
        self._target, self.num_blocks = memory, memory.num_blocks
        addresses = [[[t.data_ptr()] for t in layer] for layer in memory.layers]
        self._addresses.copy_(torch.tensor(addresses))

    def forget(self) -> None:
        """Hold on to no memory: what it points at may be freed."""
        self._target = None


def paged_attention_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    step: Decode,
    kind: AttentionSpec,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """One new token per row: keep its key and value, attend to the row's tokens so far.

    Rows whose tables name the same block for the new token overwrite each other there.

    Args:
        q: (n, Hq, Dk). k: (n, Hkv, Dk). v: (n, Hkv, Dv). Float32, bfloat16 or float16.
        keys, values: (blocks, 16, Hkv, Dk) and (blocks, 16, Hkv, Dv), written at each row's
            position; or what the layers of an AddressedMemory hold, if that is the step's.
        rotation: cos and sin (n, R), by which the first R columns of q and k turn first.
    Returns:
        (n, Hq, Dv) in v's type.
    Raises:
        GenerationError: there is no Triton.
    """
    memory = step.memory
    by_address = isinstance(memory, AddressedMemory)
    dtype = memory.dtype if isinstance(memory, AddressedMemory) else keys.dtype
    attend = _paged_by_address if by_address else _paged
    cos, sin = (None, None) if rotation is None else (x.to(dtype).contiguous() for x in rotation)
    out: Tensor = attend(
        q.to(dtype), k.to(dtype), v.to(dtype), keys, values, step.block_tables, step.positions,
        kind.scale, kind.window, kind.softcap, kind.sinks, cos, sin,
    )  # fmt: skip
    return out.to(v.dtype)


def _paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """Launch both kernels on q, k, v of the memory's type."""
    if triton is None:
        raise GenerationError(
            "decoding on a GPU must have Triton; got no module of that name. Install triton, "
            "which torch for CUDA comes with."
        )
    q, k, v, tables = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, tables))
    n, query_heads, key_width = q.shape
    heads, value_width = v.shape[1:]
    group = query_heads // heads
    chunks = triton.cdiv(tables.shape[1] * BLOCK_TOKENS, CHUNK)
    out = torch.empty(n, query_heads, value_width, dtype=v.dtype, device=v.device)
    if n == 0:
        return out
    sums = torch.empty(n, heads, chunks, group, value_width, device=v.device)
    tops = torch.empty(n, heads, chunks, group, 2, device=v.device)
    wide = max(key_width, value_width) * v.element_size() > 256  # bytes of a key, in shared memory
    _attend_chunk[(n, heads, chunks)](
        q, k, v, keys, values, tables, positions, sums, tops,
        q if cos is None else cos, q if sin is None else sin, scale, softcap,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        tables.stride(0), chunks,
        HEADS=heads, GROUP=group, GROUP_PAD=padded(group), CHUNK_TOKENS=CHUNK,
        TILE=32 if wide else 64, BLOCK=BLOCK_TOKENS, WINDOW=window, CAPPED=softcap != 0,
        K_WIDTH=key_width, K_PAD=padded(key_width),
        V_WIDTH=value_width, V_PAD=padded(value_width),
        BY_ADDRESS=keys.dtype == torch.int64, TURNING=0 if cos is None else cos.shape[-1],
        enable_fp_fusion=True, num_warps=4, num_stages=2 if wide else 3,
    )  # fmt: skip
    _merge_chunks[(n, query_heads)](
        sums, tops, positions, positions if sinks is None else sinks, out, chunks,
        HEADS=heads, GROUP=group, CHUNK_TOKENS=CHUNK, WINDOW=window,
        V_WIDTH=value_width, V_PAD=padded(value_width), SINKS=sinks is not None,
        enable_fp_fusion=True, num_warps=2,
    )  # fmt: skip
    return out


# An operation of its own, so that torch.compile leaves it whole. It writes no tensor that torch
# knows of: the memory is behind an address.
_paged_by_address = torch.library.custom_op(
    "tandem::paged_attention_by_address", _paged, mutates_args=()
)


@_paged_by_address.register_fake
def _paged_shape(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=v.dtype, device=v.device)


# fmt: off
@jit
def _attend_chunk(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, tables_ptr, positions_ptr, sums_ptr, tops_ptr,
    cos_ptr, sin_ptr, scale, softcap, q_row, q_head, k_row, k_head, v_row, v_head, table_row,
    chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, K_WIDTH: tl.constexpr, K_PAD: tl.constexpr,
    V_WIDTH: tl.constexpr, V_PAD: tl.constexpr, BY_ADDRESS: tl.constexpr,
    TURNING: tl.constexpr,
):
    # fmt: on
    """One chunk of one row for the GROUP query heads of one key head.

    Leaves sum(2^(score - top) * value) in sums, and top and sum(2^(score - top)) in tops; scores
    are in units of log 2. The chunk of the new token takes it from k and v, last, and stores it.
    """
    if BY_ADDRESS:
        keys_ptr = tl.load(keys_ptr).to(tl.pointer_type(k_ptr.dtype.element_ty))
        values_ptr = tl.load(values_ptr).to(tl.pointer_type(v_ptr.dtype.element_ty))
        keys_ptr, values_ptr = tl.multiple_of(keys_ptr, 16), tl.multiple_of(values_ptr, 16)
    row, head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    last = tl.load(positions_ptr + row).to(tl.int32)
    first = tl.maximum(last - WINDOW + 1, 0) if WINDOW else 0
    begin = chunk * CHUNK_TOKENS
    if (begin <= last) & (begin + CHUNK_TOKENS > first):
        g, kd, vd = tl.arange(0, GROUP_PAD), tl.arange(0, K_PAD), tl.arange(0, V_PAD)
        q_at = q_ptr + row * q_row + (head * GROUP + g[:, None]) * q_head + kd[None]
        inside = (g < GROUP)[:, None] & (kd < K_WIDTH)[None]
        q = _turned_at(q_at, inside, kd[None], cos_ptr, sin_ptr, row, TURNING)
        # Below any score, yet finite: of two of them the difference is 0 and not NaN.
        top = tl.full([GROUP_PAD], -1.0e30, tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        summed = tl.zeros([GROUP_PAD, V_PAD], tl.float32)
        end = tl.minimum(begin + CHUNK_TOKENS, last)
        for tile in range(tl.maximum(begin, first // TILE * TILE), end, TILE):
            t = tile + tl.arange(0, TILE)
            seen = (t >= first) & (t < end)
            block = tl.load(tables_ptr + row * table_row + t // BLOCK, mask=seen, other=0)
            place = (block.to(tl.int64) * BLOCK + t % BLOCK) * HEADS + head
            k_at = keys_ptr + place[:, None] * K_WIDTH + kd[None]
            k = tl.load(k_at, mask=seen[:, None] & (kd < K_WIDTH)[None], other=0.0)
            scores = _scored(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap, CAPPED)
            scores = tl.where(seen[None], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(top - higher)
            v_at = values_ptr + place[:, None] * V_WIDTH + vd[None]
            v = tl.load(v_at, mask=seen[:, None] & (vd < V_WIDTH)[None], other=0.0)
            part = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            summed = summed * shrink[:, None] + part
            total = total * shrink + tl.sum(weights, 1)
            top = higher
        if last < begin + CHUNK_TOKENS:
            k_at = k_ptr + row * k_row + head * k_head + kd
            k = _turned_at(k_at, kd < K_WIDTH, kd, cos_ptr, sin_ptr, row, TURNING)
            v = tl.load(v_ptr + row * v_row + head * v_head + vd, mask=vd < V_WIDTH, other=0.0)
            block = tl.load(tables_ptr + row * table_row + last // BLOCK)
            place = (block.to(tl.int64) * BLOCK + last % BLOCK) * HEADS + head
            tl.store(keys_ptr + place * K_WIDTH + kd, k, mask=kd < K_WIDTH)
            tl.store(values_ptr + place * V_WIDTH + vd, v, mask=vd < V_WIDTH)
            dots = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None], 1)
            score = _scored(dots, scale, softcap, CAPPED)
            higher = tl.maximum(top, score)
            weight, shrink = tl.exp2(score - higher), tl.exp2(top - higher)
            summed = summed * shrink[:, None] + weight[:, None] * v.to(tl.float32)[None]
            total = total * shrink + weight
            top = higher
        at = ((row * HEADS + head) * chunks + chunk) * GROUP + g
        sums_at = sums_ptr + at[:, None] * V_WIDTH + vd[None]
        tl.store(sums_at, summed, mask=(g < GROUP)[:, None] & (vd < V_WIDTH)[None])
        tl.store(tops_ptr + at * 2, top, mask=g < GROUP)
        tl.store(tops_ptr + at * 2 + 1, total, mask=g < GROUP)


# fmt: off
@jit
def _turned_at(  # type: ignore[no-untyped-def]
    at, inside, d, cos_ptr, sin_ptr, row, TURNING: tl.constexpr,
):
    # fmt: on
    """Columns d at an address, by the row's rotary position where TURNING columns turn."""
    x = tl.load(at, mask=inside, other=0.0)
    if TURNING:
        turns, half = d < TURNING, TURNING // 2
        c = tl.load(cos_ptr + row * TURNING + d, mask=turns, other=1.0)
        s = tl.load(sin_ptr + row * TURNING + d, mask=turns, other=0.0)
        far = tl.load(at + tl.where(d < half, half, -half), mask=inside & turns, other=0.0)
        x = tl.where(turns, turned(x, far, c, s, tl.where(d < half, -1.0, 1.0)), x)
    return x


@jit
def _scored(dots, scale, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores in units of log 2 from the products of queries and keys."""
    scores = dots * scale
    if CAPPED:  # softcap * tanh(scores / softcap)
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores * 1.4426950408889634


# fmt: off
@jit
def _merge_chunks(  # type: ignore[no-untyped-def]
    sums_ptr, tops_ptr, positions_ptr, sinks_ptr, out_ptr, chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CHUNK_TOKENS: tl.constexpr, WINDOW: tl.constexpr,
    V_WIDTH: tl.constexpr, V_PAD: tl.constexpr, SINKS: tl.constexpr,
):
    # fmt: on
    """One query head of one row: its chunks in order; a sink weighs in with no value."""
    row, query_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    last = tl.load(positions_ptr + row).to(tl.int32)
    first = tl.maximum(last - WINDOW + 1, 0) if WINDOW else 0
    vd = tl.arange(0, V_PAD)
    top, total = -1.0e30, 0.0
    if SINKS:
        top, total = tl.load(sinks_ptr + query_head).to(tl.float32) * 1.4426950408889634, 1.0
    summed = tl.zeros([V_PAD], tl.float32)
    for chunk in range(first // CHUNK_TOKENS, last // CHUNK_TOKENS + 1):
        head, g = query_head // GROUP, query_head % GROUP
        at = ((row * HEADS + head) * chunks + chunk) * GROUP + g
        chunk_top = tl.load(tops_ptr + at * 2)
        higher = tl.maximum(top, chunk_top)
        old, new = tl.exp2(top - higher), tl.exp2(chunk_top - higher)
        chunk_sum = tl.load(sums_ptr + at * V_WIDTH + vd, mask=vd < V_WIDTH, other=0.0)
        summed = summed * old + chunk_sum * new
        total = total * old + tl.load(tops_ptr + at * 2 + 1) * new
        top = higher
    at = (row * HEADS * GROUP + query_head) * V_WIDTH + vd
    tl.store(out_ptr + at, (summed / total).to(out_ptr.dtype.element_ty), mask=vd < V_WIDTH)
