"""Batches of answers for tests of reward functions."""

from __future__ import annotations

from typing import Any

from tandem.rewards.scoring import Answers


def answers_of(completions: list[str], **columns: list[Any]) -> Answers:
    """Answers to the prompts q0, q1, ... from the rows d.jsonl:1, :2, ..."""
    count = len(completions)
    prompts = [f"q{i}" for i in range(count)]
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    sources = [f"d.jsonl:{i + 1}" for i in range(count)]
    rows = [{name: values[i] for name, values in columns.items()} for i in range(count)]
    return Answers(prompts, completions, messages, rows, sources)
