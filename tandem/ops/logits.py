"""How many vocabulary logits may be held at once, in training and in generation.

(N, V) logits are the largest tensor of a forward: 1,000 tokens of a vocabulary of 151,936 take 580
MiB in float32. Every part that makes them asks here how many rows it may make at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BUDGET_BYTES = {"cpu": 2**26, "cuda": 2**29}
"""Most bytes of one tensor of logits, by kind of device; the CPU's for any other.

Of 64 MiB a CPU's products are as fast as of more. A GPU loses by small chunks: each makes a whole
gradient of the vocabulary head, which is read and written once more per chunk.
"""


def rows_at_once(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of logits (n, V) that stay within the device's budget; at least one."""
    budget = BUDGET_BYTES.get(device.type, BUDGET_BYTES["cpu"])
    return max(1, budget // (vocabulary * dtype.itemsize))
