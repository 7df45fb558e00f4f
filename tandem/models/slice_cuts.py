"""How the ranks of tensor-parallel generation divide a weight's outputs or inputs.

A rank has an equal share of the query heads and of the inner width (arXiv:1909.08053), and the
key/value heads that its queries read: an equal share of them too, or, where there are fewer than
ranks, a copy of the one. What a fused weight joins is divided part by part.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.models.blocks import Heads
from tandem.ops.spans import Spans

Cut = Callable[[int, Heads, int], Spans]
"""Takes the number of a weight's outputs, its layer's heads and the number of ranks."""


def evenly(size: int, heads: Heads, parts: int) -> Spans:
    """Equal shares in order: heads, each with all its rows, or an inner width."""
    share = size // parts
    return [[(i * share, (i + 1) * share)] for i in range(parts)]


def by_key_heads(size: int, heads: Heads, parts: int) -> Spans:
    """Keys or values: those that a rank's queries read."""
    width = size // heads.keys
    return [[(first * width, last * width)] for first, last in _key_heads(heads.keys, parts)]


def queries_keys_values(size: int, heads: Heads, parts: int) -> Spans:
    """All queries, then all keys, then all values, in one weight."""
    queries, keys = heads.queries, heads.keys
    width = size // (queries + 2 * keys)
    of_rank = zip(evenly(queries, heads, parts), _key_heads(keys, parts), strict=True)
    spans: list[list[tuple[int, int]]] = []
    for asking, (first, last) in of_rank:
        starts = queries, queries + keys
        held = [*asking, *((start + first, start + last) for start in starts)]
        spans.append([(width * start, width * end) for start, end in held])
    return spans


def queries_and_shared_keys(size: int, heads: Heads, parts: int) -> Spans:
    """StarCoder's: queries, then the one key and the one value; or each head's three in turn."""
    cut = queries_keys_values if heads.keys < heads.queries else evenly
    return cut(size, heads, parts)


def in_halves(size: int, heads: Heads, parts: int) -> Spans:
    """Two layers of one width, gate and up, in one weight: a share of either."""
    return _in_runs(size, 2, parts)


def in_groups(size: int, heads: Heads, parts: int) -> Spans:
    """Falcon's: some queries, then the key and the value that they read, and so on. Without a group
    for each rank, a share of a group's queries with a copy of its key and value."""
    width = size // (heads.queries + 2 * heads.keys)
    asking = heads.queries // heads.keys
    group = width * (asking + 2)
    if heads.keys >= parts:
        return evenly(group * heads.keys, heads, parts)
    ranks = parts // heads.keys  # of a group
    spans: list[list[tuple[int, int]]] = []
    for i in range(parts):
        start, [(first, last)] = i // ranks * group, evenly(width * asking, heads, ranks)[i % ranks]
        spans.append([(start + first, start + last), (start + width * asking, start + group)])
    return spans


def in_quarters(size: int, heads: Heads, parts: int) -> Spans:
    """CodeGen's heads, which lie in four runs: a share of each run."""
    return _in_runs(size, 4, parts)


def queries_values_keys_in_quarters(size: int, heads: Heads, parts: int) -> Spans:
    """CodeGen's: four times the queries of a run of heads, their values, their keys."""
    return _in_runs(size, 12, parts)


def _in_runs(size: int, runs: int, parts: int) -> Spans:
    """An equal share of each of `runs` runs of one length."""
    run = size // runs
    share = run // parts
    return [
        [(run * n + i * share, run * n + (i + 1) * share) for n in range(runs)]
        for i in range(parts)
    ]


def _key_heads(keys: int, parts: int) -> list[tuple[int, int]]:
    """First and last of the key heads that each rank's queries read."""
    if keys >= parts:
        return [(i * keys // parts, (i + 1) * keys // parts) for i in range(parts)]
    return [(i * keys // parts, i * keys // parts + 1) for i in range(parts)]
