"""A reward for word problems: 1 if the answer's last number is the right one, else 0.

Use it as `--ppo.reward-function tandem.train.exact_number:reward` on data with an `answer` column
(GSM8K's `... #### 42` is read too).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def last_number(text: str) -> float | None:
    """The last number written in `text` (thousands commas allowed), or None."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def reward(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 where the completion's last number equals the answer's, 0.0 where not.

    A row whose `answer` holds no number cannot be judged: None.
    """
    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        wanted, found = last_number(str(expected)), last_number(completion)
        if wanted is None:
            rewards.append(None)
        else:
            right = found is not None and abs(found - wanted) <= 1e-6 * max(1.0, abs(wanted))
            rewards.append(float(right))
    return rewards
