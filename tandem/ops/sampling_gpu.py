# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""Sampling on a GPU in two kernels: one pass over the logits, then a search where it leads.

`_sum_chunks` reads the logits once and leaves of each chunk its maximum and sums. `_draw_rows`
finds the chunk in which the cumulative probability passes the row's number, and in it the token.
Top-k and top-p are borders between logits, so no vocabulary is sorted: the border is the largest
number with enough tokens, or enough probability, at or above it, and is found bit by bit, like a
radix sort's first key, over logits that the first pass has left in the cache. What is summed in
which order follows from the row alone.

Numbers are summed in float32 within a chunk and in float64 across them, where the plain path sums
in float64: a token on whose edge the row's number falls to 1e-7 may be its neighbor's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.ops.jit_gpu import jit, tl, triton

CHUNK = 4096
"""Logits that one program sums up; a fixed number, or results would change."""


@torch.library.custom_op("tandem::sample_gpu", mutates_args=())
def sample_gpu(
    logits: Tensor,
    changed: Tensor | None,
    keys: Tensor,
    token_numbers: Tensor,
    stop_ids: Tensor,
    min_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    num_ids: int,
) -> tuple[Tensor, Tensor]:
    """Draw a token per row of softmax(changed / temperature), after truncation.

    Args:
        logits: (n, V), of which log-probs and entropy are told; -inf allowed.
        changed: (n, V), of which tokens are drawn; None: logits.
        keys, token_numbers: (n,) int64, what `dense.uniforms` makes each row's number of.
        stop_ids: tokens (m,) int64 that a row may not draw while its token number is below
            `min_new_tokens`.
        top_k, top_p, min_p: as `generation.sampler.truncated`; 0, 1.0 and 0.0 are off.
        num_ids: only tokens below it are drawn.
    Returns:
        tokens (n,) int64; (3, n) float32: log-prob under softmax(logits / temperature), log-prob
        under what was sampled from (NaN if nothing has probability), entropy of the former.
    """
    n, vocabulary = logits.shape
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    numbers = torch.empty((3, n), device=logits.device)
    if not n:
        return tokens, numbers
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    drawn = logits if changed is None else changed
    drawn = drawn if drawn.stride(1) == 1 else drawn.contiguous()
    chunks = triton.cdiv(vocabulary, CHUNK)
    sums = torch.empty((n, chunks, 4), device=logits.device)
    bans = stop_ids.shape[0] if min_new_tokens > 0 else 0
    bound = num_ids < vocabulary
    _sum_chunks[(n, chunks)](
        logits, drawn, stop_ids, token_numbers, sums, logits.stride(0), drawn.stride(0),
        vocabulary, num_ids, 1.0 / temperature, chunks, min_new_tokens, BOUND=bound, BANS=bans,
        TWO=changed is not None, CHUNK_LOGITS=CHUNK, enable_fp_fusion=True, num_warps=8,
    )  # fmt: skip
    counts = 0 < top_k < min(num_ids, vocabulary)
    truncates = counts or top_p < 1 or min_p > 0
    _draw_rows[(n,)](
        logits, drawn, keys, token_numbers, stop_ids, sums, tokens, numbers,
        logits.stride(0), drawn.stride(0), vocabulary, num_ids, 1.0 / temperature, chunks, n,
        top_k, top_p, min_p, min_new_tokens,
        BOUND=bound, BANS=bans, TOP_K=counts, TOP_P=top_p < 1, MIN_P=min_p > 0,
        TRUNCATES=truncates, CHUNK_LOGITS=CHUNK, CHUNKS_PAD=triton.next_power_of_2(chunks),
        enable_fp_fusion=True, num_warps=8,
    )  # fmt: skip
    return tokens, numbers


@sample_gpu.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    n = logits.shape[0]
    return logits.new_empty(n, dtype=torch.int64), logits.new_empty((3, n), dtype=torch.float32)


@jit
def _allowed(  # type: ignore[no-untyped-def]
    values, v, num_ids, stops_ptr, young, BOUND: tl.constexpr, BANS: tl.constexpr
):
    """Logits, with -inf for what no row, or a young one, may draw."""
    if BOUND:
        values = tl.where(v < num_ids, values, float("-inf"))
    for i in tl.static_range(BANS):
        values = tl.where((v == tl.load(stops_ptr + i)) & young, float("-inf"), values)
    return values


