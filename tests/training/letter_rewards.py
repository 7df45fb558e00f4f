"""Reward functions that runs in tests load by name."""

from __future__ import annotations


def starts_early(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """1 where an answer's first character is before m: groups are mixed, or all alike."""
    return [float(text[:1] < "m") for text in completions]


def early_share(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The share of an answer's characters that are before m: few answers are alike."""
    return [sum(c < "m" for c in text) / max(1, len(text)) for text in completions]


def early_letters(
    prompts: list[str], completions: list[str], **columns: object
) -> list[float | None]:
    """Share of letters that are a to m: something a tiny policy can learn."""
    return [sum("a" <= char <= "m" for char in text) / max(1, len(text)) for text in completions]
