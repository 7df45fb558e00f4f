"""How many vocabulary logits may be held at once, in training and in generation.

(N, V) logits are the largest tensor of a forward: 1,000 tokens of a vocabulary of 151,936 take 580
MiB in float32. Every part that makes them asks here how many rows it may make at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUDGET_BYTES = {"cpu": 2**26, "cuda": 2**29}
"""Most bytes of one tensor of logits, by kind of device; the CPU's for any other.

Of 64 MiB a CPU's products are as fast as of more. A GPU loses by small chunks: each makes a whole
gradient of the vocabulary head, which is read and written once more per chunk.
"""


def rows_at_once(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of logits (n, V) that stay within the device's budget; at least one."""
    budget = BUDGET_BYTES.get(device.type, BUDGET_BYTES["cpu"])
    return max(1, budget // (vocabulary * dtype.itemsize))


TILE_BYTES = 2**25
"""Bytes of the logits of all rows for one tile of the vocabulary on a GPU: within the second-level
cache of those that our kernels are for (40 MB and more)."""


def tile_columns(rows: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Columns of the logits (rows, V) that are made at once on a GPU: a multiple of 1,024, so that
    a tile's product fills the GPU, or all."""
    fit = TILE_BYTES // (max(1, rows) * dtype.itemsize) // 1024 * 1024
    return min(vocabulary, max(1024, fit))


@dataclass(frozen=True, slots=True)
class HeadProduct:
    """A vocabulary head as one product and what follows it, so that it can be made in tiles.

    weight: (V, D). bias: (V,).
    after: what the head does with its product, to each number by itself; None: nothing.
    """

    weight: Tensor
    bias: Tensor | None = None
    after: Callable[[Tensor], Tensor] | None = None
