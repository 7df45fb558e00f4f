"""Sizes of work and memory that formulas need as well as code. No torch."""

from __future__ import annotations

BLOCK_TOKENS = 16
"""Tokens of a block of KV memory."""
PREFILL_TOKENS = 4096
"""Tokens of prompts that run through the model at once."""
SNAPSHOT_SLOTS = 4
"""Beginnings of prompts whose states generation keeps side by side, where layers keep states."""
SHARE_TO_PACK = 0.25
"""Of the free memory, what a copy of the weights that decoding reads may take."""
