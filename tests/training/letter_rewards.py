"""Reward functions that runs in tests load by name."""

from __future__ import annotations


def starts_early(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """1 where an answer's first character is before m: groups are mixed, or all alike."""
    return [float(text[:1] < "m") for text in completions]
