"""How long the rows of a stage are: what its work and memory follow from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows that a stage trains on, or its prompts.

    count: rows; 0: not known. sequences: that a row puts through the model (a pair: 2). tokens,
    answered: mean of a row's tokens over all its sequences, and of those that go through the
    vocabulary's head. longest: the longest sequence. ptx: mean tokens of a row of ptx_data.
    source: where the figures are from, for the user.
    """

    count: int = 0
    sequences: float = 1.0
    tokens: float = 1.0
    answered: float = 1.0
    longest: int = 1
    ptx: float = 0.0
    source: str = ""


def rows_of(lengths: Sequence[Sequence[tuple[int, int]]], count: int, source: str) -> Rows:
    """Of rows measured one by one.

    Args:
        lengths: per row, (tokens, answered tokens) of each of its sequences; at least one row.
        count: of all rows, of which these may be a sample.
    """
    number = len(lengths)
    return Rows(
        count=count,
        sequences=sum(map(len, lengths)) / number,
        tokens=sum(tokens for row in lengths for tokens, _ in row) / number,
        answered=sum(answered for row in lengths for _, answered in row) / number,
        longest=max(tokens for row in lengths for tokens, _ in row),
        source=source,
    )
