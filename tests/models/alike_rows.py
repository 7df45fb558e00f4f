"""Random tokens in rows that begin alike: answers to one prompt, and prompts among them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tandem.types import TokenBatch

from .families import VOCABULARY

GROUPS = {
    "one": ((7, (3,)),),
    "pair": ((16, (1, 5)), (5, (2,))),
    "ragged": ((13, (9, 1, 17, 4)), (3, (6,)), (33, (2, 2, 5)), (1, (4, 12))),
    "nine": ((18, (1, 2, 3, 4, 5, 6, 7, 8, 9)),),
}
"""Per group of rows: tokens of the prompt, and of each response."""


PROMPTS = {
    # A system prompt of 24 tokens: 16 of them are shared.
    "one answer": (("s", 7, (5,)), ("s", 11, (1,)), ("s", 3, (9,))),
    # Of 40 tokens and of 24, which the other begins with; and a prompt without any.
    "in each other": (("st", 5, (4, 2)), ("s", 8, (3,)), ("", 20, (6, 1, 2)), ("st", 9, (7,))),
    # A prompt that is the beginning itself, whole blocks of it, with several answers and with one.
    "nothing of their own": (("t", 0, (3, 8)), ("t", 17, (2,)), ("ts", 0, (5,)), ("t", 1, (1, 1))),
}
"""Per prompt: what it begins with, tokens of its own, and of each answer."""
ALIKE = {"s": 24, "t": 16}


def grouped_batch(groups: Sequence[tuple[int, Sequence[int]]], seed: int = 0) -> TokenBatch:
    """Groups of rows with one prompt each."""
    ids = _Tokens(seed)
    prompts = ((ids(length), answers) for length, answers in groups)
    return _mixed([[(prompt, ids(n)) for n in answers] for prompt, answers in prompts])


def beginning_batch(prompts: Sequence[tuple[str, int, Sequence[int]]]) -> TokenBatch:
    """Prompts of which some begin alike."""
    ids = _Tokens(3)
    alike = {name: ids(count) for name, count in ALIKE.items()}
    parts = []
    for begins, own, answers in prompts:
        prompt = torch.cat([*(alike[name] for name in begins), ids(own)])
        parts.append([(prompt, ids(count)) for count in answers])
    return _mixed(parts)


class _Tokens:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, count: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (count,), generator=self._generator)


def _mixed(parts: Iterable[Sequence[tuple[Tensor, Tensor]]]) -> TokenBatch:
    """The prompts and answers of all parts, mixed with each other."""
    rows = [row for turn in itertools.zip_longest(*parts) for row in turn if row is not None]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    token_ids = torch.zeros((len(rows), width), dtype=torch.long)
    real, answered = (torch.zeros_like(token_ids, dtype=torch.bool) for _ in range(2))
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        token_ids[i, :end] = torch.cat([prompt, answer])
        real[i, :end] = True
        answered[i, len(prompt) : end] = True
    return TokenBatch(token_ids, real, answered)


BATCHES = {
    "answers to a prompt": grouped_batch(GROUPS["ragged"]),
    "prompts in each other": beginning_batch(PROMPTS["in each other"]),
}
