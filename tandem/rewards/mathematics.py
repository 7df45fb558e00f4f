"""A reward by Math-Verify: whether two mathematical expressions are equal.

Math-Verify's own time limits use SIGALRM, which works in a process's main thread alone and, where
its errors are swallowed, scores 0 in silence. They are off here: the reward worker has the
deadline, and whatever Math-Verify raises is counted as a failure.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that its limits are off


def reward(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 where the completion's expression equals the reference's, 0.0 where not.

    A row without a reference cannot be judged: None.

    Raises:
        ValueError: the reference holds no expression that Math-Verify reads.
    """
    scores: list[float | None] = []
    for completion, reference in zip(completions, answer, strict=True):
        if reference is None:
            scores.append(None)
            continue
        wanted = _reference(str(reference))
        found = parse(completion, parsing_timeout=None, raise_on_error=True)
        equal = verify(wanted, found, timeout_seconds=None, raise_on_error=True)
        scores.append(float(equal))
    return scores


def in_a_box(reference: str) -> str:
    """A completion that gives the reference as LaTeX."""
    if "\\boxed" in reference or "$" in reference:
        return reference
    tail = reference.rpartition("####")[2].strip()  # GSM8K's solutions
    return f"\\boxed{{{tail}}}"


reward.as_completion = in_a_box  # type: ignore[attr-defined]


@lru_cache(maxsize=10_000)
def _reference(text: str) -> list[Any]:
    wanted = parse(
        in_a_box(text), fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
    )
    if not wanted:
        raise ValueError(f"the reference {text[:60]!r} holds no expression")
    return wanted
