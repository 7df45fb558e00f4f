"""How long the rows of a stage are: what its work and memory follow from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

S = TypeVar("S", str, tuple[int, ...])
"""A text, or its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows that a stage trains on, or its prompts.

    count: rows; 0: not known. sequences: that a row puts through the model (a pair: 2). tokens,
    answered: mean of a row's tokens over all its sequences, a prompt that they share once, and of
    those that go through the vocabulary's head. longest: the longest sequence; widest: the tokens
    of the longest row (0: of its sequences, each the longest). cost, dearest: mean and most of what
    a row takes of a micro-batch's tokens, every sequence counted as its longest (0: its tokens).
    alike: tokens that rows begin with alike, a micro-batch's first excepted, in whole blocks.
    ptx: mean tokens of a row of ptx_data. heldout: the run's, if they are known. source: where the
    figures are from, for the user.
    """

    count: int = 0
    sequences: float = 1.0
    tokens: float = 1.0
    answered: float = 1.0
    longest: int = 1
    widest: int = 0
    cost: float = 0.0
    dearest: int = 0
    alike: int = 0
    ptx: float = 0.0
    heldout: Heldout | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heldout:
    """The rows that no stage of a run trains on, by kind, each of their sequences as a row (a pair:
    two); `Rows()` where there are none. labelled: answers to one prompt are read together, with the
    prompt once in `tokens`, not in `cost`."""

    texts: Rows = Rows()
    pairs: Rows = Rows()
    graded: Rows = Rows()
    labelled: Rows = Rows()
    prompts: Rows = Rows()
    ptx: Rows = Rows()


def recorded_rows(values: Mapping[str, Any]) -> Rows:
    """Rows from their fields, as a record of a run has them; before held-out rows were recorded
    these were None."""
    heldout = values.get("heldout")
    kinds = heldout and {kind: Rows(**found) for kind, found in heldout.items()}
    return Rows(**{**values, "heldout": kinds and Heldout(**kinds)})


def rows_of(lengths: Sequence[Sequence[tuple[int, int]]], count: int, source: str) -> Rows:
    """Of rows measured one by one.

    Args:
        lengths: per row, (tokens, answered tokens) of each of its sequences, which begin with the
            same prompt; at least one row.
        count: of all rows, of which these may be a sample.
    """
    number = len(lengths)
    computed = [_computed(row) for row in lengths]
    costs = [len(row) * max(tokens for tokens, _ in row) for row in lengths]
    return Rows(
        count=count,
        sequences=sum(map(len, lengths)) / number,
        tokens=sum(computed) / number,
        answered=sum(answered for row in lengths for _, answered in row) / number,
        longest=max(tokens for row in lengths for tokens, _ in row),
        widest=max(computed),
        cost=sum(costs) / number,
        dearest=max(costs),
        source=source,
    )


def common_beginning(sequences: Iterable[S]) -> S | None:
    """What a sequence begins with like another one: of most, if not of all; None of fewer than two.

    Of all, each has most in common with one next to it in their order; the median of these.
    """
    common = sorted((_common(a, b) for a, b in pairwise(sorted(sequences))), key=len)
    return common[(len(common) - 1) // 2] if common else None


def _common(a: S, b: S) -> S:
    pairs = enumerate(zip(a, b, strict=False))
    return a[: next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))]


def _computed(row: Sequence[tuple[int, int]]) -> int:
    """Tokens of a row's sequences, the prompt before their answers once."""
    whole = sum(tokens for tokens, _ in row)
    return whole - (len(row) - 1) * min(tokens - answered for tokens, answered in row)