# fmt: off
@jit
def _sum_chunks(  # type: ignore[no-untyped-def]
    logits_ptr, drawn_ptr, stops_ptr, ages_ptr, sums_ptr, row_logits, row_drawn, vocabulary,
    num_ids, inverse, chunks, min_new, BOUND: tl.constexpr, BANS: tl.constexpr, TWO: tl.constexpr,
    CHUNK_LOGITS: tl.constexpr,
):
    # fmt: on
    """Of a row's chunk: top of the scaled logits, sums of e^(x - top) and of that times x - top;
    and the sum of e^(y - top) of what may be drawn, y, with a top of its own where TWO."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK_LOGITS + tl.arange(0, CHUNK_LOGITS)
    inside = v < vocabulary
    x = tl.load(logits_ptr + row * row_logits + v, mask=inside, other=float("-inf"))
    x = x.to(tl.float32) * inverse
    top = tl.max(x, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(x - shift)
    sum_x = tl.sum(tl.where(weights > 0, weights * (x - shift), weights * 0.0), 0)
    total = tl.sum(weights, 0)
    y = x
    if TWO:
        y = tl.load(drawn_ptr + row * row_drawn + v, mask=inside, other=float("-inf"))
        y = y.to(tl.float32) * inverse
    if BOUND or BANS:
        young = tl.load(ages_ptr + row) < min_new
        y = _allowed(y, v, num_ids, stops_ptr, young, BOUND, BANS)
    at = sums_ptr + (row * chunks + chunk) * 4
    # Log of the sum, so that chunks of what may be drawn need no common top.
    if TWO or BOUND or BANS:
        high = tl.max(y, 0)
        high = tl.where(high == float("-inf"), 0.0, high)
        kept = tl.log(tl.sum(tl.exp(y - high), 0)) + high
    else:
        kept = tl.log(total) + shift
    tl.store(at, top)
    tl.store(at + 1, total)
    tl.store(at + 2, sum_x)
    tl.store(at + 3, kept)


@jit
def _uniform(key, number):  # type: ignore[no-untyped-def]
    """`dense.uniforms`: splitmix64's finaliser, its constants as signed 64-bit numbers."""
    x = (key + (number + 1) * -7046029254386353131).to(tl.uint64, bitcast=True)
    x = ((x ^ (x >> 30)).to(tl.int64, bitcast=True) * -4658895280553007687)
    x = x.to(tl.uint64, bitcast=True)
    x = ((x ^ (x >> 27)).to(tl.int64, bitcast=True) * -7723592293110705685)
    x = x.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 31)) >> 11
    return x.to(tl.int64, bitcast=True).to(tl.float64) * 1.1102230246251565e-16


@jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """Float32 as an int32 in the same order; -0 and 0 are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


# fmt: off
@jit
def _share_above(  # type: ignore[no-untyped-def]
    at, v_end, num_ids, inverse, stops_ptr, young, floor, border, high, BOUND: tl.constexpr,
    BANS: tl.constexpr, COUNTS: tl.constexpr, CHUNK_LOGITS: tl.constexpr,
):
    # fmt: on
    """Of logits above both borders: how many (COUNTS: border itself counts), or e^(y - high)."""
    total = 0.0
    for begin in range(0, v_end, CHUNK_LOGITS):
        v = begin + tl.arange(0, CHUNK_LOGITS)
        y = tl.load(at + v, mask=v < v_end, other=float("-inf")).to(tl.float32) * inverse
        y = _allowed(y, v, num_ids, stops_ptr, young, BOUND, BANS)
        key = _ordered(y)
        if COUNTS:
            total += tl.sum(((key >= border) & (v < v_end)).to(tl.float32), 0)
        else:
            chosen = (key > border) & (key >= floor)
            total += tl.sum(tl.where(chosen, tl.exp(y - high), 0.0), 0)
    return total


# fmt: off
@jit
def _border(  # type: ignore[no-untyped-def]
    at, vocabulary, num_ids, inverse, stops_ptr, young, high, top_k, top_p, min_p,
    BOUND: tl.constexpr, BANS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    MIN_P: tl.constexpr, CHUNK_LOGITS: tl.constexpr,
):
    # fmt: on
    """The least logit, as `_ordered`, that top-k, then top-p, then min-p leave."""
    floor = -2147483648  # below every number
    if TOP_K:  # the largest border with top_k tokens at or above it, bit by bit
        border = -2147483648
        if _share_above(at, vocabulary, num_ids, inverse, stops_ptr, young, 0, 0, 0.0,
                        BOUND, BANS, True, CHUNK_LOGITS) >= top_k:
            border = 0
        for i in range(31):
            trial = border + (1 << (30 - i))
            if _share_above(at, vocabulary, num_ids, inverse, stops_ptr, young, 0, trial, 0.0,
                            BOUND, BANS, True, CHUNK_LOGITS) >= top_k:
                border = trial
        floor = border
    if TOP_P:  # the smallest border with less than top_p of the probability above it
        all_kept = _share_above(at, vocabulary, num_ids, inverse, stops_ptr, young, floor,
                                -2147483648, high, BOUND, BANS, False, CHUNK_LOGITS)
        goal = top_p * all_kept
        border = -2147483648  # at this border and below, the share is still top_p or more
        if _share_above(at, vocabulary, num_ids, inverse, stops_ptr, young, floor, -1,
                        high, BOUND, BANS, False, CHUNK_LOGITS) >= goal:
            border = 0
        for i in range(31):
            trial = border + (1 << (30 - i))
            if _share_above(at, vocabulary, num_ids, inverse, stops_ptr, young, floor, trial - 1,
                            high, BOUND, BANS, False, CHUNK_LOGITS) >= goal:
                border = trial
        floor = tl.maximum(floor, border)
    if MIN_P:
        highest = float("-inf")
        for begin in range(0, vocabulary, CHUNK_LOGITS):
            v = begin + tl.arange(0, CHUNK_LOGITS)
            y = tl.load(at + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
            y = _allowed(y * inverse, v, num_ids, stops_ptr, young, BOUND, BANS)
            highest = tl.maximum(highest, tl.max(y, 0))
        floor = tl.maximum(floor, _ordered(highest + tl.log(min_p)))
    return floor


# fmt: off
@jit
def _draw_rows(  # type: ignore[no-untyped-def]
    logits_ptr, drawn_ptr, keys_ptr, ages_ptr, stops_ptr, sums_ptr, tokens_ptr, numbers_ptr,
    row_logits, row_drawn, vocabulary, num_ids, inverse, chunks, rows, top_k, top_p, min_p,
    min_new, BOUND: tl.constexpr, BANS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    MIN_P: tl.constexpr, TRUNCATES: tl.constexpr, CHUNK_LOGITS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    # fmt: on
    """A row's token: chunk by its sums, then its place in the chunk."""
    row = tl.program_id(0).to(tl.int64)
    age = tl.load(ages_ptr + row)
    young = age < min_new
    c = tl.arange(0, CHUNKS_PAD)
    sums_at = sums_ptr + (row * chunks + c) * 4
    tops = tl.load(sums_at, mask=c < chunks, other=float("-inf"))
    totals = tl.load(sums_at + 1, mask=c < chunks, other=0.0)
    sums_x = tl.load(sums_at + 2, mask=c < chunks, other=0.0)
    kept = tl.load(sums_at + 3, mask=c < chunks, other=float("-inf"))
    top, high = tl.max(tops, 0), tl.max(kept, 0)
    scales = tl.exp(tops - top)
    total = tl.sum(totals * scales, 0)
    # sum of e^(x - top) (x - top): a chunk's own top is lower by tops - top
    moved = tl.where(totals * scales > 0, scales * (sums_x + totals * (tops - top)), 0.0)
    log_total = tl.log(total)
    entropy = log_total - tl.sum(moved, 0) / total
    at = drawn_ptr + row * row_drawn
    floor = -2147483648  # below every number
    masses = tl.exp(kept - high).to(tl.float64)
    if TRUNCATES:
        floor = _border(at, vocabulary, num_ids, inverse, stops_ptr, young, high, top_k, top_p,
                        min_p, BOUND, BANS, TOP_K, TOP_P, MIN_P, CHUNK_LOGITS)
        masses = tl.zeros([CHUNKS_PAD], tl.float64)
        for chunk in range(chunks):
            v = chunk * CHUNK_LOGITS + tl.arange(0, CHUNK_LOGITS)
            y = tl.load(at + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
            y = _allowed(y * inverse, v, num_ids, stops_ptr, young, BOUND, BANS)
            mass = tl.sum(tl.where(_ordered(y) >= floor, tl.exp(y - high), 0.0), 0)
            masses = tl.where(c == chunk, mass.to(tl.float64), masses)
    running = tl.cumsum(masses, 0)
    mass = tl.sum(masses, 0)
    goal = _uniform(tl.load(keys_ptr + row), age) * mass
    # The first chunk that passes the goal; where rounding leaves none, the last with any mass.
    passes = tl.where((running > goal) & (masses > 0), c, CHUNKS_PAD)
    chosen = tl.min(passes, 0)
    chosen = tl.where(chosen == CHUNKS_PAD, tl.max(tl.where(masses > 0, c, 0), 0), chosen)
    before = tl.sum(tl.where(c < chosen, masses, 0.0), 0)
    v = chosen * CHUNK_LOGITS + tl.arange(0, CHUNK_LOGITS)
    y = tl.load(at + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
    y = _allowed(y * inverse, v, num_ids, stops_ptr, young, BOUND, BANS)
    weights = tl.where(_ordered(y) >= floor, tl.exp(y - high), 0.0).to(tl.float64)
    passed = (before + tl.cumsum(weights, 0) > goal) & (weights > 0)
    token = tl.min(tl.where(passed, v, 2147483647), 0)
    last = tl.max(tl.where(weights > 0, v, 0), 0)
    token = tl.where(token == 2147483647, last, token)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    x = tl.load(logits_ptr + row * row_logits + token).to(tl.float32) * inverse
    drawn = tl.sum(tl.where(v == token, y, 0.0), 0)
    tl.store(numbers_ptr + row, x - top - log_total)
    # 0 times the sum is NaN where a logit was.
    sampled = drawn - high - tl.log(mass).to(tl.float32) + 0.0 * log_total
    tl.store(numbers_ptr + rows + row, sampled)
    tl.store(numbers_ptr + 2 * rows + row, entropy)
